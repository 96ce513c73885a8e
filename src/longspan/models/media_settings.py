"""What a model's files say of its preprocessing: the sections that Hugging Face's processors read, and their defaults.

Where: "image_processor" and "video_processor" of processor_config.json, which transformers 5 writes, win over
preprocessor_config.json and video_preprocessor_config.json; a video with neither takes preprocessor_config.json. What
a section leaves out is the default of Qwen2VLImageProcessor (3136 to 1003520 pixels an image, CLIP's mean and std) or
Qwen3VLVideoProcessor (131072 to 786432 pixels a video, the range -1..1). With no section at all, where Hugging Face
has no processor: 1 to 16384 tokens (Qwen3-VL's own limit of an image) an image or video, the range -1..1. A value that
these processors would not honour, or would fail on later, is refused here by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.utils.hub import cached_file

from longspan.errors import UserError

__all__ = ["Kind", "read_kinds"]

Settings = dict[str, Any]  # JSON

MAX_TOKENS = 16384
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Copies: given min_pixels and no size, Hugging Face's image processor writes into its class's own dict.
IMAGE_SIZE, VIDEO_SIZE = dict(Qwen2VLImageProcessorPil.size), dict(Qwen3VLVideoProcessor.size)
VIDEO = {"image_mean": Qwen3VLVideoProcessor.image_mean, "image_std": Qwen3VLVideoProcessor.image_std}


@dataclass(frozen=True, slots=True)
class Kind:
    """How images, or videos, become patches. Limits in pixels: of an image, or of all frames of a video together."""

    min_pixels: int
    max_pixels: int
    resample: int  # PIL.Image.Resampling
    normal: Tensor  # [3, 256] fp32 CPU: what each byte of each channel becomes


@dataclass(frozen=True, slots=True)
class Section:
    """The settings of one processor and the place where they stand."""

    place: str
    values: Settings

    def refusal(self, name: str, value: object, rule: str) -> UserError:
        return UserError(f"{self.place}: {name}={json.dumps(value)} {rule}")


def read_kinds(vision: PretrainedConfig, folder: str | None) -> tuple[Kind, Kind]:
    """How a model's images and videos are preprocessed. folder: a folder or hub id, which may have processor files."""
    nested = _read(folder, "processor_config.json")
    plain = _read(folder, "preprocessor_config.json")
    image = _nested(nested, "image_processor") or plain
    own_video = _nested(nested, "video_processor") or _read(folder, "video_preprocessor_config.json")
    video = own_video or plain
    for section in (image, video):
        if section is not None:
            _check(section, vision)
    token = (vision.patch_size * vision.spatial_merge_size) ** 2  # pixels
    group = token * vision.temporal_patch_size
    return (
        _kind((token, MAX_TOKENS * token), HALF) if image is None else _kind(_image_limits(image), image.values),
        _kind((group, MAX_TOKENS * group), HALF)
        if video is None
        else _kind(_video_limits(video, own=video is own_video), video.values, VIDEO),
    )


def _read(folder: str | None, name: str) -> Section | None:
    path = _path(folder, name)
    if path is None:
        return None
    try:
        return _section(str(path), json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error


def _path(folder: str | None, name: str) -> Path | None:
    if folder is None or folder.startswith("tiny:"):
        return None
    if Path(folder).exists():
        path = Path(folder) / name
        return path if path.is_file() else None
    found = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)  # a hub id, as transformers asks
    return None if found is None else Path(found)


def _section(place: str, values: object) -> Section:
    if not isinstance(values, dict):
        raise UserError(f"{place} holds {json.dumps(values)[:80]}; it must be a JSON object of settings")
    return Section(place, values)


