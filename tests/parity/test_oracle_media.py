"""The oracle's pixels, against the formula written out: a video's settings are its own, not the images'."""

import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from longspan.data import Image, Video
from longspan.models.tiny import tiny
from longspan.parity.oracle_media import MediaInputs

SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
WIDE = {"size": {"shortest_edge": 64, "longest_edge": 1 << 20}}
IMAGE = SIZES | WIDE | {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
RAW = SIZES | WIDE | {"do_rescale": False, "image_mean": [127.0, 126.0, 125.0], "image_std": [64.0, 63.0, 62.0]}
FOLDERS = {
    "plain": {"preprocessor_config": IMAGE, "video_preprocessor_config": RAW},
    "nested": {"processor_config": {"image_processor": IMAGE, "video_processor": RAW}},
    "the video's alone": {"video_preprocessor_config": RAW},
    "the images' for both": {"preprocessor_config": RAW},
}
CLIP = np.random.default_rng(0).integers(0, 256, (3, 20, 33, 3), dtype=np.uint8)


def inputs(folder: Path, files: dict) -> MediaInputs:
    for name, settings in files.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    return MediaInputs(str(folder), tiny("qwen3_vl"))


def by_hand(mean: list[float], std: list[float], height: int, width: int) -> np.ndarray:
    """CLIP resized, its last frame repeated, (x - mean) / std, cut in the order (t, h/m, w/m, m, m) of patches and
    (channel, frame, row, column) inside one."""
    frames = [np.asarray(PIL.Image.fromarray(frame).resize((width, height), PIL.Image.BICUBIC)) for frame in CLIP]
    video = (np.stack([*frames, frames[-1]]) - np.array(mean)) / np.array(std)
    patches = []
    for t in range(0, 4, 2):
        for top in range(0, height, 8):
            for left in range(0, width, 8):
                for y in (top, top + 4):
                    for x in (left, left + 4):
                        patches.append(video[t : t + 2, y : y + 4, x : x + 4].transpose(3, 0, 1, 2).reshape(-1))
    return np.stack(patches)


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_a_video_follows_its_own_settings(tmp_path: Path, files: dict) -> None:
    media = inputs(tmp_path, files)
    pixels, grid = media._video(Video(CLIP))
    assert grid == (2, 4, 8)
    assert np.abs(pixels.numpy() - by_hand(RAW["image_mean"], RAW["image_std"], 16, 32)).max() < 1e-5
    wrong = by_hand(IMAGE["image_mean"], IMAGE["image_std"], 16, 32)
    assert np.abs(pixels.numpy() - wrong).max() > 1  # control: the images' settings


def test_limits_are_of_the_whole_video(tmp_path: Path) -> None:
    small = RAW | {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    media = inputs(tmp_path, {"preprocessor_config": IMAGE, "video_preprocessor_config": small})
    assert media.grid(Video(CLIP)) == (2, 2, 4)  # the image's limits would leave 16 x 32 pixels
    assert media.grid(Image(CLIP[0])) == (1, 4, 8)
    assert media.grid(Video(CLIP[:1])) == (1, 4, 8)  # a single frame is a frame group


def test_a_folder_without_files_has_the_default(tmp_path: Path) -> None:
    media = inputs(tmp_path, {})
    assert media.grid(Video(CLIP)) == (2, 4, 8)
    pixels, _ = media._video(Video(CLIP))
    assert np.abs(pixels.numpy() - by_hand([127.5] * 3, [127.5] * 3, 16, 32)).max() < 1e-5
