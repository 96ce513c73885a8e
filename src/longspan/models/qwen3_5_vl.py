"""Qwen3.5 with its vision tower: Qwen3-VL's adapter without DeepStack, in front of the hybrid decoder of qwen3_5.py.

Positions [3, L] and `media_row` [L] are made per sample on the CPU, before packing, by Qwen3-VL's rules (videos are
frames with timestamps between them). Recurrent: `contiguous` only. HF's own multimodal forward is bypassed.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from longspan.models.adapter import Family
from longspan.models.hf_text import sizes
from longspan.models.mtp import make_mtp_head
from longspan.models.qwen3_5 import EXPERTS, SHARED
from longspan.models.qwen3_5_deltanet import replace_deltanets
from longspan.models.qwen3_vl import TOWER, VisionAdapter, qwen3_vl_media, with_tower

__all__ = ["FAMILIES"]


def qwen3_5_vl_adapter(model: PreTrainedModel, folder: str | None) -> VisionAdapter:
    return VisionAdapter(
        model,
        **sizes(model),
        **with_tower(model, folder),
        deepstack=False,
        recurrent=True,
        linear_shape=replace_deltanets(model),
        mtp=make_mtp_head(model, model.model.language_model, folder),
    )


def _family(prefix: str, *more: str) -> Family:
    names = ["ForConditionalGeneration", "Model", "TextModel", "TextRotaryEmbedding", *SHARED, *more]
    names += [f"Vision{part}" for part in TOWER]
    return Family(
        build=qwen3_5_vl_adapter,
        media=qwen3_vl_media,
        modules=frozenset(["Conv1d"] + [f"{prefix}{name}" for name in names]),
    )


FAMILIES = {
    "Qwen3_5ForConditionalGeneration": _family("Qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": _family("Qwen3_5Moe", *EXPERTS),
}
