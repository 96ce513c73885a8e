"""The modules that our megatron-core layer spec names beside megatron-core's own.

Norm: Hugging Face's RMSNorm, bit for bit (megatron-core's torch norm refuses sequence parallelism).
Column, Row: megatron-core's linears with the project's matmuls (linears.py): megatron-core's allocate on CUDA by name under
sequence parallelism, and round what ranks sum. megatron-core itself is told sequence_parallel=False.
CoreAttention: rope from the angles of `StreamParams`, then the micro-step's mixer.
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longspan.engine.megatron.collectives import pad_rows
from longspan.engine.megatron.linears import column, row
from longspan.engine.megatron.lora import Adapters, fuse
from longspan.engine.megatron.upstream import ColumnParallelLinear, PackedSeqParams, RowParallelLinear
from longspan.layout import CPGroup
from longspan.mixers.precision import accumulator
from longspan.models.adapter import Context

__all__ = ["Column", "CoreAttention", "Norm", "Row", "StreamParams", "ZeroNorm"]


@dataclasses.dataclass
class StreamParams(PackedSeqParams):
    """What megatron-core hands to every layer of one micro-step."""

    context: Context | None = None
    cos: Tensor | None = None  # [T_local, 1, D]
    sin: Tensor | None = None
    deepstack: tuple[Tensor, ...] = ()  # by layer: [rows of this rank, 1, E] to add to its output
    adapter_ids: Tensor | None = None  # [T_local] int64: which LoRA adapter a token trains; None without


class Norm(nn.Module):
    """x / rms(x) * weight over the last dim: normalised in fp32, multiplied in x's dtype, as Hugging Face."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class ZeroNorm(Norm):
    """x / rms(x) * (1 + weight): Qwen3.5's and Qwen3-Next's; the product in fp32, in fp64 for fp64 (models/norms.py)."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulator(x.dtype))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class Column(ColumnParallelLinear):
    """[T, 1, E] -> [T, 1, O / tp]. rows: under sequence parallelism [T / tp, 1, E] comes in."""

    def __init__(self, *args: Any, tp: CPGroup, rows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp, self.rows = tp, rows
        self.adapters: Adapters | None = None
        self.form: Literal["one", "qkv", "stack"] = "one"
        self.groups = 1  # key-value heads of this rank, for form "qkv"

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        out = column(input_, self.weight, None if self.skip_bias_add else self.bias, self.tp, rows=self.rows)
        if self.adapters is not None:
            out = out + fuse(self.adapters(input_), self.form, self.groups)
        return out, self.bias if self.skip_bias_add else None


class Row(RowParallelLinear):
    """[T, 1, I / tp] -> [T, 1, O], summed over tp; under sequence parallelism each rank keeps its rows."""

    def __init__(self, *args: Any, tp: CPGroup, rows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tp, self.rows = tp, rows
        self.adapters: Adapters | None = None

    def forward(self, input_: Tensor) -> Any:
        extra = None if self.adapters is None else self.adapters(input_)[0]
        return row(input_, self.weight, extra, self.tp, rows=self.rows), None


class CoreAttention(nn.Module):
    """q [T, H / tp, D], k, v [T, H_kv / tp, D] -> [T, 1, H / tp * D]; rows past the stream's are padding."""

    def __init__(self, *, windows: tuple[int | None, ...], layer_number: int, config: Any, **_: object) -> None:
        super().__init__()
        self.window = windows[layer_number - 1]
        self.scale = config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: StreamParams,
        **_: object,
    ) -> Tensor:
        context, cos, sin = packed_seq_params.context, packed_seq_params.cos, packed_seq_params.sin
        assert context is not None and cos is not None and sin is not None, "StreamParams comes filled"
        rows, real = query.shape[0], cos.shape[0]
        out = context.mixer.attend(
            rotate(query[:real], cos, sin),
            rotate(key[:real], cos, sin),
            value[:real],
            context.prepared,
            scale=self.scale,
            window=self.window,
            kernel=context.kernel,
            saved=context.slot(self),
        )
        return pad_rows(out, rows).reshape(rows, 1, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as Hugging Face applies it: halves of the first dims that have an angle, in x's dtype."""
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned
