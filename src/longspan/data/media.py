"""References to images and videos. Nothing is decoded until `load()`, which only the ranks that need the pixels call.

`size()` reads no more than a file's header and the names of a PNG's chunks. `key()` is equal for equal pictures, on
every rank: path, size and mtime of a file, or a hash of the pixels of an array; identical images of a micro-step are
encoded once by it. Pixels are uint8 RGB [H, W, 3] (video [F, H, W, 3]); float arrays are taken as 0..1. EXIF orientation
is applied as PIL.ImageOps.exif_transpose does in every format: a PNG may have it behind its pixels, PIL itself turns a TIFF.
"""

import hashlib
import itertools
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile
from torch import Tensor

from longspan.errors import UserError
from longspan.typed import typed

ImageSource = str | os.PathLike[str] | PIL.Image.Image | np.ndarray | Tensor
VideoSource = str | os.PathLike[str] | np.ndarray | Tensor | Sequence[ImageSource]
Key = tuple[str | int, ...]

FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# what PIL's plugins were seen to raise of files that are broken
UNREADABLE = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, ZeroDivisionError, AssertionError, EOFError,
    MemoryError, struct.error, zlib.error, PIL.Image.DecompressionBombError,
)  # fmt: skip
# one PIL image may be in several samples, even of several engines, and decodes itself when first used, in one thread only
_LAZY = threading.Lock()
EXIF_ORIENTATION = 274  # tag; values 5 to 8 swap height and width
TEXTS = (b"tEXt", b"zTXt", b"iTXt")  # chunks of a PNG
KEYWORDS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")  # of those with an orientation


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """One picture: a path, a PIL image, or pixels [H, W, 3] ([H, W] is grey)."""

    source: ImageSource
    _key: list[Key] = field(default_factory=list, init=False, repr=False)  # of pixels, once asked for

    def __post_init__(self) -> None:
        if isinstance(self.source, np.ndarray | Tensor):
            _check_shape("Image", tuple(self.source.shape), frames=False)
        elif not isinstance(self.source, str | os.PathLike | PIL.Image.Image):
            raise UserError(f"Image got a {type(self.source).__name__}. Give a path, a PIL image, or pixels [H, W, 3].")

    def __getstate__(self) -> list[object]:
        _decode_in_memory(self.source)
        return [self.source, self._key]

    def size(self) -> tuple[int, int]:
        """(height, width); a file's header is all that is read."""
        if isinstance(self.source, np.ndarray | Tensor):
            return int(self.source.shape[0]), int(self.source.shape[1])
        if isinstance(self.source, PIL.Image.Image):  # its pixels are decoded on every rank anyway, for its key
            _decode_in_memory(self.source)
            with _LAZY, _readable("a PIL image"):
                return _upright_size(self.source.size, self.source.getexif())
        with _open(Path(self.source)) as image, _readable(f"image file {self.source}"):
            return _upright_size(_written_size(image), _exif(image))

    def load(self) -> PIL.Image.Image:
        """The decoded picture, RGB."""
        if isinstance(self.source, np.ndarray | Tensor):
            return PIL.Image.fromarray(_pixels("Image", self.source))
        if isinstance(self.source, PIL.Image.Image):
            with _LAZY, _readable("a PIL image"):
                return _upright(self.source)
        with _open(Path(self.source)) as image, _readable(f"image file {self.source}"):
            told = _upright_size(_written_size(image), _exif(image))
            loaded = _upright(image)
        if (loaded.height, loaded.width) != told:
            raise UserError(
                f"image file {self.source} is {told} (height, width) by its header, and {(loaded.height, loaded.width)} decoded. "
                "Save it again, as PNG say, or drop the sample."
            )
        return loaded

    def key(self) -> Key:
        """Equal for equal pictures."""
        if isinstance(self.source, np.ndarray | Tensor | PIL.Image.Image):
            if not self._key:
                self._key.append(_hash(np.asarray(self.load())))
            return self._key[0]
        return _path_key(Path(self.source))


