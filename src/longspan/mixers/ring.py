"""Ring attention: keys and values travel from rank to rank, partial softmaxes merge by LSE (Liu et al. 2023).

At step s rank r holds the keys of rank r - s. Own backward: keys travel the same way again; the gradients of a step's
keys go straight home in the keys' dtype (what one kernel call gives) and are added there in f32, in step order. Travels
overlap with the next step's calls. Step 0 is one causal call over the local documents. Then, for rank j:
    contiguous  j < r: at most one full block, the document that straddles both ranks; j > r: nothing
    zigzag      j < r: all queries against j's first chunks; j > r: the second chunks against all of j's; both full
A step without a visible pair computes nothing, and the ring stops at the farthest step that any rank needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from longspan.layout.seqinfo import SeqInfo, runs
from longspan.mixers.attention import (
    AnySize,
    ByWindow,
    Upstream,
    Work,
    partial_softmax,
    run_backward,
    run_forward,
)
from longspan.mixers.blocks import Call, documents_call, pair_calls, ranges, rows_of
from longspan.mixers.kernels import Block
from longspan.mixers.local import Local, LocalPrepared
from longspan.mixers.merge import Sum
from longspan.mixers.transport import Collective, Transport

__all__ = ["Ring", "RingPrepared", "reach"]


@dataclass(slots=True, eq=False)
class RingPrepared:
    """The calls of step 0, 1, ...: as many steps on every rank."""

    info: SeqInfo
    transport: Transport
    steps: ByWindow[tuple[tuple[Call, ...], ...]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """See attention.Prepared."""
        steps = self.steps(work.window)
        total = partial_softmax(q, v)
        for step, calls in enumerate(steps):
            arriving = self.transport.rotate((k, v), self.info.group) if step + 1 < len(steps) else None
            run_forward(total, calls, q, k, v, work)
            if arriving is not None:
                k, v = arriving.wait()
        return total.result()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See attention.Prepared."""
        steps, group = self.steps(work.window), self.info.group
        side = Upstream(dout, q, out, lse)
        sums = Sum(q), Sum(k), Sum(v)
        homing = []  # gradients of this rank's keys from the ranks that attended to them
        for step, calls in enumerate(steps):
            arriving = self.transport.rotate((k, v), group) if step + 1 < len(steps) else None
            parts = sums if step == 0 else (sums[0], Sum(k), Sum(v))
            run_backward(parts, calls, side, k, v, work)
            if step:
                homing.append(self.transport.rotate((parts[1].result(), parts[2].result()), group, hops=-step))
            if arriving is not None:
                k, v = arriving.wait()
        for arrival in homing:
            for total, part in zip(sums[1:], arrival.wait(), strict=True):
                total.add(None, part)
        dq, dk, dv = (total.result() for total in sums)
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class Ring(AnySize):
    """Any number of ranks and heads."""

    transport: Transport = field(default_factory=Collective)
    name: str = "ring"

    def prepare(self, info: SeqInfo, device: torch.device) -> RingPrepared | LocalPrepared:
        """The steps without a window; those of windowed layers follow at their first use."""
        if info.size == 1:
            return Local().prepare(info, device)
        prepared = RingPrepared(info, self.transport, ByWindow(lambda window: _make_steps(info, window, device)))
        prepared.steps(None)
        return prepared


def _make_steps(info: SeqInfo, window: int | None, device: torch.device) -> tuple[tuple[Call, ...], ...]:
    mine, num = info.runs, info.num_local

    def meet(rank: int, *, fresh: bool) -> tuple[Call, ...]:
        keys = runs(info.indices[rank], info.cu_seqlens)
        return pair_calls(mine, keys, num_q=num, num_k=num, window=window, device=device, fresh=fresh)

    steps = range(1, reach(info, window) + 1)
    if window is not None:
        return meet(info.rank, fresh=True), *(meet((info.rank - step) % info.size, fresh=False) for step in steps)
    lengths = torch.unique_consecutive(info.segment, return_counts=True)[1].tolist()
    own = (documents_call(lengths, device),)
    if info.kind == "zigzag":
        past, future = _zigzag_calls(lengths, num, device)
        return own, *(past if step <= info.rank else future for step in steps)
    return own, *(meet((info.rank - step) % info.size, fresh=False) for step in steps)


def _zigzag_calls(
    lengths: Sequence[int], num_rows: int, device: torch.device
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """The calls on keys of a lower rank and of a higher one: the same for each, documents lie in the same rows."""
    chunks = [length // 2 for length in lengths]
    starts = [2 * before for before in accumulate(chunks, initial=0)][:-1]  # local row of each document's first chunk
    first = rows_of(ranges(starts, chunks), num_rows, device)
    second = rows_of(ranges([a + n for a, n in zip(starts, chunks, strict=True)], chunks), num_rows, device)
    past = Call(None, first, Block.make(lengths, chunks, kind="full", device=device, offset=()), False)
    future = Call(second, None, Block.make(chunks, lengths, kind="full", device=device, offset=()), False)
    return (past,), (future,)


def reach(info: SeqInfo, window: int | None) -> int:
    """How many ranks back the keys of any rank's queries lie at most. The same on every rank."""
    if info.kind == "zigzag":
        return info.size - 1
    first_query = torch.arange(1, info.size) * info.num_local  # of each rank but 0; its later ones reach less far
    cu = info.cu_seqlens.long()
    first_key = cu[torch.bucketize(first_query, cu[1:], right=True)]
    if window is not None:
        first_key = torch.maximum(first_key, first_query - window + 1)
    return int((torch.arange(1, info.size) - first_key // info.num_local).max())
