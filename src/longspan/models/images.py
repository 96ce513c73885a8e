"""Media to patches for the Qwen-VL towers: grids from the header alone, pixels only where they are needed.

A grid (t, h, w) counts patches; t*h*w/merge^2 visual tokens come of it. `grid()` reads no more than an image's
size, so that every rank can check a batch cheaply; `frames()` decodes and resizes (smart_resize) on the host, as
Hugging Face's PIL processor does, and `write_patches()` normalises and cuts them into patches [t*h*w, C] fp32 wherever
they are: bytes travel to a GPU, an eighth of what the patches of an image would be. A byte has 256 values, so
normalisation is a table, made by that processor: the same bits. A video is a list of frames: t = ceil(frames /
temporal_patch), the last frame repeated. Sizes come from the model's config; resize limits, resampling, rescaling and
normalisation from the folder's (video_)preprocessor_config.json, if any.
"""

from __future__ import annotations

import json
import math
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
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # Qwen3-VL normalises to -1..1
SETTINGS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")


@dataclass(frozen=True, slots=True)
class Kind:
    """How images, or videos, become patches. Limits in pixels: of an image, or of all frames of a video together."""

    min_pixels: int
    max_pixels: int
    resample: int  # PIL.Image.Resampling
    normal: Tensor  # [3, 256] fp32 CPU: what each byte of each channel becomes


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
        """frames [F, H, W, 3] of this media -> into [t*h*w, C] fp32 on the same device, in the order that the tower
        expects; the axis order of Qwen3VLVideoProcessor.patchify."""
        table = self._kind(media).normal.to(frames.device)
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
    return MediaReader(
        patch=patch,
        merge=merge,
        temporal=temporal,
        image=_kind_of(f"{folder}/preprocessor_config.json", image, {} if image else HALF, area),
        video=_kind_of(f"{folder}/video_preprocessor_config.json", video, HALF, area * temporal),
    )


def _kind_of(path: str, file: dict[str, Any], default: dict[str, list[float]], unit: int) -> Kind:
    """unit: pixels of the smallest image, a token. default: what Hugging Face's processor has where the file is silent."""
    if file.get("do_resize") is False:
        raise UserError(f"{path}: do_resize=false is not supported: a token is {unit} pixels. Set it to true")
    own = {name: file[name] for name in SETTINGS if file.get(name) is not None}
    processor = Qwen2VLImageProcessorPil(**(default | own))
    size = file.get("size") or {}
    low = file.get("min_pixels") or size.get("shortest_edge") or unit
    high = file.get("max_pixels") or size.get("longest_edge") or MAX_TOKENS * unit
    return Kind(int(low), int(high), int(processor.resample), _normal(processor))


def _normal(processor: Qwen2VLImageProcessorPil) -> Tensor:
    """[3, 256] fp32: the processor's rescaling and normalisation of every byte of every channel, as far as it does them."""
    every = np.tile(np.arange(256, dtype=np.uint8), (3, 1))[:, :, None]  # an image of 256 x 1 pixels
    if processor.do_rescale:
        every = processor.rescale(every, processor.rescale_factor)
    if processor.do_normalize:
        every = processor.normalize(every, processor.image_mean, processor.image_std)
    return torch.from_numpy(np.asarray(every, dtype=np.float32)[:, :, 0].copy())


def _read(folder: str | None, name: str) -> dict[str, Any]:
    path = Path(folder or "") / name
    if folder is None or not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
