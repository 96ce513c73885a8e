"""EXIF orientation in every format that PIL writes it to: what is loaded, its size from the header alone, and the oracle's pixels.

The truth is the array turned by numpy; of formats that lose, PIL's own plain reading. Controls: a reader that looks for another tag;
one that does not look behind a PNG's pixels.
"""

import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import PIL.PngImagePlugin
import pytest
import torch

from longspan.data import Image, Sample, Video, media
from longspan.errors import UserError
from longspan.models.loading import load_model
from longspan.models.tiny import IMAGE_ID, VISION_END_ID, VISION_START_ID, tiny
from longspan.parity.oracle_media import MediaInputs

STORED = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
TURNS = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
    8: lambda x: np.rot90(x),
}
LOSSLESS = {
    "png": {},
    "tif": {},
    "tiff": {"compression": "tiff_lzw"},
    "webp": {"lossless": True, "exact": True},
}
LOSSY = {"jpg": {}, "webp": {}, "mpo": {"save_all": True}}
MAPPED = ("L", "P", "RGBA", "CMYK", "I;16")  # TIFFs that PIL maps into memory where it opens them by path
LATE = ("eXIf", "profile", "xmp")  # places behind a PNG's pixels
XMP = "<x:xmpmeta><rdf:Description tiff:Orientation='{0}' tiff:Orientation=\"{0}\"/></x:xmpmeta>"


def exif(orientation: int) -> PIL.Image.Exif:
    made = PIL.Image.Exif()
    made[274] = orientation
    return made


def of_mode(mode: str) -> PIL.Image.Image:
    """STORED, as far as the mode holds it."""
    grey = STORED[..., 0]
    return PIL.Image.fromarray(grey.astype(np.uint16)) if mode == "I;16" else PIL.Image.fromarray(STORED).convert(mode)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def late(path: Path, orientation: int, kind: str) -> Path:
    """A PNG that tells its orientation behind its pixels, as some programs write it, after text that says nothing of it."""
    PIL.Image.fromarray(STORED).save(path)
    body, end = path.read_bytes()[:-12], chunk(b"IEND", b"")
    raw = exif(orientation).tobytes()
    profile = f"\nexif\n{len(raw):8}\n{raw.hex()}\n".encode()
    told = {
        "eXIf": chunk(b"eXIf", raw.removeprefix(b"Exif\0\0")),
        "profile": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)),
        "xmp": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.format(orientation).encode()),
        "nothing": b"",
    }[kind]
    path.write_bytes(body + chunk(b"tEXt", b"date:create\x002026-11-30") + told + end)
    return path


def check(path: Path, wanted: np.ndarray) -> None:
    """As a file, as a PIL image that is not decoded yet, and again when it is; pickled before it was, alone and in a video."""
    with PIL.Image.open(path) as opened:
        for image in (Image(path), Image(opened), Image(opened)):
            assert image.size() == wanted.shape[:2]
            assert np.array_equal(np.asarray(image.load()), wanted)
    with PIL.Image.open(path) as one, PIL.Image.open(path) as two:
        image, video = pickle.loads(pickle.dumps((Image(one), Video([two], timestamps=(0.5,)))))
        assert image.size() == video.size() == wanted.shape[:2] and video.timestamps == (0.5,)
        assert np.array_equal(np.asarray(image.load()), wanted) and np.array_equal(video.load()[0], wanted)


@pytest.mark.parametrize("orientation", TURNS)
def test_every_format_is_turned(tmp_path: Path, orientation: int) -> None:
    for suffix, settings in LOSSLESS.items():
        path = tmp_path / f"x.{suffix}"
        PIL.Image.fromarray(STORED).save(path, exif=exif(orientation), **settings)
        check(path, TURNS[orientation](STORED))
    for mode in MAPPED:
        path, picture = tmp_path / f"{mode.replace(';', '')}.tif", of_mode(mode)
        picture.save(path, exif=exif(orientation))
        check(path, TURNS[orientation](np.asarray(picture.convert("RGB"))))
    for kind in LATE:
        check(late(tmp_path / f"{kind}.png", orientation, kind), TURNS[orientation](STORED))
    for suffix, settings in LOSSY.items():
        path = tmp_path / f"lossy.{suffix}"
        PIL.Image.fromarray(STORED).save(path, exif=exif(orientation), **settings)
        with PIL.Image.open(path) as opened:
            plain = np.asarray(PIL.ImageOps.exif_transpose(opened).convert("RGB"))
        assert plain.shape == TURNS[orientation](STORED).shape
        check(path, plain)


