"""Packs the samples of a row into one stream: every per-token field by the same rule (law `everything_is_a_stream`).

Sample fields come as [..., L], stream fields are [..., T], token dim last: ids [T], mRoPE positions [3, T], routed
experts [layers, k, T]. `cu_seqlens` are the padded boundaries; pads carry each field's fill and weight zero. Where the
row needs a tail pad it is one more segment, so that pads attend to themselves only; the pads that zigzag puts behind a
sample lie in its segment, after its real tokens, where a causal model cannot see them. Targets are copied, never
rolled (law `shift_before_pack`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from longspan.data.plan import IndexKind, Row, padded_length, row_index, row_tokens
from longspan.errors import UserError


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What a field is, so that a row without samples can make it too."""

    dtype: torch.dtype
    fill: float = 0  # value of pads: ids 0, weights 0, media_row -1, temperature 1
    prefix: tuple[int, ...] = ()  # shape before the token dim


@dataclass(frozen=True, slots=True)
class Stream:
    """One packed row, on the CPU."""

    samples: tuple[int, ...]  # numbers in the batch, in the order of the segments
    lengths: tuple[int, ...]  # real tokens of each
    cu_seqlens: Tensor  # [S+1] int32, padded boundaries; a tail pad is one more segment
    fields: Mapping[str, Tensor]  # name -> [..., T]
    size: int  # CP size
    index: IndexKind

    @property
    def tokens(self) -> int:
        """T, pads included."""
        return int(self.cu_seqlens[-1])


def pack(
    row: Row,
    tensors: Sequence[Mapping[str, Tensor]],
    declared: Mapping[str, FieldSpec],
    index: IndexKind,
    *,
    multiple: int = 1,
    pinned: bool = False,
) -> Stream:
    """The row's stream. tensors[k]: the declared fields [..., L] of sample row.samples[k]; every declared field is in
    the result. pinned: in memory from which a copy to a GPU does not wait."""
    assert len(tensors) == len(row.samples), f"{len(tensors)} samples' tensors for a row of {len(row.samples)}"
    lengths = tuple(_length(number, fields, declared) for number, fields in zip(row.samples, tensors, strict=True))
    total = row.size * row_tokens(lengths, row.size, index, multiple=multiple)
    padded = [padded_length(length, row.size, index) for length in lengths]
    pads = [after - length for length, after in zip(lengths, padded, strict=True)]
    if tail := total - sum(padded):
        padded.append(tail)
    fields = {}
    for name, spec in declared.items():
        parts = _parts([each[name] for each in tensors], pads, spec=spec, tail=tail)
        out = torch.empty((*spec.prefix, total), dtype=spec.dtype, pin_memory=pinned)
        fields[name] = torch.cat(parts, -1, out=out)
    bounds = list(accumulate(padded, initial=0))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)  # int32: the varlen kernels reject int64
    return Stream(row.samples, lengths, cu_seqlens, fields, row.size, row_index(row.size, index))


def _parts(values: Sequence[Tensor], pads: Sequence[int], *, spec: FieldSpec, tail: int) -> list[Tensor]:
    """One field of the row in pieces: each sample's part, then its pads, then the row's."""
    parts: list[Tensor] = []
    for own, count in zip([*values, None], [*pads, tail], strict=True):
        parts += [] if own is None else [own.to(spec.dtype)]
        parts += [torch.full((*spec.prefix, count), spec.fill, dtype=spec.dtype)] if count else []
    return parts


def _length(number: int, fields: Mapping[str, Tensor], declared: Mapping[str, FieldSpec]) -> int:
    if missing := sorted(declared.keys() - fields.keys()):
        raise UserError(
            f"sample {number} lacks the per-token fields {missing} that the model and the objective declare; it has "
            f"{sorted(fields)}. "
            "Add them to Sample(fields=...), or use an objective without them."
        )
    length = next((fields[name].shape[-1] for name in declared), 0)
    for name, spec in declared.items():
        if fields[name].shape != (*spec.prefix, length):
            raise UserError(
                f"sample {number}: field {name!r} has shape {list(fields[name].shape)} with the token dim last, "
                f"expected {[*spec.prefix, length]}. All samples of a batch give a field the same shape per token."
            )
    return length
