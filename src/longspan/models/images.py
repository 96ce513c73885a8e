"""Media to patches for the Qwen-VL towers: grids from the header alone, pixels only where they are needed.

A grid (t, h, w) counts patches; t*h*w/merge^2 visual tokens come of it. `grid()` reads no more than an image's
size, so that every rank can check a batch cheaply; `frames()` decodes and resizes (smart_resize) on the host, as
Hugging Face's PIL processor does, and `patches()` normalises and cuts them into patches [t*h*w, C] fp32 wherever they
are: bytes travel to a GPU, an eighth of what the patches of an image would be. A byte has 256 values, so normalisation
is a table, made by that processor: the same bits. A video is a list of frames: t = ceil(frames / temporal_patch), the
last frame repeated. Sizes come from the model's config, resize limits and normalisation from the folder's
(video_)preprocessor_config.json, if any.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

from longspan.data.media import Image, Video
from longspan.errors import UserError

__all__ = ["MediaReader", "media_reader"]

Grid = tuple[int, int, int]
MAX_TOKENS = 16384  # per image or frame, where no preprocessor config says otherwise (Qwen3-VL's own limit)
NORMAL = 0.5  # Qwen3-VL normalises to -1..1


@dataclass(frozen=True, slots=True)
class Limits:
    """Resize limits in pixels: of an image, or of all frames of a video together."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class MediaReader:
    """How one model cuts media into patches."""

    processor: Qwen2VLImageProcessorPil
    patch: int
    merge: int
    temporal: int
    image: Limits
    video: Limits
    normal: Tensor  # [3, 256] fp32 CPU: what each byte of each channel becomes
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

    def run_lengths(self, grid: Grid) -> list[int]:
        """Placeholder runs of one item: one an image, one a frame group of a video."""
        frames, height, width = grid
        return [height * width // self.merge**2] * frames

    def frames(self, media: Image | Video) -> Tensor:
        """Decoded and resized: [F, H, W, 3] uint8 CPU; an image is one frame."""
        frames = [media.load()] if isinstance(media, Image) else [PIL.Image.fromarray(frame) for frame in media.load()]
        height, width = self.resized(media, len(frames))
        return torch.from_numpy(
            np.stack([np.asarray(frame.resize((width, height), self.processor.resample)) for frame in frames])
        )

    def patches(self, frames: Tensor) -> Tensor:
        """[F, H, W, 3] uint8 -> [t*h*w, C] fp32 on their device; the axis order of Qwen3VLVideoProcessor.patchify."""
        missing = -len(frames) % self.temporal
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
        t, h, w = len(frames) // self.temporal, frames.shape[1] // self.factor, frames.shape[2] // self.factor
        cut = frames.reshape(t, self.temporal, h, self.merge, self.patch, w, self.merge, self.patch, 3)
        cut = cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # t, h, w, mh, mw, channel, frame, ph, pw
        place = cut.int() + 256 * torch.arange(3, dtype=torch.int32, device=cut.device).view(3, 1, 1, 1)
        return self.normal.to(cut.device).flatten().index_select(0, place.flatten()).view(-1, self.patch_width)

    def pixels(self, media: Image | Video) -> Tensor:
        """Patches [t*h*w, C] fp32 CPU, in the order that the tower expects."""
        return self.patches(self.frames(media))


def media_reader(vision: PretrainedConfig, folder: str | None) -> MediaReader:
    """The reader for a vision config; `folder` may hold preprocessor files."""
    patch, merge, temporal = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    area = (patch * merge) ** 2
    image = _read(folder, "preprocessor_config.json")
    video = _read(folder, "video_preprocessor_config.json")
    for name, value in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", temporal)):
        for file in (image, video):
            if file.get(name, value) != value:
                raise UserError(
                    f"{folder}: preprocessor says {name}={file[name]}, the model's config {value}; make them agree"
                )
    if video.get("cap_pixels_per_frame"):
        raise UserError(
            f"{folder}: cap_pixels_per_frame is not supported; resize the frames before and set it to false"
        )
    limits = _limits(image, area, MAX_TOKENS * area)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=temporal,
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
        image_mean=image.get("image_mean", [NORMAL] * 3),
        image_std=image.get("image_std", [NORMAL] * 3),
    )
    return MediaReader(
        processor=processor,
        patch=patch,
        merge=merge,
        temporal=temporal,
        image=limits,
        video=_limits(video, area * temporal, MAX_TOKENS * area * temporal),
        normal=_normal(processor),
    )


def _normal(processor: Qwen2VLImageProcessorPil) -> Tensor:
    """[3, 256] fp32: the processor's rescaling and normalisation of every byte of every channel."""
    every = np.tile(np.arange(256, dtype=np.uint8), (3, 1))[:, :, None]  # an image of 256 x 1 pixels
    scaled = processor.rescale(every, processor.rescale_factor)
    made = processor.normalize(scaled, processor.image_mean, processor.image_std)
    return torch.from_numpy(np.asarray(made, dtype=np.float32)[:, :, 0])


def _limits(file: dict[str, Any], least: int, most: int) -> Limits:
    size = file.get("size") or {}
    low = file.get("min_pixels") or size.get("shortest_edge") or least
    high = file.get("max_pixels") or size.get("longest_edge") or most
    return Limits(int(low), int(high))


def _read(folder: str | None, name: str) -> dict[str, Any]:
    path = Path(folder or "") / name
    if folder is None or not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