def test_a_header_is_enough_where_nothing_stands_behind_the_pixels(tmp_path: Path, monkeypatch) -> None:
    plain, told = late(tmp_path / "plain.png", 6, "nothing"), late(tmp_path / "told.png", 6, "eXIf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media, "_tells_later", lambda png: False)
        assert Image(told).size() == (16, 24), "control: the size of what is turned later"
    monkeypatch.setattr(PIL.PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    assert Image(plain).size() == (16, 24)


def test_a_broken_picture_is_refused_by_name(tmp_path: Path) -> None:
    path = late(tmp_path / "x.png", 6, "eXIf")
    content = bytearray(path.read_bytes())
    start = content.index(b"IDAT") + 4
    content[start : start + 4] = b"\xff" * 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.png cannot be decoded"):
        Image(path).size()


def images(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of a picture and of a folder of two, ours and the oracle's."""
    reader = load_model("tiny:qwen3_vl")[0].reader
    folder = path.parent / "frames"
    folder.mkdir(exist_ok=True)
    for number in range(2):
        (folder / f"{number}{path.suffix}").write_bytes(path.read_bytes())
    items = [Image(path), Video(folder)]
    oracle = MediaInputs("tiny:qwen3_vl", tiny("qwen3_vl"))
    ids = [VISION_START_ID, *[IMAGE_ID] * 6, VISION_END_ID]
    made = oracle.tensors(Sample(ids, ids, np.zeros(len(ids)), media=items))
    assert [oracle.grid(item) for item in items] == [reader.grid(item) for item in items]
    ours = torch.cat([reader.pixels(item) for item in items])
    return ours, torch.cat([made["pixel_values"], made["pixel_values_videos"]])


def test_what_is_decoded_to_another_size_is_refused(tmp_path: Path, monkeypatch) -> None:
    """Control of mapped TIFFs: PIL's own way to decode them."""
    path = tmp_path / "x.tif"
    of_mode("L").save(path, exif=exif(6))
    monkeypatch.setattr(media, "_decode", lambda image: image.load())
    with pytest.raises(
        UserError, match=r"x\.tif is \(24, 16\) \(height, width\) by its header, and \(16, 24\) decoded"
    ):
        Image(path).load()
    of_mode("L").save(path, exif=exif(3))
    assert Image(path).load().size == (24, 16)


@pytest.mark.parametrize(("suffix", "mode"), [("png", "RGB"), ("tif", "RGB"), ("tif", "L"), ("tif", "RGBA")])
def test_patches_are_the_oracles(tmp_path: Path, suffix: str, mode: str) -> None:
    path = tmp_path / f"x.{suffix}"
    of_mode(mode).save(path, exif=exif(6))
    assert torch.equal(*images(path))


def test_a_reader_of_another_tag_is_caught(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "x.png"
    PIL.Image.fromarray(STORED).save(path, exif=exif(3))  # as high and wide as before
    monkeypatch.setattr(media, "EXIF_ORIENTATION", 275)
    assert not torch.equal(*images(path))
    with pytest.raises(AssertionError):
        check(path, TURNS[3](STORED))


@pytest.mark.parametrize(("kind", "dtype"), [("png", np.uint16), ("tif", np.uint16), ("tif", np.float32)])
def test_pixels_of_more_than_8_bits_are_refused(tmp_path: Path, kind: str, dtype: type) -> None:
    """PIL clips them: nearly every pixel of a 16-bit scan would be white. Control: what fits is taken (the tests above)."""
    path = tmp_path / f"wide.{kind}"
    PIL.Image.fromarray(STORED[..., 0].astype(dtype) * dtype(7)).save(path)
    for source in (path, PIL.Image.open(path)):
        with pytest.raises(UserError, match="do not fit 8 bits"):
            Image(source).load()
