"""Attention of one rank alone: packed documents, one kernel call. Also what every mixer does for a row of one rank.

`packed_attention` is the same for callers without a SeqInfo, such as vision towers: boundaries in, not causal if asked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.layout.seqinfo import SeqInfo
from longspan.mixers.attention import (
    Saved,
    SizeCheck,
    Upstream,
    Work,
    core_attention,
    partial_softmax,
    run_backward,
    run_forward,
)
from longspan.mixers.blocks import Call, documents_call
from longspan.mixers.kernels import Block, Kernel
from longspan.mixers.merge import Sum

__all__ = ["Local", "LocalPrepared", "packed_attention"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalPrepared:
    """One call over the rank's own rows."""

    call: Call

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """See attention.Prepared."""
        total = partial_softmax(q, v)
        run_forward(total, (self.call,), q, k, v, work)
        return total.result()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See attention.Prepared."""
        sums = Sum(q), Sum(k), Sum(v)
        run_backward(sums, (self.call,), Upstream(dout, q, out, lse), k, v, work)
        return sums[0].result(), sums[1].result(), sums[2].result()


@dataclass(frozen=True, slots=True)
class Local:
    """CP size 1."""

    name: str = "local"

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """Only one rank."""
        return lambda size: None if size == 1 else f"mixer 'local' runs on one rank, got cp={size}"

    def prepare(self, info: SeqInfo, device: torch.device) -> LocalPrepared:
        """The documents of the whole stream."""
        assert info.size == 1, f"a row on {info.size} ranks needs a mixer that crosses them"
        return LocalPrepared(documents_call(info.cu_seqlens.diff().tolist(), device))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: LocalPrepared,
        *,
        scale: float,
        kernel: Kernel,
        window: int | None = None,
        sink: Tensor | None = None,
        saved: Saved | None = None,
    ) -> Tensor:
        """See attention.Mixer."""
        return core_attention(prepared, q, k, v, work=Work(kernel, scale, window), sink=sink, saved=saved)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,  # [S+1] int32, on the device of q
    *,
    max_len: int,
    causal: bool,
    scale: float,
    kernel: Kernel,
) -> Tensor:
    """Attention inside each segment of cu_seqlens; differentiable. No rank but this one, no sink, no window."""
    kind = "causal" if causal else "full"
    block = Block(cu_seqlens, cu_seqlens, max_len, max_len, kind, offset=())
    return core_attention(LocalPrepared(Call(None, None, block, fresh=True)), q, k, v, work=Work(kernel, scale, None))
