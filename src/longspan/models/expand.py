"""`longspan.expand(sample, model)`: from one placeholder a media item to one id per visual token.

The engine takes expanded ids only; this is the one place that expands, and it does so at most once: a sample whose
runs already fit its media comes back as it is, and runs that fit neither way are refused with counts (bugs G18).
Inserted tokens get mask 0, fields 0 (temperature 1) and the id that follows as target; the last copy keeps what its
placeholder had.

A video placeholder becomes one run a frame group, each as "<1.5 seconds>" (where the model has a tokenizer), vision
start, ids, vision end; markers that stood around the placeholder are replaced by these, as the checkpoints were
trained.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from longspan.data.media import Video
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.models.images import MediaReader
from longspan.models.loading import media_of, read_config, read_tokenizer
from longspan.models.placeholders import MediaIds, match_spans, prompt_runs
from longspan.typed import typed

__all__ = ["expand"]

DEFAULT_FPS = 24.0  # transformers' rate for videos without timestamps


@runtime_checkable
class Expander(Protocol):
    """An adapter, as far as expansion needs it."""

    reader: MediaReader | None
    ids: MediaIds | None
    tokenizer: PreTrainedTokenizerBase | None


@runtime_checkable
class HasAdapter(Protocol):
    """An engine, as far as expansion needs it."""

    adapter: Expander


@dataclass(frozen=True, slots=True)
class Piece:
    """What replaces tokens `start` .. `stop` of a sample; `keep` is the old token that the last new one continues."""

    start: int
    stop: int
    ids: list[int]
    keep: int


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The expansion rules of a model that is not loaded."""

    reader: MediaReader | None
    ids: MediaIds | None
    tokenizer: PreTrainedTokenizerBase | None


@typed
def expand(sample: Sample, model: HasAdapter | Expander | str | os.PathLike[str]) -> Sample:
    """The sample with one placeholder id a visual token. `model`: an engine, an adapter, or a model's name or path."""
    rules = _rules(model)
    if not sample.media:
        return sample
    if rules.reader is None or rules.ids is None:
        raise UserError(f"{len(sample.media)} media items given, but the model has no vision tower")
    try:
        match_spans(sample, rules.reader, rules.ids)
    except UserError as error:
        places = prompt_runs(sample, rules.ids, len(sample.media))
        if [length for _, length, _ in places] != [1] * len(sample.media):
            raise UserError(f"cannot expand, and not expanded either: {error}") from error
    else:
        return sample
    pieces = []
    for (start, _, got), media in zip(places, sample.media, strict=True):
        wanted = rules.ids.video if isinstance(media, Video) else rules.ids.image
        if got != wanted:
            raise UserError(f"placeholder at position {start} has id {got}, its {type(media).__name__} needs {wanted}")
        pieces.append(_video(sample, start, media, rules) if isinstance(media, Video) else _image(start, media, rules))
    expanded = _replace(sample, pieces)
    match_spans(expanded, rules.reader, rules.ids)
    return expanded


def _rules(model: HasAdapter | Expander | str | os.PathLike[str]) -> Expander:
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        reader, ids = media_of(read_config(name), name)
        return NamedModel(reader, ids, None if name.startswith("tiny:") else read_tokenizer(name))
    return model.adapter if isinstance(model, HasAdapter) else model


def _image(start: int, media: object, rules: Expander) -> Piece:
    (length,) = rules.reader.run_lengths(rules.reader.grid(media))
    return Piece(start, start + 1, [rules.ids.image] * length, start)


def _video(sample: Sample, start: int, media: Video, rules: Expander) -> Piece:
    ids = rules.ids
    lengths = rules.reader.run_lengths(rules.reader.grid(media))
    new: list[int] = []
    for stamp, length in zip(_stamps(media, rules.reader.temporal, len(lengths)), lengths, strict=True):
        if rules.tokenizer is not None:
            new += rules.tokenizer.encode(f"<{stamp:.1f} seconds>", add_special_tokens=False)
        new += [ids.start, *[ids.video] * length, ids.end]
    around = sample.input_ids[max(start - 1, 0) : start + 2].tolist()
    if around == [ids.start, ids.video, ids.end]:
        return Piece(start - 1, start + 2, new, start + 1)
    return Piece(start, start + 1, new, start)


def _stamps(media: Video, temporal: int, groups: int) -> list[float]:
    """Seconds of each frame group: the mean of its first and last frame's."""
    stamps = list(media.timestamps or (number / DEFAULT_FPS for number in range(media.num_frames())))
    stamps += [stamps[-1]] * (groups * temporal - len(stamps))
    return [(stamps[g * temporal] + stamps[(g + 1) * temporal - 1]) / 2 for g in range(groups)]


def _replace(sample: Sample, pieces: list[Piece]) -> Sample:
    ids: list[int] = []
    source: list[int] = []  # old token of each new one, -1 = inserted
    old = sample.input_ids.tolist()
    done = 0
    for piece in pieces:
        ids += old[done : piece.start] + piece.ids
        source += [*range(done, piece.start), *[-1] * (len(piece.ids) - 1), piece.keep]
        done = piece.stop
    ids += old[done:]
    source += range(done, len(old))
    new_ids, kept = torch.tensor(ids), torch.tensor(source)
    following = torch.cat([new_ids[1:], new_ids[-1:]])
    fields = {name: _spread(field, kept, 1 if name == "temperature" else 0) for name, field in sample.fields.items()}
    return Sample(
        input_ids=new_ids,
        target_ids=torch.where(kept >= 0, sample.target_ids[kept.clamp(min=0)], following),
        mask=_spread(sample.mask, kept, 0),
        fields=fields,
        media=sample.media,
        group=sample.group,
        adapter=sample.adapter,
    )


def _spread(field: Tensor, kept: Tensor, fill: int) -> Tensor:
    """[L, ...] -> [L_new, ...]; `fill` where a token was inserted."""
    new = field[kept.clamp(min=0)].clone()
    new[kept < 0] = fill
    return new
