"""From samples to per-token tensors: every per-token thing of a batch becomes one CPU tensor [..., N], and nothing else is kept.

N counts the tokens of all samples, one after the other; a sample's own tensors [..., L] are views of these columns. `Batch` is
what the plan, the packer and the programs work on. Its `token` stream numbers the batch's tokens 0..N-1, so that
outputs find their way back to their sample whatever the layout was. Normalisation enters here as weight streams (law 5).
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.data import FieldSpec, Image, Sample, Video, joined_ids
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
    lengths: tuple[int, ...]  # tokens of each
    columns: Mapping[str, Tensor]  # every declared stream of all samples, [..., N]
    tensors: tuple[Mapping[str, Tensor], ...]  # the same as one dict a sample, each [..., L]
    declared: Mapping[str, FieldSpec]
    media_tokens: tuple[tuple[int, ...], ...]  # visual tokens of each media item, a tuple a sample


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
    ids, targets, needed = joined_ids(samples, vocab_size=adapter.vocab_size)
    lengths = tuple(map(len, samples))
    columns = {"input_ids": ids, "target_ids": targets, "needed": needed, "token": torch.arange(len(ids))}
    declared = dict(CORE) | dict(adapter.declared())
    declared |= {name: FieldSpec(torch.float64, 0.0, tuple(values[0].shape[:-1])) for name, values in weights.items()}
    declared |= {name: _field_spec(name, samples, dtype) for name in fields}
    made, media = read_samples(adapter, samples)
    columns |= {name: torch.cat([row[name] for row in made], -1) for name in adapter.declared()}
    columns |= {name: torch.cat(list(values), -1) for name, values in weights.items()}
    columns |= {name: _field(name, samples, lengths, declared[name]) for name in fields}
    if routing is not None:
        declared["adapter"] = FieldSpec(torch.int64, -1)
        numbers = torch.tensor([routing.number(sample, number) for number, sample in enumerate(samples)])
        columns["adapter"] = numbers.repeat_interleave(torch.tensor(lengths))
    elif any(sample.adapter is not None for sample in samples):
        number, sample = next((n, sample) for n, sample in enumerate(samples) if sample.adapter is not None)
        raise UserError(f"sample {number} has adapter={sample.adapter!r}, but this engine has no LoRA adapters")
    parts = zip(*(values.split(lengths, -1) for values in columns.values()), strict=True)
    tensors = tuple(dict(zip(columns, row, strict=True)) for row in parts)
    return Batch(tuple(samples), lengths, columns, tensors, declared, tuple(media))


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


def _field(name: str, samples: Sequence[Sample], lengths: Sequence[int], spec: FieldSpec) -> Tensor:
    """[..., N] of one field; the default where a sample may lack it (only temperature)."""
    absent = [number for number, sample in enumerate(samples) if name not in sample.fields]
    if absent and name not in FILLS:
        raise UserError(
            f"sample {absent[0]} has no field {name!r}, which others of the batch have. Give it to all or none"
        )
    if len(absent) == len(samples):
        return torch.full((*spec.prefix, sum(lengths)), spec.fill, dtype=spec.dtype)
    default = {number: torch.full((lengths[number], *spec.prefix), spec.fill, dtype=spec.dtype) for number in absent}
    values = [default.get(number, sample.fields.get(name)) for number, sample in enumerate(samples)]
    return torch.cat([value.to(spec.dtype) for value in values if value is not None]).movedim(0, -1).contiguous()


def fingerprint(batch: Batch) -> int:
    """CRC of what every rank must hold alike: lengths, ids, targets, masks, weights, fields and media, in order; of each stream
    its name, dtype and shape too."""
    crc = zlib.crc32(np.asarray(batch.lengths, np.int64))
    for name in sorted(batch.columns.keys() - {"token"}):  # token: numbers that the lengths give
        values = batch.columns[name]
        crc = zlib.crc32(f"{name} {values.dtype} {list(values.shape)}".encode(), crc)
        crc = zlib.crc32(values.numpy(), crc)
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
