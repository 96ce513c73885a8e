"""SeqInfo: what a mixer must know of one row - boundaries, where each token lives, and who shares it.

Pure data on the CPU, handed down as an argument (law 6): never guessed from masks or positions. Documents are the
segments of `cu_seqlens`, padding included; a token sees only its own document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.layout.index import layout_index
from longspan.layout.mesh import CPGroup

__all__ = ["Run", "SeqInfo", "make_seqinfo", "runs"]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one document that lie in neighbouring rows of a rank."""

    document: int
    start: int  # position in the document of the first token
    stop: int
    row: int  # local row of the first token


@dataclass(frozen=True, slots=True, eq=False)
class SeqInfo:
    """One row under one layout, seen from one rank."""

    kind: str  # "identity" | "contiguous" | "zigzag"
    size: int  # ranks that share the row
    rank: int  # this rank among them
    cu_seqlens: Tensor  # [S+1] int32 CPU: document boundaries in the padded stream
    indices: tuple[Tensor, ...]  # of each rank: [T_local] int64 CPU, stream positions of its tokens
    group: CPGroup

    @property
    def index(self) -> Tensor:
        """[T_local] int64 CPU: stream positions of this rank's tokens."""
        return self.indices[self.rank]

    @property
    def num_tokens(self) -> int:
        """T: tokens of the whole stream, padding included."""
        return int(self.cu_seqlens[-1])

    @property
    def num_local(self) -> int:
        """T_local: tokens of each rank."""
        return self.num_tokens // self.size

    @property
    def segment(self) -> Tensor:
        """[T_local] int64 CPU: document number of each of this rank's tokens."""
        lengths = self.cu_seqlens.diff()
        whole = torch.arange(len(lengths)).repeat_interleave(lengths)  # [T]
        return whole if self.size == 1 else whole[self.index]

    @property
    def position_in_document(self) -> Tensor:
        """[T_local] int64 CPU: 0 at each document's first token."""
        return self.index - self.cu_seqlens.long()[self.segment]

    @property
    def runs(self) -> tuple[Run, ...]:
        """This rank's tokens as runs, in row order."""
        return runs(self.index, self.cu_seqlens)


def make_seqinfo(kind: str, cu_seqlens: Tensor, group: CPGroup) -> SeqInfo:
    """The info of this rank of `group` for a stream with these (padded) boundaries."""
    assert group.rank >= 0, "this rank is outside the group"
    return SeqInfo(
        kind="identity" if group.size == 1 else kind,
        size=group.size,
        rank=group.rank,
        cu_seqlens=cu_seqlens.to(device="cpu", dtype=torch.int32),
        indices=tuple(layout_index(kind, cu_seqlens, group.size)),
        group=group,
    )


def runs(index: Tensor, cu_seqlens: Tensor) -> tuple[Run, ...]:
    """The runs of one rank's index vector."""
    cu = cu_seqlens.long()
    document = torch.bucketize(index, cu[1:], right=True)
    breaks = (index.diff() != 1) | (document.diff() != 0)
    rows = torch.cat([torch.zeros(1, dtype=torch.long), breaks.nonzero().flatten() + 1])
    lengths = torch.cat([rows, torch.tensor([index.numel()])]).diff()
    starts = index[rows] - cu[document[rows]]
    columns = (document[rows].tolist(), starts.tolist(), (starts + lengths).tolist(), rows.tolist())
    return tuple(Run(document=d, start=a, stop=b, row=row) for d, a, b, row in zip(*columns, strict=True))
