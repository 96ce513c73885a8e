"""Placeholders, positions, images and expansion of Qwen3-VL on the CPU. Oracle: transformers' own position builder
and processor.

Bugs G2, G5, G7, G10, G17, G18 of the field's reports; planted faults stand beside the checks.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL.Image
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from longspan.data.media import Image, Video
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.models.adapter import read_samples
from longspan.models.expand import NamedModel, expand
from longspan.models.images import MediaReader, media_reader
from longspan.models.loading import load_model
from longspan.models.placeholders import match_spans, media_rows, mrope_positions
from longspan.models.tiny import IMAGE_ID, VIDEO_ID, VISION_END_ID, VISION_START_ID
from longspan.models.vision import offset_media_rows, plan_media
from longspan.parity.oracle_media import PilVideoProcessor


@pytest.fixture(scope="module")
def vl():
    return load_model("tiny:qwen3_vl")[0]


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image_ids(count: int) -> list[int]:
    return [VISION_START_ID, *[IMAGE_ID] * count, VISION_END_ID]


def make(ids: list[int], media=(), trained=()) -> Sample:
    mask = [float(t in trained) for t in range(len(ids))]
    return Sample(input_ids=ids, target_ids=[*ids[1:], 0], mask=mask, media=list(media))


def frames(count: int, height: int, width: int) -> Video:
    return Video(np.stack([picture(height, width, seed) for seed in range(count)]))


def mixed_sample() -> Sample:
    """Text, a 2 x 3 image, a video of 2 frame groups of 1 x 2, an image of one token at the very end."""
    video = [VISION_START_ID, VIDEO_ID, VIDEO_ID, VISION_END_ID]
    ids = [1, 2, 3, *image_ids(6), 4, 5, *video, 6, *video, 7, 8, VISION_START_ID, IMAGE_ID]
    return make(ids, [Image(picture(16, 24)), frames(3, 8, 16), Image(picture(8, 8))])


def test_positions_equal_transformers(vl):
    sample = mixed_sample()
    spans = match_spans(sample, vl.reader, vl.ids)
    kinds = (sample.input_ids == IMAGE_ID).long() + 2 * (sample.input_ids == VIDEO_ID).long()
    expected, _ = vl.model.model.get_rope_index(
        sample.input_ids[None],
        mm_token_type_ids=kinds[None],
        image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 2]]),
        video_grid_thw=torch.tensor([[2, 2, 4]]),
    )
    made = vl.sample_tensors(sample)["position"]
    assert torch.equal(made, expected[:, 0])
    assert not torch.equal(mrope_positions(len(sample), spans[1:]), expected[:, 0])  # control: an image forgotten
    assert vl.media_tokens(sample) == (6, 4, 1)


def test_text_positions_count_up(vl):
    made = vl.sample_tensors(make([5, 6, 7]))
    assert torch.equal(made["position"], torch.arange(3).expand(3, 3))
    assert made["media_row"].tolist() == [-1, -1, -1]


def test_rows_number_the_visual_tokens_in_order(vl):
    sample = mixed_sample()
    rows = media_rows(len(sample), match_spans(sample, vl.reader, vl.ids))
    visual = (sample.input_ids == IMAGE_ID) | (sample.input_ids == VIDEO_ID)
    assert torch.equal(rows[visual], torch.arange(11)) and bool((rows[~visual] == -1).all())


def test_rows_are_stacked_in_row_order(vl):
    """G10: samples with 0, 1, 3 and 2 images, in any order."""
    counts = [0, 1, 3, 2]
    samples = [make([1, *image_ids(1) * n, 2], [Image(picture(8, 8, n * 10 + i)) for i in range(n)]) for n in counts]
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        tensors = [vl.sample_tensors(samples[number]) for number in order]
        tokens = [sum(vl.media_tokens(samples[number])) for number in order]
        rows = torch.cat([row["media_row"] for row in offset_media_rows(tensors, tokens)])
        assert torch.equal(rows[rows >= 0], torch.arange(6))
        plan = plan_media([samples[number] for number in order], vl.reader, 1)
        assert plan.table.tolist() == list(range(6)) and plan.tokens == tuple(tokens)


def test_identical_images_are_encoded_once(vl):
    one, other = picture(8, 16, 1), picture(16, 16, 2)
    samples = [
        make([*image_ids(2), *image_ids(4)], [Image(one), Image(other)]),
        make([*image_ids(4), *image_ids(2)], [Image(other.copy()), Image(one.copy())]),
    ]
    plan = plan_media(samples, vl.reader, 1)
    assert [item.grid for item in plan.encoded] == [(1, 2, 4), (1, 4, 4)]
    assert plan.table.tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 0, 1]


def test_images_are_dealt_by_patches(vl):
    sizes = [(8, 8), (16, 16), (8, 16), (8, 24), (16, 8)]
    ids = [token for h, w in sizes for token in image_ids(h * w // 64)]
    sample = make(ids, [Image(picture(h, w, seed)) for seed, (h, w) in enumerate(sizes)])
    plan = plan_media([sample], vl.reader, 3)
    loads = [sum(item.grid[1] * item.grid[2] for item in plan.of_rank(rank)) for rank in range(3)]
    assert sorted(loads) == [16, 16, 16] and plan.padded == 4
    assert len(set(plan.table.tolist())) == 12  # no row is shared
    assert plan_media([], vl.reader, 3).padded == 1  # a dummy each


def test_sampled_placeholder_is_text(vl):
    """G7: the policy sampled the image id once, and a run of 4."""
    ids = [1, *image_ids(2), 9, IMAGE_ID, 9, IMAGE_ID, IMAGE_ID, IMAGE_ID, IMAGE_ID, 9]
    sampled = range(4, len(ids) - 1)  # targets from token 5 on are trained
    sample = make(ids, [Image(picture(8, 16))], trained=sampled)
    made = vl.sample_tensors(sample)
    assert (made["media_row"] >= 0).nonzero()[:, 0].tolist() == [2, 3]
    text = make([1, *image_ids(2), *[9] * 8], [Image(picture(8, 16))])
    assert torch.equal(made["position"], vl.sample_tensors(text)["position"])
    alone = make([1, 2, IMAGE_ID, 3], trained=[1, 2])
    assert vl.sample_tensors(alone)["media_row"].tolist() == [-1] * 4
    with pytest.raises(UserError, match="belongs to no media"):  # control: the same ids, not sampled
        vl.sample_tensors(make(ids, [Image(picture(8, 16))]))


def test_a_fully_trained_sample_keeps_its_images(vl):
    sample = make([1, *image_ids(2), 9], [Image(picture(8, 16))], trained=range(4))
    assert (vl.sample_tensors(sample)["media_row"] >= 0).sum() == 2


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([1, VISION_START_ID, IMAGE_ID, IMAGE_ID], [(16, 16)], "media 0 .* needs 4 .* found 2 .* position 2.*cut"),
        ([*image_ids(4), 1], [(16, 16), (8, 8)], "media 1 .* no placeholder run: 2 runs needed by 2 media items, 1"),
        ([*image_ids(4), *image_ids(2)], [(16, 16), (16, 16)], "media 1 .* needs 4 .* found 2"),
        ([*image_ids(16), 1], [(16, 16)], "expanded twice"),
        ([*image_ids(1), 1], [(16, 16)], "longspan.expand"),
        ([*image_ids(4), *image_ids(4)], [(16, 16)], "belongs to no media"),
        ([VISION_START_ID, *[VIDEO_ID] * 4, VISION_END_ID], [(16, 16)], f"id {IMAGE_ID}, found 4 of id {VIDEO_ID}"),
    ],
)
def test_mismatches_are_named(vl, ids, sizes, message):
    """G5 and G18: never half an image, never one too many; media index and counts are named."""
    media = [Image(picture(h, w, seed)) for seed, (h, w) in enumerate(sizes)]
    with pytest.raises(UserError, match=message):
        vl.media_tokens(make(ids, media))


def test_errors_name_the_sample(vl):
    whole = make([*image_ids(4), 1], [Image(picture(16, 16))])
    cut = make([1, VISION_START_ID, IMAGE_ID], [Image(picture(16, 16))])
    tensors, tokens = read_samples(vl, [whole, make([1, 2])])
    assert tokens == [(4,), ()] and set(tensors[1]) == {"position", "media_row"}
    with pytest.raises(UserError, match="sample 1: media 0"):
        read_samples(vl, [whole, cut])


def test_an_image_cut_exactly_at_its_end_is_whole(vl):
    assert vl.media_tokens(make([1, VISION_START_ID, *[IMAGE_ID] * 4], [Image(picture(16, 16))])) == (4,)


def test_padding_sides_do_not_matter(vl):
    """G17: padding is text wherever it stands; rows follow the ids, not a processor's type ids."""
    core, media = [1, *image_ids(2), 5], [Image(picture(8, 16))]
    left = vl.sample_tensors(make([0, 0, *core], media))["media_row"]
    right = vl.sample_tensors(make([*core, 0, 0], media))["media_row"]
    assert torch.equal(left[2:], right[:-2]) and bool((left[:2] == -1).all())


