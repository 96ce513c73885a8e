"""Adapter for hybrid text decoders: Qwen3.5 (dense and MoE) and Qwen3-Next, Gated DeltaNet layers with full attention
every few
layers.

Recurrent: token order is kept (`contiguous`), zigzag is refused. Full-attention layers (output gate, partial rotary)
go through the attention bridge as in any decoder; each DeltaNet instance is replaced while building
(qwen3_5_deltanet.py). Positions restart at 0 in every sample. Qwen3.5's RoPE has three axes, equal for text.
Multi-token prediction heads: models/mtp.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longspan.data.pack import FieldSpec
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.layout.shard import Shard
from longspan.mixers.linear import DeltaShape, heads_refusal, prepare_linear
from longspan.models.adapter import Context, Family
from longspan.models.mtp import MTPHead, make_mtp_head, mtp_declared, mtp_tensors
from longspan.models.qwen3_5_deltanet import replace_deltanets
from longspan.models.vision import MediaShard

__all__ = ["FAMILIES", "HybridTextAdapter", "prepare_recurrent"]


@dataclass(slots=True)
class HybridTextAdapter:
    """A decoder-only language model with recurrent layers. See `Adapter` for the contract of every member."""

    model: PreTrainedModel
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_shape: DeltaShape
    windowed: bool = False
    recurrent: bool = True
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

    def linear_refusal(self, how: str, size: int) -> str | None:
        return heads_refusal(size, self.linear_shape) if how == "heads" else None

    def hidden(self, shard: Shard, media: MediaShard | None, context: Context) -> Tensor:
        embeds_TE = self.model.get_input_embeddings()(shard.fields["input_ids"])
        prepare_recurrent(context, embeds_TE)
        out = self.model.base_model(
            inputs_embeds=embeds_TE[None],
            position_ids=shard.fields["position"][None],
            use_cache=False,
            longspan=context,
        )
        return out.last_hidden_state[0]

    def head(self) -> tuple[Tensor, Tensor | None, float | None]:
        linear = self.model.get_output_embeddings()
        return linear.weight, linear.bias, None


def prepare_recurrent(context: Context, embeds: Tensor) -> None:
    """Make this micro-step's pieces and kernel, for all recurrent layers and for their recomputation."""
    context.scratch["linear"] = prepare_linear(
        context.info, embeds.device, how=context.linear, dtype=embeds.dtype, selective=context.cache is not None
    )


def hybrid_text_adapter(model: PreTrainedModel, folder: str | None) -> HybridTextAdapter:
    config = model.config
    return HybridTextAdapter(
        model=model,
        family=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
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
