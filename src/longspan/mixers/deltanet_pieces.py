"""How a contiguous row of documents is cut for a recurrent layer: the pieces of one rank, and what crosses between
ranks.

A piece is a run of one document on one rank; a piece that continues the piece before it is `carried` (for the first
piece: the last one of the rank to the left). Everything here is Python and the same on every rank, so that ranks
agree on every collective. `longest` cuts long pieces further, so that more of them run at once; only the benchmark and
tests pass it: whole runs are faster on H200s (a 64k document on two, 32 heads: 16.97 ms, pieces of 16k to 4k 17.4 to 18.0).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.layout.seqinfo import SeqInfo

__all__ = ["Pieces", "cut_pieces", "whole_pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """One rank's pieces, and the edges between all ranks."""

    rank: int
    bounds: tuple[int, ...]  # [n + 1] local token numbers; piece i is bounds[i] to bounds[i + 1]
    carried: tuple[
        bool, ...
    ]  # [n + 1]: piece i continues the piece before it; the last entry: the next rank's first piece does
    crossed: tuple[bool, ...]  # [size + 1]: a document crosses from rank r - 1 to rank r
    through: tuple[bool, ...]  # [size]: rank r holds nothing but the middle of one document
    positions: Tensor  # [T_local] int64 CPU: place of each token in its document

    @property
    def num(self) -> int:
        return len(self.bounds) - 1

    @property
    def exchanged(self) -> bool:
        """Whether any document crosses between ranks: if not, no rank communicates."""
        return any(self.crossed)

    @property
    def sources(self) -> tuple[int, ...]:
        """Pieces whose final state another piece starts from."""
        return tuple(i for i in range(self.num) if self.carried[i + 1])

    @property
    def targets(self) -> tuple[int, ...]:
        """Pieces that start from another piece's final state."""
        return tuple(i for i in range(self.num) if self.carried[i])


def cut_pieces(info: SeqInfo, longest: int | None = None) -> Pieces:
    """The pieces of this rank of a contiguous row. longest: tokens of a piece at most; None leaves runs whole."""
    if info.kind not in ("identity", "contiguous"):
        raise UserError(
            f"index={info.kind!r} breaks the token order that recurrent layers need. Use index='contiguous'."
        )
    cu_seqlens = info.cu_seqlens.tolist()
    return _cut(cu_seqlens, info.num_local, size=info.size, rank=info.rank, longest=longest)


def whole_pieces(info: SeqInfo) -> Pieces:
    """The whole row on one rank, for layers whose heads are shared out instead of their tokens."""
    return _cut(info.cu_seqlens.tolist(), info.num_tokens, size=1, rank=0, longest=None)


def _cut(cu_seqlens: Sequence[int], num_local: int, *, size: int, rank: int, longest: int | None) -> Pieces:
    starts = set(cu_seqlens)
    crossed = tuple(0 < r < size and r * num_local not in starts for r in range(size + 1))
    through = tuple(
        crossed[r] and crossed[r + 1] and not any(r * num_local < c < (r + 1) * num_local for c in starts)
        for r in range(size)
    )
    first = rank * num_local
    inside = sorted(c - first for c in starts if first < c < first + num_local)
    runs = [0, *inside, num_local]
    bounds, carried = [0], []
    for number, (start, end) in enumerate(itertools.pairwise(runs)):
        carried.append(number == 0 and crossed[rank])
        if longest is not None:
            for middle in range(start + longest, end, longest):
                bounds.append(middle)
                carried.append(True)
        bounds.append(end)
    carried.append(crossed[rank + 1])
    positions = torch.arange(first, first + num_local)
    boundaries = torch.tensor(cu_seqlens)
    positions -= boundaries[torch.bucketize(positions, boundaries[1:], right=True)]
    return Pieces(rank, tuple(bounds), tuple(carried), crossed, through, positions)