def test_text_model_refuses_media():
    text, _ = load_model("tiny:qwen3")
    with pytest.raises(UserError, match="no vision tower"):
        text.media_tokens(make([1, 2], [Image(picture(8, 8))]))


def test_pixels_equal_transformers(vl):
    image = picture(20, 33)
    plain = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 64, "longest_edge": 64 * 16384},
    )  # fmt: skip
    expected = plain(images=[image], return_tensors="pt")
    assert torch.equal(vl.reader.pixels(Image(image)), expected["pixel_values"])
    assert vl.reader.grid(Image(image)) == tuple(expected["image_grid_thw"][0].tolist())


SETTINGS = {
    "no mean given": {},
    "clip": {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
    "not normalised": {"do_normalize": False},
    "not rescaled": {"do_rescale": False, "image_mean": [127.0] * 3, "image_std": [64.0] * 3},
    "rescaled to 0..2": {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
    "bilinear": {"resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}


def reader_of(vl, folder, name: str, settings: dict) -> MediaReader:
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 64, "longest_edge": 64 * 16384}
    (folder / name).write_text(json.dumps(sizes | settings))
    return media_reader(vl.model.config.vision_config, str(folder))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_pixels_follow_the_preprocessor_file(vl, tmp_path, settings):
    image = picture(20, 33)
    made = reader_of(vl, tmp_path, "preprocessor_config.json", settings).pixels(Image(image))
    expected = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images=[image], return_tensors="pt")
    assert torch.equal(made, expected["pixel_values"].float())


def test_videos_have_their_own_file(vl, tmp_path):
    clip, mean, std = frames(2, 16, 24), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    settings = {"image_mean": mean.tolist(), "image_std": std.tolist()}
    reader = reader_of(vl, tmp_path, "video_preprocessor_config.json", settings)
    by_channel = [x.reshape(-1, 3, 2 * 4 * 4).double() for x in (reader.pixels(clip), vl.reader.pixels(clip))]
    raw = by_channel[1] * 0.5 + 0.5
    assert torch.allclose(by_channel[0], (raw - mean[:, None]) / std[:, None], atol=1e-6)
    assert torch.equal(reader.pixels(Image(picture(8, 8))), vl.reader.pixels(Image(picture(8, 8))))


SIZES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
CLIP = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
GREY = SIZES | {"image_mean": 0.25, "image_std": [0.5, 0.6, 0.7], "size": {"shortest_edge": 64, "longest_edge": 640}}
SMALL = SIZES | CLIP | {"size": {"shortest_edge": 2048, "longest_edge": 4096}}
FOLDERS = {
    "transformers 5": {"processor_config": {"image_processor": GREY, "video_processor": SMALL}},
    "nested wins": {
        "processor_config": {"image_processor": GREY, "video_processor": SMALL},
        "preprocessor_config": SMALL,
        "video_preprocessor_config": GREY,
    },
    "nested null": {"processor_config": {"image_processor": None}, "preprocessor_config": GREY},
    "an older processor_config": {"processor_config": {"processor_class": "X"}, "preprocessor_config": SMALL},
    "nested image, plain video": {"processor_config": {"image_processor": GREY}, "video_preprocessor_config": SMALL},
    "images' file alone": {"preprocessor_config": SMALL | {"do_rescale": False}},
    "nested image beside a plain one": {"processor_config": {"image_processor": GREY}, "preprocessor_config": SMALL},
    "no size": {"preprocessor_config": SIZES, "video_preprocessor_config": SIZES},
    "older names": {"preprocessor_config": SIZES | {"min_pixels": 64, "max_pixels": 512}},
    "older names win": {"preprocessor_config": GREY | {"max_pixels": 128}},
    "older names in size": {
        "preprocessor_config": SIZES | {"min_pixels": 64, "max_pixels": 512} | {"size": {"min_pixels": 1, "max_pixels": 2}},
        "video_preprocessor_config": SMALL | {"min_pixels": 2048},
    },
}  # fmt: skip


def write(folder, files: dict) -> str:
    for name, settings in files.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_read_as_hugging_face_reads_it(vl, tmp_path, files):
    """Which section, which limits, which normalisation: Hugging Face's classes load themselves from the folder."""
    reader = media_reader(vl.model.config.vision_config, write(tmp_path, files))
    settings = Qwen2VLImageProcessorPil.get_image_processor_dict(tmp_path)[0]
    if settings.get("size") is None:  # from_pretrained would leave min_pixels in the class for the tests that follow
        settings["size"] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    image, clip = picture(40, 52), frames(3, 40, 52)
    made = Qwen2VLImageProcessorPil(**settings)(images=[image], return_tensors="pt")
    assert reader.grid(Image(image)) == tuple(made["image_grid_thw"][0].tolist())
    assert torch.equal(reader.pixels(Image(image)), made["pixel_values"].float())
    video = PilVideoProcessor.from_pretrained(tmp_path)
    made = video(
        videos=[torch.from_numpy(clip.load()).permute(0, 3, 1, 2)],
        do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt",
    )  # fmt: skip
    assert reader.grid(clip) == tuple(made["video_grid_thw"][0].tolist())
    assert torch.equal(reader.pixels(clip), made["pixel_values_videos"])


def test_each_section_tells(vl, tmp_path):
    """Control of the test above: its two sections give other grids and other numbers."""
    one, other = (
        media_reader(vl.model.config.vision_config, write(tmp_path, {"preprocessor_config": section}))
        for section in (GREY, SMALL)
    )
    for media in (Image(picture(40, 52)), frames(3, 40, 52)):
        assert one.grid(media) != other.grid(media)
    assert not torch.equal(one.image.normal, other.image.normal)


def test_the_class_of_hugging_face_is_left_alone(vl, tmp_path):
    media_reader(vl.model.config.vision_config, write(tmp_path, FOLDERS["older names"]))
    assert Qwen2VLImageProcessorPil.size == {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}


REFUSED = [
    ({"size": {"height": 64, "width": 64}}, r'size=\{"height": 64, "width": 64\} must be .*not of one height'),
    ({"size": [1, 2]}, r"size=\[1, 2\] must be"),
    ({"size": 64}, "size=64 must be"),
    ({"size": {"shortest_edge": 64}}, "size=.* must be"),
    ({"size": {"shortest_edge": 0, "longest_edge": 64}}, "size=.*above 0"),
    ({"image_std": 0}, "image_std=0 must be a number above 0"),
    ({"image_std": [0.5, 0, 0.5]}, r"image_std=\[0.5, 0, 0.5\] must be a number above 0"),
    ({"image_mean": [0.5, 0.5]}, r"image_mean=\[0.5, 0.5\] must be a number, or a list of three"),
    ({"image_mean": "x"}, 'image_mean="x" must be a number'),
    ({"image_mean": [float("nan")] * 3}, "image_mean=.* must be a number"),
    ({"rescale_factor": 0}, "rescale_factor=0 must be a number above 0"),
    ({"do_rescale": "yes"}, 'do_rescale="yes" must be true or false'),
    ({"resample": "bicubic"}, 'resample="bicubic" must be PIL.s number of a filter.*3 bicubic'),
    ({"do_normalize": None}, "do_normalize=null must be true or false"),
    ({"resample": 99}, "resample=99 must be"),
    ({"resample": True}, "resample=true must be"),
    ({"min_pixels": -1}, "min_pixels=-1 must be a whole number of pixels above 0"),
    ({"patch_size": 14}, "patch_size=14 disagrees with the model's config, 4"),
    ({"do_resize": False}, "do_resize=false is not supported"),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED)
@pytest.mark.parametrize(
    ("file", "key"), [("preprocessor_config", None), ("processor_config", "video_processor")], ids=["plain", "nested"]
)
def test_bad_settings_are_refused_by_file_name_and_value(vl, tmp_path, bad, message, file, key):
    section = GREY | bad
    folder = write(tmp_path, {file: section if key is None else {key: section}})
    place = f"/{file}.json" + ("" if key is None else f", {key}")
    with pytest.raises(UserError, match=f"{place}: {message}"):
        media_reader(vl.model.config.vision_config, folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"preprocessor_config": [1]}, r"/preprocessor_config.json holds \[1\]; it must be a JSON object"),
        ({"processor_config": {"image_processor": [1]}}, r"processor_config.json, image_processor holds \[1\]"),
        ({"video_preprocessor_config": SMALL | {"size": None}}, "size=null must be"),
        ({"video_preprocessor_config": SMALL | {"max_pixels": 64}}, "max_pixels=64 is not read for videos.* is 4096"),
        ({"video_preprocessor_config": SMALL | {"cap_pixels_per_frame": True}}, "cap_pixels_per_frame=true is not sup"),
    ],
)
def test_files_that_cannot_be_followed_are_refused(vl, tmp_path, files, message):
    with pytest.raises(UserError, match=message):
        media_reader(vl.model.config.vision_config, write(tmp_path, files))


