"""Hybrid text decoders: Qwen3.5 (dense and MoE) and Qwen3-Next, Gated DeltaNet layers with full attention every few
layers.

Recurrent: token order is kept (`contiguous`), zigzag is refused. Full-attention layers (output gate, partial rotary)
go through the attention bridge as in any decoder; each DeltaNet instance is replaced while building
(qwen3_5_deltanet.py). Positions restart at 0 in every sample. Qwen3.5's RoPE has three axes, equal for text.
Multi-token prediction heads: models/mtp.py.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from longspan.models.adapter import Family
from longspan.models.hf_text import TextAdapter, sizes
from longspan.models.mtp import make_mtp_head
from longspan.models.qwen3_5_deltanet import replace_deltanets

__all__ = ["FAMILIES"]


def hybrid_text_adapter(model: PreTrainedModel, folder: str | None) -> TextAdapter:
    return TextAdapter(
        model,
        **sizes(model),
        windowed=False,
        recurrent=True,
        linear_shape=replace_deltanets(model),
        mtp=make_mtp_head(model, model.model, folder),
    )


SHARED = ("DecoderLayer", "Attention", "MLP", "RMSNorm", "RMSNormGated", "GatedDeltaNet")
EXPERTS = ("SparseMoeBlock", "TopKRouter", "Experts")


def _family(prefix: str, *more: str) -> Family:
    """Conv1d is the convolution of a GatedDeltaNet, which replaces its forward; no other layer here has one."""
    return Family(
        build=hybrid_text_adapter,
        modules=frozenset(["Conv1d"] + [f"{prefix}{part}" for part in ("ForCausalLM", *SHARED, *more)]),
    )


FAMILIES = {
    "Qwen3_5ForCausalLM": _family("Qwen3_5", "TextModel", "TextRotaryEmbedding"),
    "Qwen3_5MoeForCausalLM": _family("Qwen3_5Moe", "TextModel", "TextRotaryEmbedding", *EXPERTS),
    "Qwen3NextForCausalLM": _family("Qwen3Next", "Model", "RotaryEmbedding", *EXPERTS),
}
