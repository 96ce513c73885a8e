"""Gather attention: every rank collects all keys and values of the row and attends for its own queries.

k, v [T/N, H_kv, D] -> [T, H_kv, D] (one all-gather, again in backward: the gathered copy is not kept), dk, dv [T, ...]
-> [T/N, ...] (one reduce-scatter in f32). The keys of a run of queries go from its document's start (or the window's)
to the run's end: bottom-right causal.
    contiguous  one call; the keys of all runs are one slice of the gathered stream
    zigzag      one call for the first chunks and one for the second; the keys are picked row by row
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.layout.comm import all_gather, reduce_scatter
from longspan.layout.index import inverse
from longspan.layout.mesh import CPGroup
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
from longspan.mixers.blocks import Call, ranges, rows_of
from longspan.mixers.kernels import Block
from longspan.mixers.local import Local, LocalPrepared
from longspan.mixers.merge import Sum

__all__ = ["Gather", "GatherPrepared"]


@dataclass(slots=True, eq=False)
class GatherPrepared:
    """The calls: query rows are local, key rows are those of the gathered keys (rank order)."""

    info: SeqInfo
    calls: ByWindow[tuple[Call, ...]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """See attention.Prepared."""
        total = partial_softmax(q, v)
        run_forward(total, self.calls(work.window), q, *_gather(k, v, self.info.group), work)
        return total.result()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See attention.Prepared."""
        k_all, v_all = _gather(k, v, self.info.group)
        dq, dk, dv = Sum(q), Sum(k_all), Sum(v_all)
        run_backward((dq, dk, dv), self.calls(work.window), Upstream(dout, q, out, lse), k_all, v_all, work)
        both = torch.cat([dk.wide().flatten(1), dv.wide().flatten(1)], 1)  # [T, H_kv * (D + Dv)]
        mine = reduce_scatter(both, self.info.group)  # [T/N, ...]
        dk_mine, dv_mine = mine.split([k[0].numel(), v[0].numel()], 1)
        return dq.result(), dk_mine.view(k.shape).to(k.dtype), dv_mine.view(v.shape).to(v.dtype)


@dataclass(frozen=True, slots=True)
class Gather(AnySize):
    """Any number of ranks and heads."""

    name: str = "gather"

    def prepare(self, info: SeqInfo, device: torch.device) -> GatherPrepared | LocalPrepared:
        """The calls without a window; those of windowed layers follow at their first use."""
        if info.size == 1:
            return Local().prepare(info, device)
        prepared = GatherPrepared(info, ByWindow(lambda window: _make_calls(info, window, device)))
        prepared.calls(None)
        return prepared


def _gather(k: Tensor, v: Tensor, group: CPGroup) -> tuple[Tensor, Tensor]:
    """[T/N, H_kv, D] each -> [T, H_kv, D] each, rank order, views of one buffer."""
    both = all_gather(torch.cat([k.flatten(1), v.flatten(1)], 1), group)
    k_all, v_all = both.split([k[0].numel(), v[0].numel()], 1)
    return k_all.unflatten(1, k.shape[1:]), v_all.unflatten(1, v.shape[1:])


def _make_calls(info: SeqInfo, window: int | None, device: torch.device) -> tuple[Call, ...]:
    """Runs are dealt to as few calls as let each document stand in a call once: its keys then appear once."""
    waves: list[list[Run]] = []
    seen: dict[int, int] = {}
    for run in info.runs:
        wave = seen.get(run.document, 0)
        seen[run.document] = wave + 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(run)
    row = inverse(list(info.indices))  # gathered row of each stream token
    return tuple(_wave_call(wave, info, row, window, device) for wave in waves)


def _wave_call(wave: Sequence[Run], info: SeqInfo, row: Tensor, window: int | None, device: torch.device) -> Call:
    first_keys = [0 if window is None else max(0, run.start - window + 1) for run in wave]
    starts = info.cu_seqlens.tolist()
    keys = [
        row[starts[run.document] + first : starts[run.document] + run.stop]
        for run, first in zip(wave, first_keys, strict=True)
    ]
    block = Block.make(
        [run.stop - run.start for run in wave], [part.numel() for part in keys], kind="causal", device=device
    )
    return Call(
        q_rows=rows_of(
            ranges([run.row for run in wave], [run.stop - run.start for run in wave]), info.num_local, device
        ),
        k_rows=rows_of(torch.cat(keys), info.num_tokens, device),
        block=block,
        fresh=True,
    )