def test_a_hub_id_is_read_from_its_files(vl, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    (tmp_path / "models--some--model" / "refs").mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "preprocessor_config.json").write_text(json.dumps(GREY))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert media_reader(vl.model.config.vision_config, "some/model").image.max_pixels == 640


def test_one_lazy_picture_in_many_samples_is_decoded_by_many_threads(vl, tmp_path):
    PIL.Image.fromarray(picture(512, 512)).save(tmp_path / "lazy.png")
    wanted = vl.reader.frames(Image(tmp_path / "lazy.png"))
    for _ in range(5):
        lazy = PIL.Image.open(tmp_path / "lazy.png")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(vl.reader.frames, [Image(lazy) for _ in range(4)]))
        assert all(torch.equal(x, wanted) for x in found)


def test_float_and_byte_pixels_are_the_same_picture(vl):
    image = picture(8, 8)
    assert torch.equal(vl.reader.pixels(Image(image)), vl.reader.pixels(Image(image / 255.0)))
    assert Image(image).key() == Image(image / 255.0).key()
    narrow = (torch.from_numpy(image) / 255.0).bfloat16()
    assert Image(narrow).key() == Image(narrow.float()).key()


def test_a_still_video_is_its_image(vl):
    image = picture(16, 24)
    video = Video(np.stack([image] * 4))
    assert vl.reader.grid(video) == (2, 4, 6)
    assert torch.equal(vl.reader.pixels(video), vl.reader.pixels(Image(image)).repeat(2, 1))


