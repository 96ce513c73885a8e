"""What a row's media cost in copies to the device: their bytes, and each kind's normalisation table once for all of them.

The device is torch's "meta": copies are seen, nothing is there. Control: a reader that brings its table for every item.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.data import Image, Sample, Video
from longspan.data.pack import FieldSpec, pack
from longspan.data.plan import Row
from longspan.layout import CPGroup, shard
from longspan.models import load_model, media_shard, plan_media
from longspan.models.images import MediaReader
from longspan.models.tiny import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID

DEVICE = torch.device("meta")


class Travels(TorchDispatchMode):
    """Shapes of what goes to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.device == DEVICE and args[0].device != DEVICE:
            self.shapes.append(tuple(out.shape))
        return out


def sample() -> Sample:
    """Three pictures and two videos, of one token a frame group each."""
    draw = np.random.default_rng(0)
    ids, media = [], []
    for mark in (IMAGE_ID, VIDEO_ID, IMAGE_ID, IMAGE_ID, VIDEO_ID):
        pixels = draw.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
        media.append(Image(pixels[0]) if mark == IMAGE_ID else Video(pixels))
        ids += [VISION_START_ID, mark, VISION_END_ID]
    return Sample(ids, ids, np.zeros(len(ids)), media=media)


def copies() -> list[tuple[int, ...]]:
    adapter, row = load_model("tiny:qwen3_vl")[0], sample()
    tensors = adapter.sample_tensors(row) | {"input_ids": row.input_ids}
    stream = pack(Row((0,), 0, 1), [tensors], adapter.declared() | {"input_ids": FieldSpec(torch.int64)}, "contiguous")
    info = shard(stream, CPGroup.alone(), torch.device("cpu")).info
    plan = plan_media([row], adapter.reader, 1)
    assert len(plan.encoded) == 5
    with Travels() as travels:
        made = media_shard(plan, samples=[row], reader=adapter.reader, stream=stream, info=info, device=DEVICE)
    assert made.pixels.device == DEVICE and len(made.pixels) == 5 * adapter.reader.merge**2
    return travels.shapes


def test_a_table_travels_once_for_all_media(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = copies()
    assert shapes.count((3, 256)) == 2, "one for pictures, one for videos"
    assert sum(len(shape) == 4 for shape in shapes) == 5
    write = MediaReader.write_patches

    def brings_its_table(self: MediaReader, media: Image | Video, frames: torch.Tensor, into: torch.Tensor) -> None:
        write(load_model("tiny:qwen3_vl")[0].reader.on(frames.device), media, frames, into)

    monkeypatch.setattr(MediaReader, "write_patches", brings_its_table)
    assert copies().count((3, 256)) > 2
