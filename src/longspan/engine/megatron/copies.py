"""Tensors that several ranks hold alike: kept alike in every step, and compared before a checkpoint is written.

Tensor-parallel ranks repeat norms, expert blocks, routers, towers and heads, and each has the whole gradient. A kernel that
sums in another order each time would give each rank another last bit, and their weights would part without a word. So the
first rank's gradient is everyone's: a broadcast, which rounds nothing.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import CheckpointError
from longspan.layout import CPGroup, Mesh

__all__ = ["check_copies", "digest", "spread_first"]

BUCKET = 1 << 25  # elements of a broadcast: 128 MiB in fp32
CHUNK = 1 << 22  # elements that a digest widens at a time
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = (-7046029254386353131, -4658895280553007687)  # splitmix64's multipliers, as int64


def spread_first(tensors: Sequence[Tensor], group: CPGroup) -> None:
    """In place: the values of the group's first rank, on all its ranks. Tensors of one dtype. Collective."""
    if group.size == 1:
        return
    start = 0
    while start < len(tensors):
        stop, size = start + 1, tensors[start].numel()
        while stop < len(tensors) and size + tensors[stop].numel() <= BUCKET:
            size += tensors[stop].numel()
            stop += 1
        bucket = tensors[start:stop]
        flat = torch.cat([x.reshape(-1) for x in bucket])
        dist.broadcast(flat, src=group.ranks[0], group=group.group)
        for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
            x.copy_(part.view(x.shape))
        start = stop


def digest(x: Tensor) -> Tensor:
    """[] int64 of the bits of x and their places: a sum of mixed words, so that its order does not matter."""
    words = x.detach().reshape(-1).view(WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, chunk in enumerate(words.split(CHUNK)):
        place = torch.arange(number * CHUNK, number * CHUNK + len(chunk), device=x.device)
        mixed = (chunk.long() ^ (place * ODD[0])) * ODD[1]
        mixed = (mixed ^ (mixed >> 31)) * ODD[0]
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def check_copies(held: Mapping[str, Tensor], mesh: Mesh) -> None:
    """held: what this rank has, under labels that say whose copy it is. CheckpointError on every rank if two ranks differ under
    one label. Collective."""
    digests = torch.stack([digest(x).to(mesh.device) for x in held.values()]).tolist() if held else []
    seen: dict[str, tuple[int, int]] = {}
    for rank, table in enumerate(mesh.gather_objects(dict(zip(held, digests, strict=True)))):
        for label, value in table.items():
            first, wanted = seen.setdefault(label, (rank, value))
            if value != wanted:
                raise CheckpointError(
                    f"ranks {first} and {rank} hold {label} alike and have different bits: they drifted apart. Nothing was saved. "
                    "Load the last checkpoint, and look for what changes weights on one rank only"
                )