@typed
@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames in order: pixels [F, H, W, 3], a list of pictures, or a folder whose image files are the frames by
    name."""

    source: VideoSource
    timestamps: tuple[float, ...] | None = None  # seconds, one a frame, rising; None: the model's default frame rate

    def __post_init__(self) -> None:
        if isinstance(self.source, np.ndarray | Tensor):
            _check_shape("Video", tuple(self.source.shape), frames=True)
        elif not isinstance(self.source, str | os.PathLike):
            object.__setattr__(self, "source", tuple(self.source))
            if not self.source:
                raise UserError("Video got 0 frames. Give at least one, or leave the video out of the sample.")
        if self.timestamps is None:
            return
        stamps = tuple(float(stamp) for stamp in self.timestamps)
        object.__setattr__(self, "timestamps", stamps)
        if any(not later > earlier for earlier, later in itertools.pairwise(stamps)):
            raise UserError(
                f"Video timestamps must rise from frame to frame, got {stamps[:8]}. Sort the frames by time."
            )
        if len(stamps) != self.num_frames():
            raise UserError(
                f"Video has {self.num_frames()} frames and {len(stamps)} timestamps. Give one timestamp a frame."
            )

    def __getstate__(self) -> list[object]:
        for frame in self.source if isinstance(self.source, tuple) else ():
            _decode_in_memory(frame)
        return [self.source, self.timestamps]

    def frames(self) -> tuple[Image, ...]:
        """The frames as references."""
        if isinstance(self.source, np.ndarray | Tensor):
            return tuple(Image(frame) for frame in self.source)
        if isinstance(self.source, str | os.PathLike):
            return tuple(Image(path) for path in _frame_files(Path(self.source)))
        return tuple(Image(frame) for frame in self.source)

    def num_frames(self) -> int:
        """F."""
        if isinstance(self.source, str | os.PathLike):
            return len(_frame_files(Path(self.source)))
        return len(self.source)

    def size(self) -> tuple[int, int]:
        """(height, width) of the first frame."""
        return self.frames()[0].size()

    def load(self) -> np.ndarray:
        """Decoded frames, uint8 [F, H, W, 3]."""
        frames = [np.asarray(frame.load()) for frame in self.frames()]
        odd = next((number for number, frame in enumerate(frames) if frame.shape != frames[0].shape), None)
        if odd is not None:
            raise UserError(
                f"Video frame {odd} is {frames[odd].shape[:2]} (height, width), frame 0 is {frames[0].shape[:2]}. "
                "All frames of a video have one size: resize them before."
            )
        return np.stack(frames)

    def key(self) -> Key:
        """Equal for equal videos."""
        stamps = repr(self.timestamps)
        if isinstance(self.source, np.ndarray | Tensor):
            return (*_hash(_pixels("Video", self.source)), stamps)
        return ("video", stamps, *(part for frame in self.frames() for part in frame.key()))


def _open(path: Path) -> PIL.Image.Image:
    try:
        return PIL.Image.open(path)
    except FileNotFoundError:
        raise UserError(f"image file {path} does not exist (working directory {Path.cwd()}). Check the path.") from None
    except UNREADABLE as error:
        raise UserError(f"image file {path} cannot be read: {error}. Give a PNG, JPEG or WebP file.") from None


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise UserError(f"{what} cannot be decoded: {error}. Replace the file or drop the sample.") from None


def _decode(image: PIL.Image.Image) -> None:
    """PIL maps an uncompressed TIFF that it knows by name into memory, by the size that it is to be turned to: scrambled. A TIFF
    without a name is read."""
    if not isinstance(image, TiffImageFile):
        image.load()
        return
    name, image.filename = image.filename, ""
    try:
        image.load()
    finally:
        image.filename = name


def _decode_in_memory(source: ImageSource) -> None:
    """A PIL image decodes itself where it is pickled too, so it is decoded before."""
    if isinstance(source, PIL.Image.Image):
        with _LAZY, _readable("a PIL image"):
            _decode(source)


def _upright(image: PIL.Image.Image) -> PIL.Image.Image:
    _decode(image)
    if image.mode == "F" or (image.mode.startswith("I") and int(np.asarray(image).max()) > 255):
        raise ValueError(f"its pixels (mode {image.mode!r}) do not fit 8 bits, and PIL would clip them at 255")
    as_it_is = image.getexif().get(EXIF_ORIENTATION, 1) == 1
    return (image if as_it_is else PIL.ImageOps.exif_transpose(image)).convert("RGB")


def _upright_size(size: tuple[int, int], exif: PIL.Image.Exif) -> tuple[int, int]:
    width, height = size
    return (width, height) if exif.get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8) else (height, width)


def _written_size(image: PIL.Image.Image) -> tuple[int, int]:
    """(width, height) as the file has them. PIL turns a TIFF while decoding it, some versions of PIL its `size` before."""
    return (image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]) if isinstance(image, TiffImageFile) else image.size


def _exif(image: PIL.Image.Image) -> PIL.Image.Exif:
    """Of a file just opened. Pixels are decoded only of a PNG that has EXIF behind them."""
    if not isinstance(image, PngImageFile):
        return image.getexif()
    if image.fp is not None and _tells_later(image.fp.fileno()):
        image.load()
    return PIL.Image.Image.getexif(image)  # PngImageFile's own decodes wherever no EXIF stands before the pixels


def _tells_later(png: int) -> bool:
    """Whether an open PNG has a chunk behind its pixels in which PIL looks for an orientation."""
    place, pixels = 8, False  # behind the signature
    while len(head := os.pread(png, 8, place)) == 8 and head[4:] != b"IEND":
        length, name = struct.unpack(">I4s", head)
        if pixels and (name == b"eXIf" or (name in TEXTS and os.pread(png, 32, place + 8).startswith(KEYWORDS))):
            return True
        pixels = pixels or name == b"IDAT"
        place += 8 + length + 4  # a checksum
    return False


def _frame_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(
            f"video {folder} is not a folder of frames. Extract the frames (ffmpeg -i VIDEO {folder}/%06d.png) or "
            "pass pixels."
        )
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in FRAME_SUFFIXES)
    if not files:
        raise UserError(f"video folder {folder} holds no image file ({', '.join(FRAME_SUFFIXES)}).")
    return files


def _check_shape(kind: str, shape: tuple[int, ...], *, frames: bool) -> None:
    inner = shape[1:] if frames else shape
    wanted = "[F, H, W, 3]" if frames else "[H, W, 3]"
    grey = len(inner) == 2 or (len(inner) == 3 and inner[2] == 1)
    if not (grey or (len(inner) == 3 and inner[2] == 3)) or min(shape, default=0) == 0:
        raise UserError(
            f"{kind} pixels have shape {list(shape)}, not {wanted}. Move the colour axis last: x.transpose(...)."
        )


def _pixels(kind: str, source: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(source, Tensor):  # numpy has no bf16
        source = (source.float() if source.dtype == torch.bfloat16 else source).detach().cpu().numpy()
    array = source
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise UserError(
                f"{kind}: float pixels must lie in 0..1, got {array.min()}..{array.max()}. Divide, or give uint8."
            )
        array = np.rint(array * 255)
    elif array.min() < 0 or array.max() > 255:
        raise UserError(f"{kind}: integer pixels must lie in 0..255, got {array.min()}..{array.max()}.")
    array = array.astype(np.uint8)
    if array.shape[-1] != 3 or array.ndim == (3 if kind == "Video" else 2):
        array = array if array.shape[-1] == 1 and array.ndim == (4 if kind == "Video" else 3) else array[..., None]
        array = np.repeat(array, 3, axis=-1)
    return np.ascontiguousarray(array)


def _hash(array: np.ndarray) -> Key:
    data = np.ascontiguousarray(array)
    return ("pixels", *data.shape, hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest())


def _path_key(path: Path) -> Key:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"image file {path} does not exist (working directory {Path.cwd()}). Check the path.") from None
    return ("path", str(path.resolve()), status.st_size, status.st_mtime_ns)
