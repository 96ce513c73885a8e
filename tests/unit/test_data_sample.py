"""Samples and media: valid by construction, and messages that name the sample, the value, the rule and the way out."""

import dataclasses
import pickle

import numpy as np
import PIL.Image
import pytest
import torch

from longspan.data import Image, Sample, Video, check_samples
from longspan.errors import UserError


def sample(length: int = 4, **changes) -> Sample:
    base = {
        "input_ids": list(range(1, length + 1)),
        "target_ids": [*range(2, length + 1), -100],
        "mask": [1] * (length - 1) + [0],
    }
    return Sample(**(base | changes))


def test_accepts_lists_arrays_and_tensors_and_keeps_cpu_tensors():
    made = Sample(
        np.array([1, 2, 3], dtype=np.int32),
        torch.tensor([2, 3, -100]),
        [True, True, False],
        {
            "advantage": [0.5, -0.5, 0.0],
            "old_logprob": torch.tensor([-1.0, -2.0, 0.0]),
            "teacher_ids": np.ones((3, 2), dtype=np.int32),
            "low": torch.zeros(3, dtype=torch.bfloat16),
        },
        group="prompt-17",
    )
    assert made.input_ids.dtype == made.target_ids.dtype == torch.int64
    assert made.mask.dtype == torch.float32 and made.mask.tolist() == [1, 1, 0]
    assert made.fields["advantage"].dtype == torch.float64
    assert made.fields["old_logprob"].dtype == torch.float32
    assert made.fields["teacher_ids"].dtype == torch.int64 and made.fields["teacher_ids"].shape == (3, 2)
    assert made.fields["low"].dtype == torch.float32
    assert len(made) == 3 and made.num_trained == 2


def test_sample_keeps_its_own_copy():
    ids = torch.tensor([1, 2, 3])
    made = Sample(ids, [2, 3, -100], [1, 1, 0])
    ids[0] = 99
    assert made.input_ids.tolist() == [1, 2, 3]


def test_sample_survives_pickle_and_replace():
    made = sample(fields={"advantage": [1.0, 1.0, 1.0, 0.0]}, group=3)
    again = dataclasses.replace(pickle.loads(pickle.dumps(made)), adapter="a")
    assert again.adapter == "a" and again.group == 3 and torch.equal(again.input_ids, made.input_ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": [], "target_ids": [], "mask": []}, ["empty", "0 tokens"]),
        ({"target_ids": [2, 3]}, ["target_ids has length 2", "input_ids has length 4"]),
        ({"mask": [1, 1, 1]}, ["mask has length 3"]),
        ({"fields": {"advantage": [1.0, 2.0]}}, ["fields['advantage'] has length 2"]),
        ({"mask": [1, 1, 0.5, 0]}, ["mask[2] is 0.5", "not 0 or 1"]),
        ({"fields": {"advantage": [0.0, float("nan"), 0.0, 0.0]}}, ["fields['advantage'] is nan at position 1"]),
        ({"fields": {"old_logprob": [0.0, 0.0, 0.0, float("-inf")]}}, ["is -inf at position 3", "finite"]),
        ({"fields": {"temperature": [1.0, 0.0, 1.0, 1.0]}}, ["temperature", "position 1", "above 0"]),
        ({"fields": {"temperature": [1.0, 1.0, 1e-300, 1.0]}}, ["is 1e-300 at position 2", "above 0, 1e-30 or more"]),
        ({"fields": {"temperature": [[1.0, 1.0]] * 4}, "group": "a"}, ["group 'a'", "has shape [4, 2], not [L]"]),
        ({"fields": {"advantage": [0.0, 1e308, 0.0, 0.0]}}, ["fields['advantage'] is 1e+308 at position 1", "in fp32"]),
        ({"input_ids": [1.0, 2.0, 3.0, 4.0]}, ["input_ids holds floats"]),
        ({"input_ids": [[1, 2, 3, 4]]}, ["input_ids has shape [1, 4]", "not [L]"]),
        ({"fields": {"advantage": 1.0}}, ["fields['advantage']=1.0 must be a tensor, an array or a sequence", "[...]"]),
        ({"fields": {"x": [[1], [2, 3], [4], [5]]}}, ["rectangular"]),
        ({"media": ["a.png"]}, ["media[0]='a.png' must be an Image or a Video", "Image(...)"]),
        ({"images": ["a.png"], "media": [Image("b.png")]}, ["both media= and images="]),
    ],
)
def test_bad_samples_are_refused(changes, words):
    with pytest.raises(UserError) as caught:
        sample(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_check_samples_names_the_sample():
    good = sample()
    check_samples([good, good], vocab_size=5)
    with pytest.raises(UserError, match=r"empty: 0 samples"):
        check_samples([], vocab_size=5)
    with pytest.raises(UserError, match=r"sample 2: input_ids\[3\] is 4, outside the vocabulary of 4"):
        check_samples([sample(2), sample(3), sample(4)], vocab_size=4)
    with pytest.raises(UserError, match=r"sample 1: target_ids\[0\] is -100"):
        check_samples([good, Sample([1], [-100], [1])], vocab_size=5)
    check_samples([Sample([1], [10**9], [0])], vocab_size=5)  # a placeholder may be anything


def test_image_size_reads_the_header_only(tmp_path):
    path = tmp_path / "a.png"
    PIL.Image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)).save(path)
    assert Image(path).size() == (5, 7)
    assert np.asarray(Image(str(path)).load()).shape == (5, 7, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:50])  # the header alone
    assert Image(path).size() == (5, 7)
    with pytest.raises(UserError, match=r"a\.png cannot be decoded"):
        Image(path).load()


