"""Adapter for Hugging Face text decoders that take their attention from transformers' AttentionInterface.

Positions restart at 0 in every sample (made on the CPU before packing). Windows, sinks and soft caps come from the
model's own layers; routers and experts from moe.py and experts.py; recurrent layers and multi-token prediction heads
(qwen3_5.py) from qwen3_5_deltanet.py and mtp.py. A decoder is added by naming its module classes in FAMILIES, which is
a claim that no other layer mixes tokens (bugs D12). Does not know ranks, packing or losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longspan.data.pack import FieldSpec
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.layout.shard import Shard
from longspan.mixers.linear import DeltaShape
from longspan.models.adapter import Context, Family
from longspan.models.mtp import MTPHead, mtp_declared, mtp_tensors
from longspan.models.norms import replace_zero_centred_norms
from longspan.models.qwen3_5_deltanet import prepare_recurrent, recurrent_refusal
from longspan.models.vision import MediaShard

__all__ = ["FAMILIES", "TextAdapter", "sizes"]


@dataclass(slots=True)
class TextAdapter:
    """A decoder-only language model. See `Adapter` for the contract of every member."""

    model: PreTrainedModel
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windowed: bool
    softcap: float | None = None
    recurrent: bool = False
    linear_shape: DeltaShape | None = None  # of its recurrent layers
    reader: None = None
    ids: None = None
    mtp: MTPHead | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def units(self) -> list[nn.Module]:
        return list(self.model.base_model.layers)

    def parts(self) -> dict[str, tuple[str, ...]]:
        return {
            "vision": (),
            "merger": (),
            "language": ("model.layers.", "model.norm.", "lm_head."),
            "embeddings": ("model.embed_tokens.",),
        }

    def declared(self) -> dict[str, FieldSpec]:
        return {"position": FieldSpec(torch.int64, 0, ())} | mtp_declared(self.mtp)

    def sample_tensors(self, sample: Sample) -> dict[str, Tensor]:
        return {"position": torch.arange(len(sample.input_ids))} | mtp_tensors(self.mtp, sample)

    def media_tokens(self, sample: Sample) -> tuple[int, ...]:
        if sample.media:
            raise UserError(f"{len(sample.media)} media items given to {self.family}, which has no vision tower")
        return ()

    def hidden(self, shard: Shard, media: MediaShard | None, context: Context) -> Tensor:
        embeds_TE = self.model.get_input_embeddings()(shard.fields["input_ids"])
        if self.linear_shape is not None:
            prepare_recurrent(context, embeds_TE)
        out = self.model.base_model(
            inputs_embeds=embeds_TE[None],
            position_ids=shard.fields["position"][None],
            use_cache=False,
            longspan=context,
        )
        return out.last_hidden_state[0]

    def linear_refusal(self, how: str, size: int) -> str | None:
        return recurrent_refusal(how, size, self.linear_shape, self.family)

    def head(self) -> tuple[Tensor, Tensor | None, float | None]:
        linear = self.model.get_output_embeddings()
        return linear.weight, linear.bias, self.softcap


def text_adapter(model: PreTrainedModel, folder: str | None) -> TextAdapter:
    replace_zero_centred_norms(model)
    values = model.config.to_dict()
    return TextAdapter(
        model, **sizes(model), windowed=has_windows(values), softcap=values.get("final_logit_softcapping")
    )


def sizes(model: PreTrainedModel) -> dict[str, Any]:
    """The members that every adapter reads from its model's config."""
    text = model.config.get_text_config()
    return {
        "family": type(model).__name__,
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "num_heads": text.num_attention_heads,
        "num_kv_heads": text.num_key_value_heads,
        "head_dim": text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads,
    }


def has_windows(config: dict[str, object]) -> bool:
    """Whether any layer uses a sliding window: by layer type, or (Mistral) by the window alone."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return "sliding_attention" in kinds
    return config.get("sliding_window") is not None


def _family(prefix: str, *more: str) -> Family:
    return Family(text_adapter, frozenset(prefix + part for part in (*PARTS, *more)))


PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
FAMILIES = {
    "LlamaForCausalLM": _family("Llama"),
    "MistralForCausalLM": _family("Mistral"),
    "Qwen2ForCausalLM": _family("Qwen2"),
    "Qwen3ForCausalLM": _family("Qwen3"),
    "Glm4ForCausalLM": _family("Glm4"),
    "MinistralForCausalLM": _family("Ministral"),
    "Olmo2ForCausalLM": _family("Olmo2"),
    "Olmo3ForCausalLM": _family("Olmo3"),
    "Phi3ForCausalLM": _family("Phi3"),
    "SmolLM3ForCausalLM": _family("SmolLM3"),
    "Qwen3MoeForCausalLM": _family("Qwen3Moe", "SparseMoeBlock", "TopKRouter", "Experts"),
    "Gemma3ForCausalLM": _family("Gemma3", "TextModel", "TextScaledWordEmbedding"),
    "GptOssForCausalLM": _family("GptOss", "TopKRouter", "Experts"),
}
