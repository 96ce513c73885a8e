"""Sharing a row's images over its CP ranks: each rank encodes whole images, then takes the features of its own
tokens.

Plan (CPU, the same on every rank): identical images of a row are encoded once (not in fp64, see `loading.adapt`);
the rest is dealt by patch count.
Encode: one tower call a rank for all its images. Place: features [n, F] are padded to the largest rank,
all-gathered, and each rank indexes the rows of its own tokens. Backward adds the rows' gradients in fp32 (fp64 for
fp64) and sums them over the ranks by a reduce-scatter, so that a tower's gradient does not depend on which rank
used its tokens (bugs G12).

A rank without an image runs a dummy of one merge unit when any rank of the micro-step has media: every collective
finds its partners, and as no token refers to it, features and gradient of the dummy are exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from longspan.data.media import Image, Video
from longspan.data.pack import Stream
from longspan.data.sample import Sample
from longspan.layout.comm import all_gather, reduce_scatter
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo
from longspan.layout.travel import sent
from longspan.models.images import Grid, MediaReader

__all__ = ["MediaPlan", "MediaShard", "media_shard", "offset_media_rows", "place_ahead", "place_rows", "plan_media"]


ROWS = ("media_row", "mtp_media_row")  # streams of rows of the visual table: of the token itself, of those ahead of it


@dataclass(frozen=True, slots=True)
class Encoded:
    """One distinct media item of a row: where its pixels are and which rank of the group encodes it."""

    sample: int  # place in the row
    item: int
    grid: Grid
    rank: int
    first: int  # its first row in the gathered table


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """Who encodes what, for one row. `table` maps the row's stacked visual tokens to rows of the gathered features."""

    encoded: tuple[Encoded, ...]
    table: Tensor  # [N] int64 CPU
    tokens: tuple[int, ...]  # visual tokens a sample
    padded: int  # feature rows a rank sends

    def of_rank(self, rank: int) -> tuple[Encoded, ...]:
        return tuple(item for item in self.encoded if item.rank == rank)


@dataclass(frozen=True, slots=True)
class MediaShard:
    """What one rank encodes and which of its tokens take features."""

    pixels: Tensor  # [P, C] fp32 on the device; a dummy merge unit if the rank has no image
    grid: Tensor  # [n, 3] int64 CPU
    positions: Tensor  # [K] int64 on the device: local tokens that take features
    rows: Tensor  # [K] int64 on the device: their rows in the gathered table [size * padded, F]
    padded: int
    group: CPGroup
    ahead: tuple[tuple[Tensor, Tensor], ...] = ()  # the same (positions, rows) of each step of an MTP head


def plan_media(samples: Sequence[Sample], reader: MediaReader, size: int) -> MediaPlan:
    """Deal the distinct media of a row to `size` ranks: largest first, to the rank with the fewest patches so far."""
    keys: dict[tuple[object, ...], int] = {}
    distinct: list[tuple[int, int, Grid]] = []
    order: list[tuple[int, int]] = []  # (sample, distinct item) of every media item of the row
    for place, sample in enumerate(samples):
        for item, media in enumerate(sample.media):
            key = (type(media).__name__, *media.key()) if reader.share else (place, item)
            if key not in keys:
                keys[key] = len(distinct)
                distinct.append((place, item, reader.grid(media)))
            order.append((place, keys[key]))
    tokens = [sum(reader.run_lengths(grid)) for _, _, grid in distinct]
    ranks = _deal([grid[0] * grid[1] * grid[2] for _, _, grid in distinct], size)
    used = [0] * size
    firsts = []
    for rank, count in zip(ranks, tokens, strict=True):
        firsts.append(used[rank])
        used[rank] += count
    padded = max(1, *used)  # a dummy sends one row
    first_rows = [rank * padded + first for rank, first in zip(ranks, firsts, strict=True)]
    pieces = [torch.arange(first_rows[number], first_rows[number] + tokens[number]) for _, number in order]
    per_sample = [0] * len(samples)
    for place, number in order:
        per_sample[place] += tokens[number]
    return MediaPlan(
        encoded=tuple(
            Encoded(place, item, grid, rank, first)
            for (place, item, grid), rank, first in zip(distinct, ranks, first_rows, strict=True)
        ),
        table=torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64),
        tokens=tuple(per_sample),
        padded=padded,
    )


