"""Cuts a stream into a rank's part and puts it together again: take by the index vector, take by its inverse (law 3).

Every field by the same rule (law 4): token dim last, [..., T] <-> [..., T_local]. No field is special here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.data.pack import Stream
from longspan.layout.comm import all_gather
from longspan.layout.index import inverse
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo, make_seqinfo
from longspan.layout.travel import sent

__all__ = ["Shard", "shard", "split_outputs", "unshard"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of one stream."""

    fields: Mapping[str, Tensor]  # name -> [..., T_local], on the device
    segment: Tensor  # [T_local] int64 on the device: which sample of the row
    info: SeqInfo
    samples: tuple[int, ...]  # numbers in the batch, in the order of the segments
    lengths: tuple[int, ...]  # real tokens of each


def shard(stream: Stream, group: CPGroup, device: torch.device) -> Shard:
    """The part of this rank of `group`, on `device`."""
    assert group.size == stream.size, f"a row for {stream.size} ranks on a group of {group.size}"
    info = make_seqinfo(stream.index, stream.cu_seqlens, group)
    rows = _range(info.index)
    own = {name: x.index_select(-1, info.index) if rows is None else x[..., rows] for name, x in stream.fields.items()}
    return Shard(
        fields={name: sent(x, device) for name, x in own.items()},
        segment=sent(info.segment, device),
        info=info,
        samples=stream.samples,
        lengths=stream.lengths,
    )


def _range(index: Tensor) -> slice | None:
    """The index as a range of neighbours, which need no copy of their own; None where it is none."""
    first, stop = int(index[0]), int(index[0]) + len(index)
    return slice(first, stop) if torch.equal(index, torch.arange(first, stop)) else None


def unshard(local: Tensor, info: SeqInfo) -> Tensor:
    """[..., T_local] -> [..., T] in stream order, the same on every rank of the row. Collective; no gradient."""
    if info.size == 1:
        return local.detach()
    gathered = all_gather(local.detach().movedim(-1, 0).contiguous(), info.group)  # [T, ...], rank order
    order = sent(inverse(list(info.indices)), local.device)
    return gathered.index_select(0, order).movedim(0, -1)


def split_outputs(full: Tensor, piece: Shard) -> tuple[Tensor, ...]:
    """[..., T] in stream order -> the real tokens [..., L] of each sample, in the order of `piece.samples`."""
    starts = piece.info.cu_seqlens.tolist()
    return tuple(full[..., start : start + length] for start, length in zip(starts, piece.lengths, strict=False))