def test_orientation_is_applied_to_size_and_pixels(tmp_path):
    path = tmp_path / "turned.jpg"
    exif = PIL.Image.Exif()
    exif[274] = 6
    PIL.Image.fromarray(np.zeros((4, 8, 3), dtype=np.uint8)).save(path, exif=exif)
    assert Image(path).size() == (8, 4) == Image(path).load().size[::-1]


def test_equal_pictures_have_equal_keys(tmp_path):
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    assert (
        Image(pixels).key() == Image(torch.from_numpy(pixels.copy())).key() == Image(PIL.Image.fromarray(pixels)).key()
    )
    assert Image(pixels).key() != Image(pixels[::-1]).key()
    assert Image(pixels / 255.0).key() == Image(pixels).key()
    path = tmp_path / "a.png"
    PIL.Image.fromarray(pixels).save(path)
    assert Image(path).key() == Image(tmp_path / "." / "a.png").key()


def test_grey_pixels_become_rgb():
    for shape in [(3, 5), (3, 5, 1), (5, 3)]:
        loaded = np.asarray(Image(np.full(shape, 7, dtype=np.uint8)).load())
        assert loaded.shape == (*shape[:2], 3) and (loaded == 7).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Image(np.zeros((3, 8, 8))), "not [H, W, 3]"),
        (lambda: Image(3), "Image got a int"),
        (lambda: Image("/nowhere/a.png").size(), "does not exist"),
        (lambda: Image("/nowhere/a.png").key(), "does not exist"),
        (lambda: Image(np.full((2, 2, 3), 3.0)).load(), "0..1"),
        (lambda: Video([]), "0 frames"),
        (lambda: Video(np.zeros((2, 4, 4, 3)), timestamps=(0.0, 0.0)), "rise"),
        (lambda: Video(np.zeros((2, 4, 4, 3)), timestamps=(0.0, 1.0, 2.0)), "2 frames and 3 timestamps"),
        (lambda: Video("/nowhere").num_frames(), "not a folder of frames"),
        (lambda: Video([np.zeros((4, 4, 3)), np.zeros((4, 5, 3))]).load(), "frame 1"),
    ],
)
def test_bad_media_is_refused(make, words):
    with pytest.raises(UserError) as caught:
        make()
    assert words in str(caught.value), str(caught.value)


def test_a_folder_a_list_and_an_array_are_the_same_video(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
    for number, frame in enumerate(frames):
        PIL.Image.fromarray(frame).save(tmp_path / f"{number:03d}.png")
    for video in (Video(tmp_path), Video(list(frames)), Video(frames), Video(torch.from_numpy(frames))):
        assert video.num_frames() == 3 and video.size() == (4, 6)
        assert np.array_equal(video.load(), frames)
    assert Video(frames).key() == Video(frames.copy()).key() != Video(frames, timestamps=(0.0, 0.5, 1.0)).key()
