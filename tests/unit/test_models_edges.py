"""Every shard edge on every token of a placeholder run: which features each rank's tokens take, at cp 2, 3 and 4.

All ranks of a group are simulated in one process (cutting needs no collective). A row holds a sample with an image, a
video of two frame groups with timestamps and an image, behind a prefix of growing length, then a second sample. The
truth is counted by hand: the n-th placeholder of an item takes the n-th row of what that item's rank sends, and step
j of an MTP head at token t takes what token t + j of the same sample takes.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from longspan.data import Image, Sample, Video
from longspan.data.pack import FieldSpec, pack
from longspan.data.plan import Row
from longspan.layout import CPGroup, shard
from longspan.models import Adapter, load_model, media_shard, offset_media_rows, plan_media
from longspan.models.tiny import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID
from longspan.models.vision import MediaPlan, MediaShard

CPU = torch.device("cpu")
STEPS = 2
PREFIXES = 30


@pytest.fixture(scope="module")
def adapters() -> dict[str, Adapter]:
    """Zigzag is for attention-only models; the head with its steps is the hybrid model's."""
    found = {"zigzag": load_model("tiny:qwen3_vl", torch.float64)[0]}
    found["contiguous"] = load_model("tiny:qwen3_5_vl_mtp", torch.float64)[0]
    found["contiguous"].mtp.steps = STEPS
    return found


def run(mark: int, length: int) -> list[int]:
    return [VISION_START_ID, *[mark] * length, VISION_END_ID]


def media(kind: type, *shape: int) -> Image | Video:
    return kind(np.zeros((*shape, 3), dtype=np.uint8))


def samples(before: int) -> list[Sample]:
    """An image of 4 tokens, a video of 2 groups of 2, an image of 1; then a sample with a video of 1 group of 4."""
    video = [7, 8, *run(VIDEO_ID, 2), 9, 8, *run(VIDEO_ID, 2)]
    ids = [*[3] * before, *run(IMAGE_ID, 4), 5, *video, *run(IMAGE_ID, 1), *[4] * (PREFIXES - before)]
    items = [media(Image, 16, 16), media(Video, 3, 8, 16), media(Image, 8, 8)]
    other = [6, 7, 8, *run(VIDEO_ID, 4), 2]
    return [
        Sample(ids, ids, torch.zeros(len(ids)), media=items),
        Sample(other, other, torch.zeros(len(other)), media=[media(Video, 2, 16, 16)]),
    ]


def by_hand(row: list[Sample], plan: MediaPlan, starts: list[int], ahead: int) -> dict[int, int]:
    """Place in the packed row -> row of the gathered table, for tokens whose `ahead`-th follower is visual."""
    found = {}
    for number, (sample, start) in enumerate(zip(row, starts, strict=True)):
        sizes = [4, 4, 1] if number == 0 else [4]
        firsts = [item.first for item in plan.encoded if item.sample == number]
        tables = [first + n for first, size in zip(firsts, sizes, strict=True) for n in range(size)]
        visual = [t for t, token in enumerate(sample.input_ids.tolist()) if token in (IMAGE_ID, VIDEO_ID)]
        assert len(visual) == len(tables)
        found |= {start + t - ahead: table for t, table in zip(visual, tables, strict=True) if t >= ahead}
    return found


@dataclass(frozen=True, slots=True)
class Cut:
    """A packed row over ranks: who encodes what, where samples start, and of each rank its places and its share."""

    plan: MediaPlan
    starts: list[int]
    ranks: list[tuple[torch.Tensor, MediaShard]]

    def taken(self, ahead: int) -> dict[int, int]:
        """Place in the row -> row of the gathered table, over all ranks."""
        found: dict[int, int] = {}
        for places, share in self.ranks:
            positions, rows = ((share.positions, share.rows), *share.ahead)[ahead]
            own = dict(zip(places[positions].tolist(), rows.tolist(), strict=True))
            assert not own.keys() & found.keys()
            found |= own
        return found


def cut(adapter: Adapter, row: list[Sample], size: int, index: str, *, rolled: bool = False) -> Cut:
    tensors = [adapter.sample_tensors(s) | {"input_ids": s.input_ids} for s in row]
    tensors = offset_media_rows(tensors, [sum(adapter.media_tokens(s)) for s in row])
    declared = adapter.declared() | {"input_ids": FieldSpec(torch.int64)}
    stream = pack(Row((0, 1), 0, size), tensors, declared, index)
    if rolled:  # the planted fault: shifted after packing
        stream.fields["mtp_media_row"][0] = stream.fields["media_row"].roll(-1)
    plan, ranks = plan_media(row, adapter.reader, size), []
    for rank in range(size):
        info = shard(stream, CPGroup(None, rank, size, tuple(range(size))), CPU).info
        share = media_shard(plan, samples=row, reader=adapter.reader, stream=stream, info=info, device=CPU)
        ranks.append((info.index, share))
    return Cut(plan, stream.cu_seqlens[:2].tolist(), ranks)


@pytest.mark.parametrize("index", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_edge_on_every_token(adapters: dict[str, Adapter], size: int, index: str) -> None:
    adapter, edges = adapters[index], set()
    for before in range(PREFIXES + 1):
        row = samples(before)
        made = cut(adapter, row, size, index)
        for ahead in range(1 if adapter.mtp is None else 1 + STEPS):
            assert made.taken(ahead) == by_hand(row, made.plan, made.starts, ahead)
        for places, _ in made.ranks:
            chunks = itertools.pairwise([*places.tolist(), -1])
            edges |= {place - before for place, following in chunks if following - place != 1}
    inside = {1, 2, 3, 10, 16}  # counted from the prefix: behind these tokens the image and both groups are divided
    assert inside <= edges, "no edge fell there: lengthen the prefixes"


def test_rows_shifted_after_packing_are_seen(adapters: dict[str, Adapter]) -> None:
    """Control: a shift of the packed row brings the next sample's features into the last one's steps."""
    image, video = [5, *run(IMAGE_ID, 4)], [*run(VIDEO_ID, 4)[1:], 2]
    row = [
        Sample(image, image, torch.zeros(len(image)), media=[media(Image, 16, 16)]),
        Sample(video, video, torch.zeros(len(video)), media=[media(Video, 2, 16, 16)]),
    ]
    wrong = cut(adapters["contiguous"], row, 2, "contiguous", rolled=True)
    right = cut(adapters["contiguous"], row, 2, "contiguous")
    last = wrong.starts[1] - 1
    assert last in wrong.taken(1) and last not in right.taken(1) and wrong.taken(0) == right.taken(0)
