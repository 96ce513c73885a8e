"""Tiny random configs of every family, for tests and `longspan parity`: `tiny("qwen3")`, or "tiny:qwen3" as a model
name.

Vocabulary 97 (prime: it catches divisibility assumptions), 2 layers, hidden 32, 4 query and 2 KV heads of 8.
Weights are drawn wide (std 0.15), so that attention is far from uniform and an error in it shows. No downloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolLM3Config,
)

from longspan.errors import UserError

__all__ = ["TINY", "tiny"]

VOCAB = 97
# The last ids of the vocabulary: image, video, vision start, vision end.
IMAGE_ID, VIDEO_ID, VISION_START_ID, VISION_END_ID = 93, 94, 95, 96

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
# 3 heads of 8 where the text has 4: the tower must never be cut by the decoder's heads (bugs G14).
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_heads": 3,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "initializer_range": 0.15,
}
MEDIA_IDS: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "video_token_id": VIDEO_ID,
    "vision_start_token_id": VISION_START_ID,
    "vision_end_token_id": VISION_END_ID,
}


def _llama(**over: Any) -> PretrainedConfig:
    return LlamaConfig(**{**TEXT, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], **over})


def _mistral(**over: Any) -> PretrainedConfig:
    own = {"sliding_window": 8, "tie_word_embeddings": False, "architectures": ["MistralForCausalLM"]}
    return MistralConfig(**{**TEXT, **own, **over})


def _qwen2(**over: Any) -> PretrainedConfig:
    own = {"tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"]}
    return Qwen2Config(**{**TEXT, **own, **over})


def _qwen3(**over: Any) -> PretrainedConfig:
    return Qwen3Config(**{**TEXT, "tie_word_embeddings": True, "architectures": ["Qwen3ForCausalLM"], **over})


def _qwen3_vl(
    *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **over: Any
) -> PretrainedConfig:
    own = {"tie_word_embeddings": True, "architectures": ["Qwen3VLForConditionalGeneration"]}
    text_config = {**TEXT, "rope_parameters": dict(MROPE), "tie_word_embeddings": True, **(text or {})}
    vision_config = {**TOWER, "deepstack_visual_indexes": [0], **(vision or {})}
    return Qwen3VLConfig(text_config=text_config, vision_config=vision_config, **{**MEDIA_IDS, **own, **over})


# Recurrent, full attention, recurrent; 2 key and 4 value heads of 8 and 16; half of a head of 16 is rotated.
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
HALF_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def _qwen3_5(**over: Any) -> PretrainedConfig:
    own = {"rope_parameters": {**MROPE, **HALF_ROPE}, "architectures": ["Qwen3_5ForCausalLM"]}
    return Qwen3_5TextConfig(**{**TEXT, **HYBRID, **own, "tie_word_embeddings": True, **over})


def _qwen3_5_mtp(**over: Any) -> PretrainedConfig:
    """With a multi-token-prediction head of one layer."""
    return _qwen3_5(**{"mtp_num_hidden_layers": 1, **over})


def _qwen3_5_vl(
    *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **over: Any
) -> PretrainedConfig:
    own = {"tie_word_embeddings": True, "architectures": ["Qwen3_5ForConditionalGeneration"]}
    rope = {**MROPE, **HALF_ROPE}
    text_config = {**TEXT, **HYBRID, "rope_parameters": rope, "tie_word_embeddings": True, **(text or {})}
    vision_config = {**TOWER, **(vision or {})}
    return Qwen3_5Config(text_config=text_config, vision_config=vision_config, **{**MEDIA_IDS, **own, **over})


def _qwen3_5_vl_mtp(**over: Any) -> PretrainedConfig:
    """With a multi-token-prediction head of one layer."""
    return _qwen3_5_vl(**{**over, "text": {"mtp_num_hidden_layers": 1, **over.get("text", {})}})


# 4 experts, 2 a token, and a shared one in each layer.
SHARED_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def _qwen3_5_moe(**over: Any) -> PretrainedConfig:
    own = {"rope_parameters": {**MROPE, **HALF_ROPE}, "tie_word_embeddings": False}
    named = {"architectures": ["Qwen3_5MoeForCausalLM"]}
    return Qwen3_5MoeTextConfig(**{**TEXT, **HYBRID, **SHARED_EXPERTS, **own, **named, **over})


def _qwen3_5_vl_moe(
    *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **over: Any
) -> PretrainedConfig:
    own = {"tie_word_embeddings": False, "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    rope = {"rope_parameters": {**MROPE, **HALF_ROPE}}
    text_config = {**TEXT, **HYBRID, **SHARED_EXPERTS, **rope, **(text or {})}
    vision_config = {**TOWER, **(vision or {})}
    return Qwen3_5MoeConfig(text_config=text_config, vision_config=vision_config, **{**MEDIA_IDS, **own, **over})


def _qwen3_5_moe_mtp(**over: Any) -> PretrainedConfig:
    """With a multi-token-prediction head of two layers, which have experts too."""
    return _qwen3_5_moe(**{"mtp_num_hidden_layers": 2, **over})


def _qwen3_next(**over: Any) -> PretrainedConfig:
    """4 experts, 2 a token, and a shared one; the middle layer is dense."""
    experts = {**SHARED_EXPERTS, "mlp_only_layers": [1]}
    own = {"rope_parameters": dict(HALF_ROPE)}
    named = {"tie_word_embeddings": False, "architectures": ["Qwen3NextForCausalLM"]}
    return Qwen3NextConfig(**{**TEXT, **HYBRID, **experts, **own, **named, **over})


def _qwen3_next_mtp(**over: Any) -> PretrainedConfig:
    """With a multi-token-prediction head of one layer, which has experts too."""
    return _qwen3_next(**{"mtp_num_hidden_layers": 1, **over})


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def _qwen3_moe(**over: Any) -> PretrainedConfig:
    own = {"norm_topk_prob": True, "tie_word_embeddings": False, "architectures": ["Qwen3MoeForCausalLM"]}
    return Qwen3MoeConfig(**{**TEXT, **EXPERTS, **own, **over})


def _qwen3_vl_moe(
    *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **over: Any
) -> PretrainedConfig:
    own = {"tie_word_embeddings": False, "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    text_config = {**TEXT, **EXPERTS, "rope_parameters": dict(MROPE), **(text or {})}
    vision_config = {**TOWER, "deepstack_visual_indexes": [0], **(vision or {})}
    return Qwen3VLMoeConfig(text_config=text_config, vision_config=vision_config, **{**MEDIA_IDS, **own, **over})


def _gpt_oss(**over: Any) -> PretrainedConfig:
    """Sinks, a window of 8 in the first layer, biases everywhere."""
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "attention_bias": True}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    named = {"rope_parameters": rope, "tie_word_embeddings": False, "architectures": ["GptOssForCausalLM"]}
    return GptOssConfig(**{**TEXT, **WINDOWED, **own, **named, **over})


def _gemma3(**over: Any) -> PretrainedConfig:
    """A window of 8 in the first layer, other RoPE bases by layer type, soft-capped logits."""
    own = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0}
    named = {"tie_word_embeddings": True, "architectures": ["Gemma3ForCausalLM"]}
    return Gemma3TextConfig(**{**TEXT, **WINDOWED, **own, **named, **over})


def _decoder(config: type[PretrainedConfig], architecture: str, **own: Any) -> Callable[..., PretrainedConfig]:
    """A dense decoder with nothing of its own but `own`."""
    named = {"tie_word_embeddings": False, "architectures": [architecture]}
    return lambda **over: config(**{**TEXT, **named, **own, **over})


TINY: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "glm4": _decoder(Glm4Config, "Glm4ForCausalLM"),
    "ministral": _decoder(MinistralConfig, "MinistralForCausalLM", **WINDOWED),
    "olmo2": _decoder(Olmo2Config, "Olmo2ForCausalLM"),
    "olmo3": _decoder(Olmo3Config, "Olmo3ForCausalLM", **WINDOWED),
    "phi3": _decoder(Phi3Config, "Phi3ForCausalLM", sliding_window=8),
    "smollm3": _decoder(SmolLM3Config, "SmolLM3ForCausalLM", no_rope_layers=[1, 0]),
    "qwen3_vl": _qwen3_vl,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_mtp": _qwen3_5_mtp,
    "qwen3_5_vl": _qwen3_5_vl,
    "qwen3_5_vl_mtp": _qwen3_5_vl_mtp,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_5_moe_mtp": _qwen3_5_moe_mtp,
    "qwen3_5_vl_moe": _qwen3_5_vl_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_next_mtp": _qwen3_next_mtp,
}


def tiny(family: str, **overrides: Any) -> PretrainedConfig:
    """The tiny config of `family`, with fields replaced by `overrides` (VLMs: `text={...}`, `vision={...}`)."""
    if family not in TINY:
        raise UserError(f"tiny family {family!r} is unknown; known: {', '.join(sorted(TINY))}")
    return TINY[family](**overrides)
