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

__all__ = ["Shard", "shard", "split_outputs", "unshard"]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rank's part of one stream."""

    fields: Mapping[str, Tensor]  # name -> [..., T_local], on the device
    info: SeqInfo
    samples: tuple[int, ...]  # numbers in the batch, in the order of the segments
    lengths: tuple[int, ...]  # real tokens of each


def shard(stream: Stream, group: CPGroup, device: torch.device) -> Shard:
    """The part of this rank of `group`, on `device`."""
    assert group.size == stream.size, f"a row for {stream.size} ranks on a group of {group.size}"
    info = make_seqinfo(stream.index, stream.cu_seqlens, group)
    fields = {
        name: values.index_select(-1, info.index).to(device, non_blocking=True)
        for name, values in stream.fields.items()
    }
    return Shard(fields=fields, info=info, samples=stream.samples, lengths=stream.lengths)


def unshard(local: Tensor, info: SeqInfo) -> Tensor:
    """[..., T_local] -> [..., T] in stream order, the same on every rank of the row. Collective; no gradient."""
    if info.size == 1:
        return local.detach()
    gathered = all_gather(local.detach().movedim(-1, 0).contiguous(), info.group)  # [T, ...], rank order
    order = inverse(list(info.indices)).to(local.device, non_blocking=True)
    return gathered.index_select(0, order).movedim(0, -1)


def split_outputs(full: Tensor, piece: Shard) -> tuple[Tensor, ...]:
    """[..., T] in stream order -> the real tokens [..., L] of each sample, in the order of `piece.samples`."""
    starts = piece.info.cu_seqlens.tolist()
    return tuple(full[..., start : start + length] for start, length in zip(starts, piece.lengths, strict=False))
