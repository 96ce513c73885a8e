"""The models that whole steps are timed on: published widths and depths, random weights; and rows of samples for them.

    qwen3-1.7b    28 layers of 2,048, 16/8 heads of 128, vocabulary 151,936, tied
    qwen3-8b      36 layers of 4,096, 32/8 heads of 128, vocabulary 151,936; LoRA of rank 16 on every linear layer
    qwen3-vl-2b   qwen3-1.7b's decoder with a tower of 24 blocks of 1,024 (16 heads of 64), DeepStack after 5, 11 and 17
    qwen3.5-0.8b  24 layers of 1,024, every fourth with 8/2 heads of 256, the others Gated DeltaNet of 16/16 heads of 128,
                  vocabulary 248,320, tied; text only

A row with images: IMAGE x IMAGE pixels give 1,024 visual tokens each; half of the tokens are visual.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from transformers import PretrainedConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3VLConfig

from longspan import Image, Sample
from longspan.models.adapter import Adapter
from longspan.models.tiny import tiny

IMAGE = 1024  # pixels a side
QWEN3: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**20,
    "vocab_size": 151936,
}
SMALL: dict[str, Any] = {
    **QWEN3,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TOWER: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}


def qwen3_1_7b(**over: Any) -> PretrainedConfig:
    return Qwen3Config(**{**SMALL, "architectures": ["Qwen3ForCausalLM"], **over})


def qwen3_8b(**over: Any) -> PretrainedConfig:
    own = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    return Qwen3Config(**{**QWEN3, **own, "tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"], **over})


def qwen3_vl_2b(*, vision: dict[str, Any] | None = None, **over: Any) -> PretrainedConfig:
    return Qwen3VLConfig(
        text_config={**SMALL, "rope_parameters": dict(MROPE), **over},
        vision_config={**TOWER, **(vision or {})},
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )


def qwen3_5_0_8b(**over: Any) -> PretrainedConfig:
    layers = over.get("num_hidden_layers", 24)
    own = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 2**20,
        "tie_word_embeddings": True,
        "architectures": ["Qwen3_5ForCausalLM"],
    }
    return Qwen3_5TextConfig(**{**own, **over})


# name -> (real config, the tiny family that --smoke runs instead)
SHAPES: dict[str, tuple[Callable[..., PretrainedConfig], str]] = {
    "qwen3-1.7b": (qwen3_1_7b, "qwen3"),
    "qwen3-8b": (qwen3_8b, "qwen3"),
    "qwen3-vl-2b": (qwen3_vl_2b, "qwen3_vl"),
    "qwen3.5-0.8b": (qwen3_5_0_8b, "qwen3_5"),
}
LORA = {"qwen3-8b": 16}
LINEAR = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def config_of(name: str, smoke: bool, **over: Any) -> PretrainedConfig:
    make, family = SHAPES[name]
    return tiny(family) if smoke else make(**over)


def lora_of(name: str) -> dict[str, LoraConfig] | None:
    if name not in LORA:
        return None
    return {"bench": LoraConfig(r=LORA[name], lora_alpha=2 * LORA[name], target_modules=LINEAR)}


def batch(lengths: Sequence[int], vocab: int) -> list[Sample]:
    """Text samples of these lengths, every token trained on."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in lengths:
        ids = torch.randint(0, vocab, (length + 1,), generator=generator)
        samples.append(_sample(ids, torch.ones(length), generator, []))
    return samples


def picture_batch(lengths: Sequence[int], adapter: Adapter, side: int = IMAGE) -> list[Sample]:
    """Samples of these lengths of which about half are visual tokens: distinct images, each after as much text."""
    assert adapter.ids is not None and adapter.reader is not None
    generator, draw = torch.Generator().manual_seed(0), np.random.default_rng(0)
    ids = adapter.ids
    special = [ids.image, ids.video, ids.start, ids.end]
    text = min([adapter.vocab_size, *special])
    visual = (side // adapter.reader.factor) ** 2
    run = torch.tensor([ids.start, *[ids.image] * visual, ids.end])
    samples = []
    for length in lengths:
        images = max(1, length // (2 * visual)) if length > 2 * visual else 0
        words = torch.randint(0, text, (length + 1 - images * len(run),), generator=generator)
        media = [Image(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(images)]
        parts = [piece for chunk in words.tensor_split(images + 1) for piece in (chunk, run)][:-1]
        whole = torch.cat(parts)
        mask = (~torch.isin(whole[1:], torch.tensor(special))).float()
        samples.append(_sample(whole, mask, generator, media))
    return samples


def _sample(ids: torch.Tensor, mask: torch.Tensor, generator: torch.Generator, media: list[Image]) -> Sample:
    length = len(ids) - 1
    fields = {"advantage": torch.randn(length, generator=generator), "old_logprob": -torch.ones(length) * 12}
    return Sample(input_ids=ids[:-1], target_ids=ids[1:], mask=mask, fields=fields, media=media)