def test_video_patches_take_their_frames_in_pairs(vl):
    """The last of three frames is repeated; channel before frame inside a patch (Qwen3VLVideoProcessor.patchify)."""
    clip = np.stack([picture(8, 16, seed) for seed in range(3)])
    made = vl.reader.pixels(Video(clip)).reshape(2, 1, 2, 2, 2, 3, 2, 4, 4)  # t, h, w, mh, mw, c, frame, ph, pw
    scaled = (clip / 255.0 - 0.5) / 0.5
    full = np.concatenate([scaled, scaled[2:]])
    assert made[1, 0, 1, 0, 1, 2, 1, 3, 2] == pytest.approx(full[3, 3, 8 + 4 + 2, 2], abs=1e-6)
    assert made[0, 0, 0, 1, 0, 0, 1, 1, 1] == pytest.approx(full[1, 4 + 1, 1, 0], abs=1e-6)


def test_expand_is_done_once(vl):
    ids = [1, VISION_START_ID, IMAGE_ID, VISION_END_ID, 5, 6, VISION_START_ID, IMAGE_ID, VISION_END_ID, 7, 8]
    mask = [0.0] * 9 + [1.0, 0.0]
    advantage = [float(t) for t in range(11)]
    media = [Image(picture(16, 16)), Image(picture(8, 16, 1))]
    raw = Sample(
        ids,
        [*ids[1:], 0],
        mask,
        {"advantage": advantage, "temperature": [2.0] * 11},
        media=media,
        group="g",
    )
    full = expand(raw, vl)
    assert full.input_ids.tolist() == [1, *image_ids(4), 5, 6, *image_ids(2), 7, 8]
    assert full.mask.tolist() == [0.0] * 13 + [1.0, 0.0] and full.group == "g"
    trained = full.mask > 0
    assert torch.equal(full.target_ids[:-1], full.input_ids[1:])
    assert full.fields["advantage"][trained].tolist() == [9.0]
    assert full.fields["advantage"].tolist() == [0, 1, 0, 0, 0, 2, 3, 4, 5, 6, 0, 7, 8, 9, 10]
    assert full.fields["temperature"].tolist() == [2, 2, 1, 1, 1, *[2] * 5, 1, *[2] * 4]
    assert expand(full, vl) is full  # G18
    assert expand(raw, "tiny:qwen3_vl").input_ids.equal(full.input_ids)
    with pytest.raises(UserError, match="not expanded either"):
        expand(make([*image_ids(4), *image_ids(1)], media), vl)


