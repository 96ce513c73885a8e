"""The one kernel interface: packed attention of query runs against key runs.

Shapes: q [Tq, H, D], k [Tk, H_kv, D], v [Tk, H_kv, Dv] -> out [Tq, H, Dv] (dtype of q) and lse [H, Tq]
(natural log, f32; f64 for f64). H is a multiple of H_kv; query head h reads KV head h // (H / H_kv). Rows may be
strided (views), the last dim is contiguous. A row that sees no key has out 0 and lse -inf.

A `Block` pairs segment i of the queries with segment i of the keys; nothing else is visible. A window W hides every
key with position <= (query position) - W. Positions count inside a document; `offset` ties both sides together.
Choice of a kernel: choose.py. The definition: reference.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from longspan.layout.travel import sent

__all__ = ["Block", "Kernel", "heads_first"]


@dataclass(frozen=True, slots=True)
class Block:
    """One varlen attention: S segments of queries, S segments of keys, made once per micro-step."""

    cu_q: Tensor  # [S+1] int32 on the device (kernels reject int64): boundaries of the query segments
    cu_k: Tensor  # [S+1] int32 on the device: boundaries of the key segments
    max_q: int  # longest query segment
    max_k: int  # longest key segment
    kind: Literal["causal", "full"]  # causal is bottom-right aligned: query i sees keys j <= i + len_k - len_q
    offset: tuple[
        int, ...
    ]  # per segment: position of the first query minus that of the first key; () if never windowed
    lens_q: tuple[int, ...] | None = None  # per segment, on the host; None when only the device knows
    lens_k: tuple[int, ...] | None = None

    @classmethod
    def make(
        cls,
        lens_q: Sequence[int],
        lens_k: Sequence[int],
        *,
        kind: Literal["causal", "full"],
        device: torch.device,
        offset: Sequence[int] | None = None,
    ) -> "Block":
        """A block from host lengths; the default offset is the bottom-right one, len_k - len_q."""
        assert len(lens_q) == len(lens_k) and len(lens_q) > 0, (lens_q, lens_k)
        if offset is None:
            offset = [k - q for q, k in zip(lens_q, lens_k, strict=True)]
        return cls(
            cu_q=_boundaries(lens_q, device),
            cu_k=_boundaries(lens_k, device),
            max_q=max(lens_q),
            max_k=max(lens_k),
            kind=kind,
            offset=tuple(offset),
            lens_q=tuple(lens_q),
            lens_k=tuple(lens_k),
        )

    @property
    def shift(self) -> int:
        """offset - (len_k - len_q): one value for all segments of a windowed block, 0 <= shift < window.

        FlashAttention, whose windows are bottom-right aligned, takes window_left = window - 1 - shift.
        """
        assert self.lens_q is not None and self.lens_k is not None, "a windowed block needs host lengths"
        shifts = {o - (k - q) for o, q, k in zip(self.offset, self.lens_q, self.lens_k, strict=True)}
        assert len(shifts) == 1, f"a windowed block needs one shift, got {sorted(shifts)}"
        return shifts.pop()


class Kernel(Protocol):
    """Forward and backward of one block. Stateless: same inputs, same result."""

    @property
    def name(self) -> str:
        """Shown at start and in reports."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """out [Tq, H, Dv] in the dtype of q, lse [H, Tq] f32 (f64 for f64)."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this block. out and lse may be those of a larger softmax (ring, sink).

        Results may have the dtype of q or f32 and any strides; whoever calls adds them up in f32 (f64 for f64).
        """
        ...


def heads_first(like: Tensor, rows: int, heads: int, dim: int) -> Tensor:
    """Room for a gradient [rows, heads, dim] that lies in memory as [heads, rows, dim]: as compiled layers want those of
    q, k and v (engine/fsdp/compiled.py)."""
    return like.new_empty(heads, rows, dim).transpose(0, 1)


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    return sent(torch.tensor(cu, dtype=torch.int32), device)
