"""Which placeholder ids of a sample take visual features, and the positions that follow from it.

A media item needs runs of its placeholder id: an image one run, a video one run a frame group (timestamps or vision
markers stand between). If a sample has as many runs as its media need, all of them are media. If it has more, the
runs whose first id was sampled by the policy (the mask trains it) are plain text: they keep their text embedding
and text-like positions, and stay in the loss (bugs G7). Anything unmatched is refused with counts; half an image is
never trained on (G5, G18). Padding sides and token-type ids of a processor are not read (G17). CPU only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.data.media import Video
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.models.images import MediaReader

__all__ = ["MediaIds", "Span", "match_spans", "media_rows", "mrope_positions", "prompt_runs", "token_runs"]


@dataclass(frozen=True, slots=True)
class MediaIds:
    """Token ids of a family's media."""

    image: int
    video: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Span:
    """One placeholder run: `length` tokens from `start` show `height` x `width` merged patches of media item `item`."""

    start: int
    length: int
    item: int
    height: int
    width: int


def token_runs(ids: Tensor, marks: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Maximal runs of equal ids in `marks`: (start, length, id)."""
    marked = torch.isin(ids, torch.tensor(marks))
    changed = torch.ones(len(ids) + 1, dtype=torch.bool)
    changed[1:-1] = ids[1:] != ids[:-1]
    edges = changed.nonzero()[:, 0]
    starts, ends = edges[:-1], edges[1:]
    keep = marked[starts]
    starts, ends = starts[keep], ends[keep]
    return list(zip(starts.tolist(), (ends - starts).tolist(), ids[starts].tolist(), strict=True))


def prompt_runs(sample: Sample, ids: MediaIds, needed: int) -> list[tuple[int, int, int]]:
    """Placeholder runs that can be media: all if there are `needed`, else those that the policy did not sample."""
    found = token_runs(sample.input_ids, (ids.image, ids.video))
    if len(found) == needed:
        return found
    sampled = sample.mask.roll(1) > 0  # token t was sampled if target t-1 is trained
    sampled[0] = False
    return [run for run in found if not sampled[run[0]]]


def match_spans(sample: Sample, reader: MediaReader, ids: MediaIds) -> list[Span]:
    """The media spans of a sample in order; UserError naming media index and counts where they do not fit."""
    expected = _expected(sample, reader, ids)  # without start
    found = prompt_runs(sample, ids, len(expected))
    spans = []
    for number, (mark, span) in enumerate(expected):
        kind = "image" if mark == ids.image else "video"
        what = f"media {span.item} ({kind}, {span.height} x {span.width} visual tokens)"
        if number >= len(found):
            raise UserError(
                f"{what} has no placeholder run: {len(expected)} runs needed by {len(sample.media)} media items, "
                f"{len(found)} found. {_hint(0, span.length)}"
            )
        start, length, got = found[number]
        if got != mark or length != span.length:
            raise UserError(
                f"{what} needs {span.length} placeholders of id {mark}, found {length} of id {got} at position "
                f"{start}. {_hint(length, span.length)}"
            )
        spans.append(Span(start, length, span.item, span.height, span.width))
    if len(found) > len(expected):
        start, length, got = found[len(expected)]
        raise UserError(
            f"run of {length} placeholders of id {got} at position {start} belongs to no media: {len(expected)} runs "
            f"needed by {len(sample.media)} media items, {len(found)} found. Give the missing media, or set the mask "
            "before it to 1 if the policy sampled it"
        )
    return spans


def mrope_positions(length: int, spans: Sequence[Span]) -> Tensor:
    """[3, L] int64 (time, height, width). Text counts up in all three; a span counts its rows and columns from the
    current position and moves it on by its longer side (`get_rope_index` of Qwen3-VL)."""
    positions = torch.empty(3, length, dtype=torch.int64)
    done, current = 0, 0
    for span in spans:
        text = span.start - done
        positions[:, done : span.start] = torch.arange(current, current + text)
        current += text
        done = span.start + span.length
        rows = torch.arange(span.height).repeat_interleave(span.width)
        columns = torch.arange(span.width).repeat(span.height)
        positions[:, span.start : done] = torch.stack([torch.zeros_like(rows), rows, columns]) + current
        current += max(span.height, span.width)
    positions[:, done:] = torch.arange(current, current + length - done)
    return positions


def media_rows(length: int, spans: Sequence[Span]) -> Tensor:
    """[L] int64: row of the sample's table of visual embeddings, -1 = text."""
    rows = torch.full((length,), -1, dtype=torch.int64)
    done = 0
    for span in spans:
        rows[span.start : span.start + span.length] = torch.arange(done, done + span.length)
        done += span.length
    return rows


def _expected(sample: Sample, reader: MediaReader, ids: MediaIds) -> list[tuple[int, Span]]:
    runs = []
    for item, media in enumerate(sample.media):
        grid = reader.grid(media)
        height, width = grid[1] // reader.merge, grid[2] // reader.merge
        mark = ids.video if isinstance(media, Video) else ids.image
        runs += [(mark, Span(-1, length, item, height, width)) for length in reader.run_lengths(grid)]
    return runs


def _hint(found: int, needed: int) -> str:
    if found == needed * needed and needed > 1:
        return (
            "The ids look expanded twice: give longspan.expand one placeholder a media item, or expand elsewhere, once"
        )
    if found == 1 and needed > 1:
        return "The ids look unexpanded: call longspan.expand(sample, model) first"
    if found < needed:
        return (
            "Was the text cut by a length limit? Drop the sample or raise the limit; half an image is never trained on"
        )
    return "Check the order of media and that the image size is the one the ids were made for"