def test_expand_keeps_sampled_placeholders(vl):
    ids = [1, VISION_START_ID, IMAGE_ID, VISION_END_ID, 5, IMAGE_ID, 7]
    full = expand(make(ids, [Image(picture(16, 16))], trained=[3, 4, 5]), vl)
    assert full.input_ids.tolist() == [1, *image_ids(4), 5, IMAGE_ID, 7]
    assert vl.media_tokens(full) == (4,)


@pytest.mark.parametrize("markers", [True, False])
def test_expand_video(vl, markers):
    placeholder = [VISION_START_ID, VIDEO_ID, VISION_END_ID] if markers else [VIDEO_ID]
    full = expand(make([1, *placeholder, 2], [frames(3, 8, 16)]), vl)
    group = [VISION_START_ID, VIDEO_ID, VIDEO_ID, VISION_END_ID]
    assert full.input_ids.tolist() == [1, *group, *group, 2]
    assert vl.media_tokens(full) == (4,) and expand(full, vl) is full


def test_expand_video_writes_timestamps_where_there_is_a_tokenizer(vl):
    """The mean time of a group's first and last frame, as Qwen3VLProcessor writes it; here one id a character."""

    class Characters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) - 32 for letter in text]

    rules = NamedModel(vl.reader, vl.ids, Characters())
    clip = Video(np.stack([picture(8, 16, seed) for seed in range(3)]), timestamps=(0.5, 1.0, 2.0))
    full = expand(make([1, VISION_START_ID, VIDEO_ID, VISION_END_ID, 2], [clip]), rules)
    text = full.input_ids.tolist()
    group = [VISION_START_ID, VIDEO_ID, VIDEO_ID, VISION_END_ID]
    stamps = [[ord(letter) - 32 for letter in f"<{seconds:.1f} seconds>"] for seconds in (0.75, 2.0)]
    assert text == [1, *stamps[0], *group, *stamps[1], *group, 2]
    assert vl.media_tokens(full) == (4,)


def test_expand_text_and_refusals(vl):
    text = make([1, 2, 3])
    assert expand(text, vl) is text
    with pytest.raises(UserError, match="no vision tower"):
        expand(make([1, 2], [Image(picture(8, 8))]), "tiny:qwen3")
