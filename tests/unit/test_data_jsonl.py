"""Samples as JSON lines: they come back equal, and errors name the line."""

import json

import numpy as np
import PIL.Image
import pytest
import torch

from longspan.data import Image, Sample, Video
from longspan.data.jsonl import read_jsonl, write_jsonl
from longspan.errors import UserError


def test_round_trip_with_media(tmp_path):
    (tmp_path / "pictures").mkdir()
    PIL.Image.fromarray(np.full((4, 6, 3), 9, dtype=np.uint8)).save(tmp_path / "pictures" / "a.png")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 5, 3), dtype=np.uint8)
    media = [Image(tmp_path / "pictures" / "a.png"), Image(pixels[0]), Video(pixels, timestamps=(0.0, 0.5, 1.0))]
    fields = {
        "advantage": [0.1, -1 / 3, 0.0],
        "old_logprob": torch.tensor([-0.1, -0.2, 0.0]),
        "teacher_ids": [[1, 2], [3, 4], [5, 6]],
    }
    written = [
        Sample([5, 6, 7], [6, 7, -100], [0, 1, 0], fields=fields, media=media, group="prompt-17", adapter="a"),
        Sample([1], [2], [1], group=3),
    ]
    path = tmp_path / "data.jsonl"
    write_jsonl(path, written)
    read = read_jsonl(path)
    for before, after in zip(written, read, strict=True):
        for name in ("input_ids", "target_ids", "mask"):
            assert torch.equal(getattr(before, name), getattr(after, name))
        assert before.group == after.group and before.adapter == after.adapter
        assert set(before.fields) == set(after.fields)
        for name, values in before.fields.items():
            assert torch.equal(values.to(after.fields[name].dtype), after.fields[name])
    assert json.loads(path.read_text().splitlines()[0])["media"][0] == {"image": "pictures/a.png"}
    assert np.array_equal(np.asarray(read[0].media[1].load()), pixels[0])
    assert np.array_equal(read[0].media[2].load(), pixels) and read[0].media[2].timestamps == (0.0, 0.5, 1.0)
    assert not list(tmp_path.glob("*.part"))


GOOD = {"input_ids": [1, 2], "target_ids": [2, -100], "mask": [1, 0]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "an object, got list"),
        (json.dumps({"input_ids": [1]}), "missing keys ['target_ids', 'mask']"),
        (json.dumps(GOOD | {"advantage": [1, 2]}), "unknown keys ['advantage']"),
        (json.dumps(GOOD | {"mask": [1]}), "mask has length 1"),
        (json.dumps(GOOD | {"mask": 1}), "'mask' is a int"),
        (json.dumps(GOOD | {"fields": [1]}), "'fields' is a list"),
        (json.dumps(GOOD | {"fields": {"advantage": [0.0, float("nan")]}}), "is nan at position 1"),
        (json.dumps(GOOD | {"fields": {"advantage": [[1.0], [1.0, 2.0]]}}), "not a rectangular array of numbers"),
        (json.dumps(GOOD | {"fields": {"advantage": [0.0, "b"]}}), "fields['advantage'][1] is 'b', not a number"),
        (json.dumps(GOOD | {"fields": {"top": [[1, 2], [3, None]]}}), "fields['top'][1][1] is null, not a number"),
        (json.dumps(GOOD | {"input_ids": [1, 10**30]}), f"input_ids[1] is {10**30}, not a number that 64 bits hold"),
        (json.dumps(GOOD | {"input_ids": [2**63, 2**63]}), "input_ids[0] is 9223372036854775808, not a number"),
        (json.dumps(GOOD | {"fields": {"f": [0.5, 2**63]}}), "fields['f'][1] is 9223372036854775808, not a number"),
        (json.dumps(GOOD | {"target_ids": [None, 1]}), "target_ids[0] is null, not a number"),
        (json.dumps(GOOD | {"mask": [1, "0"]}), "mask[1] is '0', not a number"),
        ('{"input_ids": [1' + "0" * 5000 + "]}", "not JSON: Exceeds the limit"),
        ("[" * 100000, "brackets are nested too deeply"),
        (json.dumps(GOOD | {"input_ids": "DEEP"}).replace('"DEEP"', "[" * 900 + "1" + "]" * 900), "line 3"),
        (json.dumps(GOOD | {"media": [{"image": "no.png"}]}), "no.png does not exist"),
        (json.dumps(GOOD | {"media": [{"picture": "no.png"}]}), "neither"),
        (json.dumps(GOOD | {"group": [1]}), "'group' is a string"),
    ],
)
def test_errors_name_file_and_line(tmp_path, line, words):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(UserError) as caught:
        read_jsonl(path)
    assert f"{path} line 3: " in str(caught.value) and words in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("line", "byte"),
    [
        ('{"group": "gr\u00fcn"}'.encode("latin1"), "byte 14 of the line is 0xfc"),
        (json.dumps(GOOD).encode("utf-16"), "byte 1 of the line is 0xff"),
        (b'{"group": "\xc3', "byte 12 of the line is 0xc3"),  # a character cut off at the end
    ],
)
def test_a_file_that_is_not_utf8_is_refused_by_line_and_byte(tmp_path, line, byte):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD | {"group": "gr\u00fcn"}, ensure_ascii=False).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(UserError) as caught:
        read_jsonl(path)
    assert f"{path} line 3: {byte}" in str(caught.value) and "in UTF-8" in str(caught.value), str(caught.value)
    assert "latin1" not in str(caught.value)


@pytest.mark.parametrize(
    ("encoding", "words"), [("utf-8-sig", "Save it as UTF-8 without BOM"), ("utf-16-le", "is the file UTF-16")]
)
def test_marks_and_zero_bytes_are_named(tmp_path, encoding, words):
    path = tmp_path / "data.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\n").encode(encoding))
    with pytest.raises(UserError, match=words) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path} line 1: ")


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_jsonl(tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no sample"):
        read_jsonl(tmp_path / "empty.jsonl")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "data.jsonl"
    write_jsonl(path, [Sample([1], [2], [1])])
    before = path.read_text()
    with pytest.raises(UserError):
        write_jsonl(path, (Sample([k], [2, 3], [1]) for k in range(2)))
    assert path.read_text() == before and not list(tmp_path.glob("*.part"))
