"""Which rows meet in which kernel call: made on the CPU once per micro-step, from runs alone.

A run of queries meets a run of keys of its document in one of three ways: keys wholly before it (a full segment), keys
that end where it ends (a causal segment, bottom-right aligned), keys after it (nothing). Segments of one kind share a
call. A window W trims both sides to what can meet; windowed full segments share a call only where their `shift` is
equal (see kernels.Block), because kernels take one window a call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from longspan.layout.seqinfo import Run
from longspan.layout.travel import sent
from longspan.mixers.kernels import Block

__all__ = ["Call", "Rows", "documents_call", "pair_calls", "ranges", "rows_of", "select"]

Rows = slice | Tensor | None  # rows of a local tensor: a range, int64 row numbers on the device (no row twice), or all


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One kernel call: the query rows and key rows it reads, and what sees what among them."""

    q_rows: Rows
    k_rows: Rows
    block: Block
    fresh: bool  # no earlier call of this attention wrote these query rows


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of queries against one run of keys."""

    q_row: int
    len_q: int
    k_row: int
    len_k: int
    offset: int  # position of the first query minus position of the first key
    kind: Literal["causal", "full"]
    runs: frozenset[tuple[str, int]]  # the runs it is made of, by side and row

    @property
    def shift(self) -> int:
        return self.offset - (self.len_k - self.len_q)


def select(x: Tensor, rows: Rows) -> Tensor:
    """The rows of x: a view for a range, a copy for row numbers."""
    if rows is None:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """starts[0], starts[0] + 1, ... for lengths[0] numbers, then the same from starts[1], ...: int64."""
    length = torch.tensor(lengths)
    before = length.cumsum(0) - length
    return torch.arange(int(length.sum())) + (torch.tensor(starts) - before).repeat_interleave(length)


def rows_of(numbers: Tensor, total: int, device: torch.device) -> Rows:
    """The cheapest form of these row numbers [n] int64 CPU of a tensor with `total` rows."""
    if bool((numbers.diff() == 1).all()):
        start, stop = int(numbers[0]), int(numbers[-1]) + 1
        return None if (start, stop) == (0, total) else slice(start, stop)
    return sent(numbers, device)


def documents_call(lengths: Sequence[int], device: torch.device) -> Call:
    """All rows against all rows: document after document, causal in row order."""
    return Call(None, None, Block.make(lengths, lengths, kind="causal", device=device), fresh=True)


def pair_calls(
    queries: Sequence[Run],
    keys: Sequence[Run],
    *,
    num_q: int,  # rows of the local query tensor
    num_k: int,  # rows of the key tensor
    window: int | None,
    device: torch.device,
    fresh: bool,
    k_order: Tensor | None = None,  # int64 CPU: row of the key tensor of each row that `keys` names; None: the same
) -> tuple[Call, ...]:
    """The calls in which these queries meet these keys; none when nothing is visible."""
    by_document: dict[int, list[Run]] = {}
    for run in keys:
        by_document.setdefault(run.document, []).append(run)
    segments: list[Segment] = []
    for query in queries:
        for key in by_document.get(query.document, ()):
            segment = _segment(query, key, window)
            if segment is not None:
                _append(segments, segment, window)
    calls = []
    written = torch.zeros(num_q, dtype=torch.bool)
    for group in _groups(segments, window):
        touched = ranges([s.q_row for s in group], [s.len_q for s in group])
        seen = ranges([s.k_row for s in group], [s.len_k for s in group])
        is_fresh = fresh and not bool(written[touched].any())
        written[touched] = True
        block = Block.make(
            [s.len_q for s in group],
            [s.len_k for s in group],
            kind=group[0].kind,
            device=device,
            offset=[s.offset for s in group],
        )
        k_rows = rows_of(seen if k_order is None else k_order[seen], num_k, device)
        calls.append(Call(rows_of(touched, num_q, device), k_rows, block, is_fresh))
    return tuple(calls)


def _segment(query: Run, key: Run, window: int | None) -> Segment | None:
    """How the two runs of one document meet."""
    if key.start >= query.stop:
        return None
    first_key = key.start if window is None else max(key.start, query.start - window + 1)
    if first_key >= key.stop:
        return None
    stop = query.stop
    if key.stop <= query.start:
        kind: Literal["causal", "full"] = "full"
        if window is not None:  # queries past this see none of these keys; without them window_left >= 0
            stop = min(stop, key.stop - 1 + window)
    else:
        assert key.start <= query.start and key.stop == query.stop, (query, key)
        kind = "causal"
    return Segment(
        q_row=query.row,
        len_q=stop - query.start,
        k_row=key.row + first_key - key.start,
        len_k=key.stop - first_key,
        offset=query.start - first_key,
        kind=kind,
        runs=frozenset({("q", query.row), ("k", key.row)}),
    )


def _append(segments: list[Segment], new: Segment, window: int | None) -> None:
    """Adds a segment, joined to the last one where both are one rectangle (two zigzag chunks on either side)."""
    last = segments[-1] if segments else None
    if last is not None and window is None and last.kind == new.kind == "full":
        if (last.k_row, last.len_k) == (new.k_row, new.len_k) and last.q_row + last.len_q == new.q_row:
            segments[-1] = replace(last, len_q=last.len_q + new.len_q, runs=last.runs | new.runs)
            return
        if (last.q_row, last.len_q) == (new.q_row, new.len_q) and last.k_row + last.len_k == new.k_row:
            segments[-1] = replace(last, len_k=last.len_k + new.len_k, runs=last.runs | new.runs)
            return
    segments.append(new)


def _groups(segments: Sequence[Segment], window: int | None) -> list[list[Segment]]:
    """Segments that share a call: same kind, same shift if windowed, no query row and no key row twice."""
    groups: list[tuple[tuple[str, int], set[tuple[str, int]], list[Segment]]] = []
    for segment in sorted(segments, key=lambda s: s.kind):  # causal calls first: they write every row
        key = (segment.kind, segment.shift if window is not None else 0)
        for other, used, members in groups:
            if other == key and not used & segment.runs:
                used |= segment.runs
                members.append(segment)
                break
        else:
            groups.append((key, set(segment.runs), [segment]))
    return [members for _, _, members in groups]
