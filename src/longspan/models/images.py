"""Media to patches for the Qwen-VL towers: grids from the header alone, pixels only where they are needed.

A grid (t, h, w) counts patches; t*h*w/merge^2 visual tokens come of it. `grid()` reads no more than an image's
size, so that every rank can check a batch cheaply; `frames()` decodes and resizes (smart_resize) on the host, as
Hugging Face's PIL processor does, and `write_patches()` normalises and cuts them into patches [t*h*w, C] fp32 wherever
they are: bytes travel to a GPU, an eighth of what the patches of an image would be. A byte has 256 values, so
normalisation is a table, made by that processor: the same bits. A video is a list of frames: t = ceil(frames /
temporal_patch), the last frame repeated. Sizes come from the model's config; resize limits, resampling, rescaling and
normalisation from its processor files (media_settings.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

from longspan.data.media import Image, Video
from longspan.errors import UserError
from longspan.models.media_settings import Kind, read_kinds

__all__ = ["MediaReader", "media_reader"]

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MediaReader:
    """How one model cuts media into patches."""

    patch: int
    merge: int
    temporal: int
    image: Kind
    video: Kind
    share: bool = True  # encode identical media of a row once

    @property
    def factor(self) -> int:
        """Height and width are resized to multiples of this."""
        return self.patch * self.merge

    @property
    def patch_width(self) -> int:
        """C, the length of a flat patch."""
        return 3 * self.temporal * self.patch * self.patch

    def grid(self, media: Image | Video) -> Grid:
        """(t, h, w) in patches, from the header."""
        frames = media.num_frames() if isinstance(media, Video) else 1
        height, width = self.resized(media, frames)
        return -(-frames // self.temporal), height // self.patch, width // self.patch

    def resized(self, media: Image | Video, frames: int) -> tuple[int, int]:
        """(height, width) after smart_resize."""
        height, width = media.size()
        try:
            if isinstance(media, Image):
                return smart_resize(height, width, self.factor, self.image.min_pixels, self.image.max_pixels)
            frames = max(frames, self.temporal)
            return smart_resize_video(
                frames, height, width, self.temporal, self.factor, self.video.min_pixels, self.video.max_pixels
            )
        except ValueError as error:
            raise UserError(
                f"{type(media).__name__} of {height} x {width} pixels cannot be resized: {error}"
            ) from error

    def on(self, device: torch.device) -> MediaReader:
        """A reader that writes patches there. One for many media: the host waits while its tables travel."""
        image, video = (replace(kind, normal=kind.normal.to(device)) for kind in (self.image, self.video))
        return replace(self, image=image, video=video)

    def run_lengths(self, grid: Grid) -> list[int]:
        """Placeholder runs of one item: one an image, one a frame group of a video."""
        frames, height, width = grid
        return [height * width // self.merge**2] * frames

    def frames(self, media: Image | Video) -> Tensor:
        """Decoded and resized: [F, H, W, 3] uint8 CPU; an image is one frame."""
        frames = [media.load()] if isinstance(media, Image) else [PIL.Image.fromarray(frame) for frame in media.load()]
        height, width = self.resized(media, len(frames))
        resample = self._kind(media).resample
        return torch.from_numpy(np.stack([np.asarray(frame.resize((width, height), resample)) for frame in frames]))

    def write_patches(self, media: Image | Video, frames: Tensor, into: Tensor) -> None:
        """frames [F, H, W, 3] of this media -> into [t*h*w, C] fp32, both where this reader is, in the order that the tower
        expects; the axis order of Qwen3VLVideoProcessor.patchify."""
        table = self._kind(media).normal
        place = frames.int() + 256 * torch.arange(3, dtype=torch.int32, device=frames.device)
        looked = table.flatten().index_select(0, place.flatten()).view(frames.shape)
        if missing := -len(looked) % self.temporal:
            last = looked[-1:]
            looked = (
                torch.cat([looked, *[last] * missing]) if len(looked) > 1 else last.expand(self.temporal, -1, -1, -1)
            )
        h, w = frames.shape[1] // self.factor, frames.shape[2] // self.factor
        cut = looked.unflatten(0, (-1, self.temporal)).unflatten(3, (w, self.merge, self.patch))
        cut = cut.unflatten(2, (h, self.merge, self.patch))  # t, frame, h, mh, ph, w, mw, pw, channel
        into.view(-1, h, w, self.merge, self.merge, 3, self.temporal, self.patch, self.patch).copy_(
            cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        )

    def pixels(self, media: Image | Video) -> Tensor:
        """Patches [t*h*w, C] fp32 CPU."""
        found = torch.empty(math.prod(self.grid(media)), self.patch_width)
        self.write_patches(media, self.frames(media), found)
        return found

    def _kind(self, media: Image | Video) -> Kind:
        return self.image if isinstance(media, Image) else self.video


def media_reader(vision: PretrainedConfig, folder: str | None) -> MediaReader:
    """The reader for a vision config; `folder`, a folder or hub id, may have processor files."""
    image, video = read_kinds(vision, folder)
    return MediaReader(
        patch=vision.patch_size,
        merge=vision.spatial_merge_size,
        temporal=vision.temporal_patch_size,
        image=image,
        video=video,
    )
