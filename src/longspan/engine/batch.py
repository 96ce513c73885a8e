"""From samples to per-token tensors: every per-token thing of a sample becomes one CPU tensor [..., L], and nothing else is kept.

`Batch` is what the plan, the packer and the programs work on. Its `token` stream numbers the batch's tokens 0..N-1, so that
outputs find their way back to their sample whatever the layout was. Normalisation enters here as weight streams (law 5).
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.data import FieldSpec, Image, Sample, Video, check_samples
from longspan.errors import UserError
from longspan.models.adapter import Adapter, read_samples
from longspan.models.lora import Routing

__all__ = ["Batch", "fingerprint", "make_batch"]

CORE = {
    "input_ids": FieldSpec(torch.int64, 0),
    "target_ids": FieldSpec(torch.int64, 0),
    "needed": FieldSpec(torch.bool, False),
    "token": FieldSpec(torch.int64, -1),
}
FILLS = {"temperature": 1.0}


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one call as tensors. `declared` names every stream with dtype, fill and leading shape."""

    samples: tuple[Sample, ...]
    tensors: tuple[Mapping[str, Tensor], ...]  # one dict a sample, each [..., L]
    declared: Mapping[str, FieldSpec]
    media_tokens: tuple[tuple[int, ...], ...]  # visual tokens of each media item, a tuple a sample

    @property
    def lengths(self) -> list[int]:
        return [len(sample.input_ids) for sample in self.samples]


def make_batch(
    samples: Sequence[Sample],
    adapter: Adapter,
    *,
    weights: Mapping[str, Sequence[Tensor]],
    fields: Sequence[str],
    dtype: torch.dtype,
    routing: Routing | None = None,
) -> Batch:
    """Check the samples and turn them into per-token tensors.

    weights: per stream name, one [L] tensor a sample (from token_weights); stored in fp64.
    fields: names of sample fields to carry. "temperature" is optional and 1 where a sample has none.
    routing: with LoRA, which adapter each sample trains.
    Raises UserError naming the sample for anything that does not fit.
    """
    check_samples(samples, vocab_size=adapter.vocab_size)
    declared = dict(CORE) | dict(adapter.declared())
    declared |= {name: FieldSpec(torch.float64, 0.0, tuple(values[0].shape[:-1])) for name, values in weights.items()}
    declared |= {name: _field_spec(name, samples, dtype) for name in fields}
    if routing is not None:
        declared["adapter"] = FieldSpec(torch.int64, -1)
    made, media = read_samples(adapter, samples)
    tensors, offset = [], 0
    for number, sample in enumerate(samples):
        length = len(sample.input_ids)
        needed = sample.mask > 0
        row = {
            "input_ids": sample.input_ids,
            "target_ids": torch.where(needed, sample.target_ids, 0),
            "needed": needed,
            "token": torch.arange(offset, offset + length),
        }
        row |= made[number]
        row |= {name: values[number] for name, values in weights.items()}
        row |= {name: _field(name, sample, number, declared[name]) for name in fields}
        if routing is not None:
            row["adapter"] = torch.full((length,), routing.number(sample, number))
        elif sample.adapter is not None:
            raise UserError(f"sample {number} has adapter={sample.adapter!r}, but this engine has no LoRA adapters")
        tensors.append(row)
        offset += length
    return Batch(tuple(samples), tuple(tensors), declared, tuple(media))


def _field_spec(name: str, samples: Sequence[Sample], dtype: torch.dtype) -> FieldSpec:
    """dtype and leading shape of a field, the same in every sample that has it."""
    found = {}
    for number, sample in enumerate(samples):
        if name in sample.fields:
            value = sample.fields[name]
            found.setdefault((value.is_floating_point(), tuple(value.shape[1:])), number)
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise UserError(
            f"field {name!r} differs between samples: sample {a} has (float, trailing shape) {first}, "
            f"sample {b} has {second}. Give every sample the same kind of field"
        )
    floating, shape = next(iter(found), (True, ()))
    kind = (torch.float64 if dtype == torch.float64 else torch.float32) if floating else torch.int64
    return FieldSpec(kind, FILLS.get(name, 0), shape)


def _field(name: str, sample: Sample, number: int, spec: FieldSpec) -> Tensor:
    """[..., L] of one field; the default where a sample may lack it (only temperature)."""
    if name not in sample.fields:
        if name not in FILLS:
            raise UserError(
                f"sample {number} has no field {name!r}, which others of the batch have. Give it to all or none"
            )
        return torch.full((*spec.prefix, len(sample.input_ids)), spec.fill, dtype=spec.dtype)
    return sample.fields[name].movedim(0, -1).to(spec.dtype)


def fingerprint(batch: Batch) -> int:
    """CRC of what every rank must hold alike: ids, targets, masks, weights, fields and media, in order."""
    crc = 0
    for row in batch.tensors:
        for name in sorted(row):
            crc = zlib.crc32(row[name].contiguous().numpy().tobytes(), crc)
    for sample in batch.samples:
        for item in sample.media:
            crc = zlib.crc32(_mark(item).encode(), crc)
    return crc


def _mark(item: Image | Video) -> str:
    """Pixels by their hash; a file by its path, since its times may differ between machines."""
    if isinstance(item.source, str | os.PathLike):
        return str(item.source)
    if isinstance(item, Video) and not isinstance(item.source, np.ndarray | Tensor):
        return repr([item.timestamps, *(_mark(frame) for frame in item.frames())])
    return repr(item.key())