def _nested(file: Section | None, name: str) -> Section | None:
    if file is None or file.values.get(name) is None:
        return None
    return _section(f"{file.place}, {name}", file.values[name])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _each_channel(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    def fit(value: object) -> bool:
        return len(value) == 3 and all(map(fits, value)) if isinstance(value, list) else fits(value)

    return fit


FLAG = (_is_flag, "must be true or false")
PIXELS = (lambda value: value is None or _is_count(value), "must be a whole number of pixels above 0")
RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "do_resize": (
        lambda value: value is True,
        "is not supported: height and width must become whole tokens. Set it to true",
    ),
    "do_rescale": FLAG,
    "do_normalize": FLAG,
    "rescale_factor": (_is_positive, "must be a number above 0, such as 0.00392156862745098 for 1/255"),
    "image_mean": (_each_channel(_is_number), "must be a number, or a list of three for red, green and blue"),
    "image_std": (_each_channel(_is_positive), "must be a number above 0, or a list of three for red, green and blue"),
    "resample": (
        lambda value: type(value) is int and value in list(PIL.Image.Resampling),  # true is 1 for isinstance
        "must be PIL's number of a filter: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming",
    ),
    "min_pixels": PIXELS,
    "max_pixels": PIXELS,
}
OLDER_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
NORMAL = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")


def _check(section: Section, vision: PretrainedConfig) -> None:
    """Every value but the size."""
    sizes = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    for name, wanted in sizes.items():
        if section.values.get(name) not in (None, wanted):
            raise section.refusal(
                name, section.values[name], f"disagrees with the model's config, {wanted}; make them agree"
            )
    for name, (fits, rule) in RULES.items():
        if name in section.values and not fits(section.values[name]):
            raise section.refusal(name, section.values[name], rule)


def _image_limits(section: Section) -> tuple[int, int]:
    """min_pixels and max_pixels, the older names, win."""
    size, values = section.values.get("size"), section.values
    size = IMAGE_SIZE if size is None else size
    if isinstance(size, dict):
        for older, name in OLDER_NAMES.items():
            if values.get(older) is not None:
                size = {key: value for key, value in size.items() if key != older} | {name: values[older]}
    return _limits(section, size)


def _video_limits(section: Section, *, own: bool) -> tuple[int, int]:
    """The older names are not read for videos: refused in a section of their own, silent in the images'."""
    if section.values.get("cap_pixels_per_frame"):
        raise section.refusal(
            "cap_pixels_per_frame",
            section.values["cap_pixels_per_frame"],
            "is not supported; resize the frames before and set it to false",
        )
    limits = _limits(section, section.values.get("size", VIDEO_SIZE))
    for (older, name), limit in zip(OLDER_NAMES.items(), limits, strict=True):
        if own and section.values.get(older) not in (None, limit):
            raise section.refusal(
                older,
                section.values[older],
                f"is not read for videos, whose size.{name} is {limit}; write the limit there and remove {older}",
            )
    return limits


def _limits(section: Section, size: object) -> tuple[int, int]:
    if not (
        isinstance(size, dict)
        and size.keys() == {"shortest_edge", "longest_edge"}
        and all(_is_count(value) for value in size.values())
    ):
        raise section.refusal(
            "size",
            size,
            'must be {"shortest_edge": the fewest pixels, "longest_edge": the most}, whole numbers above 0: these towers '
            "take pictures of any shape, not of one height and width",
        )
    return size["shortest_edge"], size["longest_edge"]


def _kind(limits: tuple[int, int], settings: Settings, default: Settings | None = None) -> Kind:
    """default: where Hugging Face's is not the image processor's."""
    stated = {name: settings[name] for name in NORMAL if name in settings}
    processor = Qwen2VLImageProcessorPil(**(default or {}) | stated)
    return Kind(*limits, int(processor.resample), _normal(processor))


def _normal(processor: Qwen2VLImageProcessorPil) -> Tensor:
    """[3, 256] fp32: the processor's rescaling and normalisation of every byte of every channel, as far as it does them."""
    every = np.tile(np.arange(256, dtype=np.uint8), (3, 1))[:, :, None]  # an image of 256 x 1 pixels
    if processor.do_rescale:
        every = processor.rescale(every, processor.rescale_factor)
    if processor.do_normalize:
        every = processor.normalize(every, processor.image_mean, processor.image_std)
    return torch.from_numpy(np.asarray(every, dtype=np.float32)[:, :, 0].copy())
