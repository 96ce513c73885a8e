"""Gather whose travel hides: a rank attends to its own keys while those of the other ranks arrive.

As gather.py, N ranks: k, v [T/N, H_kv, D] -> [N, T/N, H_kv, D], and again in backward. Own keys meet in one causal call over
the local documents. Keys of other ranks that a query sees lie before its run, so that they meet in full blocks, each
key in one of them:
    contiguous  the document that crosses the rank's first token, if any
    zigzag      all rows of a document against what lies before its first chunk here, and the second chunks against what
                lies between the two
Windows cut both as they do in the ring (blocks.py). Parts merge by LSE. Gradients of others' keys go straight home,
one rank a hop, in f32 (f64 for f64), as many hops as any rank needs; they are added to those of own calls hop by hop.
Nothing hides that last travel. Buffers hold k and v, or their f32 gradients, of T/N tokens, whatever N is.
Overlaps only with a transport that leaves the SMs alone (symmetric.py); no GPU has run this file yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.layout.index import inverse
from longspan.layout.seqinfo import Run, SeqInfo
from longspan.mixers.attention import (
    AnySize,
    ByWindow,
    Upstream,
    Work,
    partial_softmax,
    run_backward,
    run_forward,
)
from longspan.mixers.blocks import Call, documents_call, pair_calls, ranges
from longspan.mixers.local import Local, LocalPrepared
from longspan.mixers.merge import Sum
from longspan.mixers.ring import reach
from longspan.mixers.transport import Arrival, Transport

__all__ = ["Meetings", "OverlappedGather", "OverlappedGatherPrepared"]


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """The calls of one rank, and how far gradients travel."""

    own: tuple[Call, ...]  # keys are local; together they write every query row
    others: tuple[Call, ...]  # key rows are those of the gathered keys (rank order), none of them this rank's
    hops: int  # ranks back that the keys of any rank's queries lie: the same on every rank


@dataclass(slots=True, eq=False)
class OverlappedGatherPrepared:
    """A row's calls by window."""

    info: SeqInfo
    transport: Transport
    meetings: ByWindow[Meetings]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """See attention.Prepared."""
        meetings = self.meetings(work.window)
        arriving = self.transport.gather((k, v), self.info.group)
        total = partial_softmax(q, v)
        run_forward(total, meetings.own, q, k, v, work)
        k_all, v_all = _landed(arriving)
        run_forward(total, meetings.others, q, k_all, v_all, work)
        return total.result()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See attention.Prepared."""
        meetings, group = self.meetings(work.window), self.info.group
        arriving = self.transport.gather((k, v), group)
        side = Upstream(dout, q, out, lse)
        dq, dk, dv = Sum(q), Sum(k), Sum(v)
        run_backward((dq, dk, dv), meetings.own, side, k, v, work)
        k_all, v_all = _landed(arriving)
        dk_all, dv_all = Sum(k_all), Sum(v_all)
        run_backward((dq, dk_all, dv_all), meetings.others, side, k_all, v_all, work)
        owners = list(zip(dk_all.wide().chunk(group.size), dv_all.wide().chunk(group.size), strict=True))
        homing = [
            self.transport.rotate(owners[(group.rank - hop) % group.size], group, hops=-hop)
            for hop in range(1, meetings.hops + 1)
        ]
        for arrival in homing:
            for total, part in zip((dk, dv), arrival.wait(), strict=True):
                total.add(None, part)
        return dq.result(), dk.result(), dv.result()


@dataclass(frozen=True, slots=True)
class OverlappedGather(AnySize):
    """gather with overlap: any number of ranks and heads."""

    transport: Transport
    name: str = "gather"

    def prepare(self, info: SeqInfo, device: torch.device) -> OverlappedGatherPrepared | LocalPrepared:
        """The calls without a window; those of windowed layers follow at their first use."""
        if info.size == 1:
            return Local().prepare(info, device)
        meetings = ByWindow(lambda window: _meetings(info, window, device))
        prepared = OverlappedGatherPrepared(info, self.transport, meetings)
        prepared.meetings(None)
        return prepared


def _landed(arriving: Arrival) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks: [N, T/N, H_kv, D] -> [T, H_kv, D], views."""
    k_all, v_all = arriving.wait()
    return k_all.flatten(0, 1), v_all.flatten(0, 1)


def _meetings(info: SeqInfo, window: int | None, device: torch.device) -> Meetings:
    mine, num = info.runs, info.num_local
    if window is None:
        lengths = torch.unique_consecutive(info.segment, return_counts=True)[1].tolist()
        own: tuple[Call, ...] = (documents_call(lengths, device),)
    else:
        own = pair_calls(mine, mine, num_q=num, num_k=num, window=window, device=device, fresh=True)
    keys = _elsewhere(mine)
    others = ()
    if keys:
        row = inverse(list(info.indices))  # gathered row of each stream token
        starts = info.cu_seqlens.tolist()
        order = row[ranges([starts[run.document] + run.start for run in keys], [run.stop - run.start for run in keys])]
        others = pair_calls(
            mine, keys, num_q=num, num_k=info.num_tokens, window=window, device=device, fresh=False, k_order=order
        )
    return Meetings(own, others, reach(info, window))


def _elsewhere(mine: Sequence[Run]) -> list[Run]:
    """What other ranks hold of each document before this rank's last run of it. Rows count these tokens alone."""
    found: list[Run] = []
    row, stop = 0, {}
    for run in mine:
        start = stop.get(run.document, 0)
        if start < run.start:
            found.append(Run(run.document, start, run.start, row))
            row += run.start - start
        stop[run.document] = run.stop
    return found
