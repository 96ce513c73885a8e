"""Attention of the hybrid families (Qwen3.5, Qwen3-Next) in a megatron-core layer: gated attention and Gated DeltaNet.

Both stand where megatron-core's SelfAttention does, [T, 1, E] -> [T, 1, E], on the project's column and row linears:
a tensor-parallel rank has H / tp heads, their columns, convolution channels and decays, and whole norms. Written here
because megatron-core's own gate computes in fp32 at every dtype and its GatedDeltaNet takes a static CP group.
Arithmetic as in models/qwen3_5_deltanet.py and transformers' modeling files.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.engine.megatron.collectives import pad_rows
from longspan.engine.megatron.layers import Column, CoreAttention, Row, StreamParams, ZeroNorm
from longspan.engine.megatron.shape import Shape, own_delta
from longspan.layout import CPGroup
from longspan.mixers.linear import DeltaWeights, gated_delta
from longspan.models.norms import GatedRMSNorm

__all__ = ["DeltaNet", "GatedAttention", "Linears"]


OWN: dict[str, Any] = {"init_method": nn.init.zeros_, "bias": False, "skip_bias_add": False}


@dataclass(frozen=True, slots=True)
class Linears:
    """How the linears of a layer are cut."""

    tp: CPGroup
    rows: bool  # sequence parallelism

    def column(self, inputs: int, outputs: int, config: Any, groups: Any) -> Column:
        cut = {"tp": self.tp, "rows": self.rows, "tp_group": groups.tp, "gather_output": False}
        return Column(inputs, outputs, config=config, **cut, **OWN)

    def row(self, inputs: int, outputs: int, config: Any, groups: Any) -> Row:
        cut = {"tp": self.tp, "rows": self.rows, "tp_group": groups.tp, "input_is_parallel": True}
        return Row(inputs, outputs, config=config, **cut, **OWN)


class GatedAttention(nn.Module):
    """Softmax attention whose output each head multiplies by a sigmoid: q and its gate come from one projection."""

    def __init__(
        self, *, shape: Shape, linears: Linears, config: Any, layer_number: int, pg_collection: Any, **_: object
    ) -> None:
        super().__init__()
        self.dim = shape.head_dim
        queries, keys = shape.num_heads * self.dim, shape.num_kv_heads * self.dim
        self.widths = [2 * queries // shape.tp, keys // shape.tp, keys // shape.tp]
        self.linear_qkv = linears.column(shape.hidden_size, 2 * queries + 2 * keys, config, pg_collection)
        self.linear_proj = linears.row(queries, shape.hidden_size, config, pg_collection)
        self.q_layernorm = ZeroNorm(config=config, hidden_size=self.dim, eps=shape.norm_eps)
        self.k_layernorm = ZeroNorm(config=config, hidden_size=self.dim, eps=shape.norm_eps)
        self.core_attention = CoreAttention(windows=shape.windows, layer_number=layer_number, config=config)

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: StreamParams, **_: object
    ) -> tuple[Tensor, None]:
        mixed = self.linear_qkv(hidden_states)[0].squeeze(1)  # [T, O / tp]
        q, k, v = (
            part.unflatten(1, (-1, size)) for part, size in zip(mixed.split(self.widths, 1), self._sizes, strict=True)
        )
        q, gate = q.chunk(2, -1)  # [T, H / tp, 2 D] -> [T, H / tp, D] twice
        out = self.core_attention(
            self.q_layernorm(q), self.k_layernorm(k), v, attention_mask, packed_seq_params=packed_seq_params
        )
        return self.linear_proj(out * torch.sigmoid(gate.flatten(1))[:, None])

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return 2 * self.dim, self.dim, self.dim


class DeltaNet(nn.Module):
    """Gated DeltaNet on this rank's heads; tokens meet across ranks in mixers/linear.py."""

    def __init__(
        self, *, shape: Shape, linears: Linears, config: Any, layer_number: int, pg_collection: Any, **_: object
    ) -> None:
        super().__init__()
        whole = shape.delta
        assert whole is not None, "a model with recurrent layers"
        self.own = own_delta(whole, shape.tp)
        self.layer, self.interleaved = layer_number - 1, shape.interleaved_delta
        values = whole.value_heads * whole.value_dim
        inputs = sum(whole.channels) + values + 2 * whole.value_heads
        self.linear_in = linears.column(shape.hidden_size, inputs, config, pg_collection)
        self.linear_proj = linears.row(values, shape.hidden_size, config, pg_collection)
        make = {"dtype": config.params_dtype}
        self.conv = nn.Parameter(torch.empty(sum(self.own.channels), 1, shape.conv_size, **make))
        self.A_log = nn.Parameter(torch.empty(self.own.value_heads, **make))
        self.dt_bias = nn.Parameter(torch.empty(self.own.value_heads, **make))
        weight = nn.Parameter(torch.empty(whole.value_dim, **make))
        self.norm = GatedRMSNorm(SimpleNamespace(weight=weight, variance_epsilon=shape.norm_eps))

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: StreamParams, **_: object
    ) -> tuple[Tensor, None]:
        context = packed_seq_params.context
        assert context is not None, "StreamParams comes filled"
        made = self.linear_in(hidden_states)[0].squeeze(1)
        tokens, real = made.shape[0], context.info.num_local
        mixed, z, b, a = (self._by_head if self.interleaved else self._by_kind)(made[:real])
        out_THD = gated_delta(
            mixed,
            b,
            a,
            DeltaWeights(self.conv[:, 0], self.A_log, self.dt_bias),
            shape=self.own,
            prepared=context.scratch["linear"],
            layer=self.layer,
        )
        normed = self.norm(out_THD.reshape(-1, self.own.value_dim), z.reshape(-1, self.own.value_dim))
        return self.linear_proj(pad_rows(normed.reshape(real, -1), tokens)[:, None])

    def _by_kind(self, made: Tensor) -> list[Tensor]:
        """Qwen3.5: [q k v | z | b | a]."""
        own = self.own
        values = own.value_heads * own.value_dim
        return list(made.split([sum(own.channels), values, own.value_heads, own.value_heads], 1))

    def _by_head(self, made: Tensor) -> list[Tensor]:
        """Qwen3-Next: [q k v z of each key head | b a of each key head]."""
        own, tokens = self.own, made.shape[0]
        copies = own.value_heads // own.key_heads
        values = copies * own.value_dim
        sizes = [own.key_heads * 2 * (own.key_dim + values), 2 * own.value_heads]
        qkvz, ba = (part.reshape(tokens, own.key_heads, -1) for part in made.split(sizes, 1))
        q, k, v, z = qkvz.split([own.key_dim, own.key_dim, values, values], 2)
        b, a = ba.split([copies, copies], 2)
        mixed = torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], 1)
        return [mixed, z.reshape(tokens, -1), b.reshape(tokens, -1), a.reshape(tokens, -1)]