def _deal(costs: Sequence[int], size: int) -> list[int]:
    loads, ranks = [0] * size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[number] = loads.index(min(loads))
        loads[ranks[number]] += costs[number]
    return ranks


def offset_media_rows(tensors: Sequence[Mapping[str, Tensor]], tokens: Sequence[int]) -> list[dict[str, Tensor]]:
    """`media_row` from rows of a sample's table to rows of the packed row's table. tokens: visual tokens a sample."""
    shifted = []
    for row, base in zip(tensors, accumulate(tokens, initial=0), strict=False):
        found = {name: row[name] for name in ROWS if name in row}
        moved = {name: torch.where(rows >= 0, rows + base, rows) for name, rows in found.items()}
        shifted.append(dict(row) | moved)
    return shifted


def media_shard(
    plan: MediaPlan,
    *,
    samples: Sequence[Sample],
    reader: MediaReader,
    stream: Stream,
    info: SeqInfo,
    device: torch.device,
    threads: int = 1,
) -> MediaShard:
    """Decode this rank's images, `threads` at a time, and look up its tokens' rows. `samples` are the row's; `info.group` is
    its CP group."""
    mine = plan.of_rank(info.group.rank)
    pixels = _pixels([samples[item.sample].media[item.item] for item in mine], mine, reader, device, threads)
    grid = torch.tensor([item.grid for item in mine] or [[1, reader.merge, reader.merge]])

    def find(media_row: Tensor) -> tuple[Tensor, Tensor]:  # [T_local] -> [K], [K]
        positions = (media_row >= 0).nonzero()[:, 0]
        rows = plan.table[media_row[positions]]
        return sent(positions, device), sent(rows, device)

    positions, rows = find(stream.fields["media_row"][info.index])
    ahead = stream.fields["mtp_media_row"][:, info.index] if "mtp_media_row" in stream.fields else ()
    return MediaShard(
        pixels=pixels,
        grid=grid,
        positions=positions,
        rows=rows,
        padded=plan.padded,
        group=info.group,
        ahead=tuple(find(media_row) for media_row in ahead),
    )


def _pixels(
    media: Sequence[Image | Video], items: Sequence[Encoded], reader: MediaReader, device: torch.device, threads: int
) -> Tensor:
    """[P, C] fp32 on the device. PIL lets threads decode side by side."""
    if not media:
        return torch.zeros(reader.merge**2, reader.patch_width, device=device)
    counts = [math.prod(item.grid) for item in items]
    found, there = torch.empty(sum(counts), reader.patch_width, device=device), reader.on(device)
    with ThreadPoolExecutor(threads) as pool:
        decoded = pool.map(reader.frames, media)
        for item, frames, own in zip(media, decoded, found.split(counts), strict=True):
            there.write_patches(item, frames.to(device), own)
    return found


def place_rows(features: Tensor, media: MediaShard) -> Tensor:
    """features [n, F] that this rank encoded -> [K, F], the features of this rank's visual tokens. Collective."""
    return _PlaceRows.apply(features, media)


def place_ahead(features: Tensor, media: MediaShard) -> list[tuple[Tensor, Tensor]]:
    """features [n, F] that this rank encoded -> (positions [K], features [K, F]) of each step ahead, in one
    collective."""
    rows = torch.cat([rows for _, rows in media.ahead])
    placed = place_rows(features, replace(media, rows=rows)).split([len(rows) for _, rows in media.ahead])
    return [(positions, own) for (positions, _), own in zip(media.ahead, placed, strict=True)]


class _PlaceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features: Tensor, media: MediaShard) -> Tensor:
        ctx.media, ctx.num = media, features.shape[0]
        group = media.group
        if group.size == 1:
            return features[media.rows]
        sent = features.new_zeros(media.padded, features.shape[1])
        sent[: features.shape[0]] = features
        return all_gather(sent, group)[media.rows]  # [padded, F] -> [size * padded, F] -> [K, F]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        media = ctx.media
        group = media.group
        wide = torch.promote_types(grad.dtype, torch.float32)
        table = torch.zeros(group.size * media.padded, grad.shape[1], dtype=wide, device=grad.device)
        # index_put_, not index_add_: its CUDA kernel sorts, so the sum over shared images is reproducible
        table.index_put_((media.rows,), grad.to(wide), accumulate=True)
        table = reduce_scatter(table, group)  # [size * padded, F] -> [padded, F], summed
        return table[: ctx.num].to(grad.dtype), None
