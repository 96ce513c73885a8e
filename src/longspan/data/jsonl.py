"""Samples as JSON lines: one object a line, UTF-8.

    {"input_ids": [5, 6, 7], "target_ids": [6, 7, -100], "mask": [0, 1, 0],
     "fields": {"advantage": [0.0, 0.5, 0.0]},
     "media": [{"image": "pictures/a.png"}, {"video": "clips/b", "timestamps": [0.0, 0.5]}],
     "group": "prompt-17", "adapter": null}

`input_ids`, `target_ids` (already shifted) and `mask` are required, the rest is optional; other keys are refused.
Media are paths relative to the file's folder (absolute ones stay); a video is a folder of frames. Numbers with a point
are read as f64, so that f32 values come back equal. Writing keeps pictures that have a path and saves pixels as PNG
beside the file.
"""

import codecs
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from longspan.data.media import Image, Video
from longspan.data.sample import Media, Sample
from longspan.errors import UserError

REQUIRED = ("input_ids", "target_ids", "mask")
KEYS = (*REQUIRED, "fields", "media", "group", "adapter")


def read_jsonl(path: str | Path) -> list[Sample]:
    """All samples of a file; the first bad line is refused by its number."""
    samples = list(iterate_jsonl(path))
    if not samples:
        raise UserError(f"{path} holds no sample. Write one JSON object a line.")
    return samples


def iterate_jsonl(path: str | Path) -> Iterator[Sample]:
    """The samples of a file, one by one; blank lines are skipped."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist or is no file (working directory {Path.cwd()}). Check the path.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield sample_from_json(_record(line), path.parent)
                except UserError as error:
                    raise UserError(f"{path} line {number}: {error}") from None
                except RecursionError:
                    raise UserError(
                        f"{path} line {number}: not JSON of a sample: brackets are nested too deeply. A value has as many "
                        "brackets as its tensor has dims."
                    ) from None


def _record(line: bytes) -> object:
    """A line as JSON."""
    if line.startswith(codecs.BOM_UTF8):
        raise UserError("the file starts with a byte order mark (BOM). Save it as UTF-8 without BOM.")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}, which is not UTF-8. Samples are JSON lines in "
            "UTF-8: save a text file in it (iconv -f ENCODING -t utf-8, with the encoding that the file has)."
        ) from None
    except ValueError as error:  # broken JSON, or a number of more digits than Python reads
        zeros = " The line holds zero bytes: is the file UTF-16, or no text?" if b"\0" in line else ""
        raise UserError(f"not JSON: {error}. Each line is one whole object in UTF-8.{zeros}") from None


def sample_from_json(record: object, folder: Path) -> Sample:
    """A sample from one decoded line; media paths are relative to `folder`."""
    if not isinstance(record, dict):
        raise UserError(f'a sample is an object, got {type(record).__name__}. Write {{"input_ids": [...], ...}}.')
    unknown = sorted(set(record) - set(KEYS))
    missing = [key for key in REQUIRED if record.get(key) is None]
    if unknown or missing:
        raise UserError(
            f"missing keys {missing}, unknown keys {unknown}; a sample has {list(KEYS)}, per-token fields in 'fields'."
        )
    fields = record.get("fields") or {}
    if not isinstance(fields, dict):
        raise UserError(f"'fields' is a {type(fields).__name__}, not an object of per-token lists.")
    for name in REQUIRED:
        if not isinstance(record[name], list):
            raise UserError(f"{name!r} is a {type(record[name]).__name__}, not a list with one number a token.")
        _check_numbers(name, record[name])
    for name, values in fields.items():
        if isinstance(values, list):
            _check_numbers(f"fields[{name!r}]", values)
    group, adapter = record.get("group"), record.get("adapter")
    if not isinstance(group, str | int | None) or not isinstance(adapter, str | None):
        raise UserError(f"'group' is a string or an integer and 'adapter' a string, got {group!r} and {adapter!r}.")
    media = record.get("media") or []
    if not isinstance(media, list):
        raise UserError(
            f'\'media\' is a {type(media).__name__}, not a list of {{"image": PATH}} or {{"video": FOLDER}}.'
        )
    return Sample(
        record["input_ids"],
        record["target_ids"],
        record["mask"],
        fields=fields,
        media=[_media(item, folder) for item in media],
        group=group,
        adapter=adapter,
    )


def _check_numbers(name: str, values: list[Any]) -> None:
    """Raises UserError for the first item that no tensor holds."""
    kinds = set(map(type, values))
    if kinds <= {float} or (kinds <= {int, bool} and _fits(min(values)) and _fits(max(values))):
        return
    for position, item in enumerate(values):
        if isinstance(item, list):
            _check_numbers(f"{name}[{position}]", item)
        elif not isinstance(item, int | float) or not _fits(item):
            shown = reprlib.repr(item) if item is not None else "null"
            raise UserError(f"{name}[{position}] is {shown}, not a number that 64 bits hold. Give one number a token.")


def _fits(number: float) -> bool:
    return isinstance(number, float) or -(2**63) <= number < 2**63


def _media(item: object, folder: Path) -> Media:
    if (
        not isinstance(item, dict)
        or len({"image", "video"} & set(item)) != 1
        or set(item) - {"image", "video", "timestamps"}
    ):
        raise UserError(
            f'media item {item!r} is neither {{"image": PATH}} nor {{"video": FOLDER, "timestamps": [...]}}.'
        )
    kind = "image" if "image" in item else "video"
    if not isinstance(item[kind], str):
        raise UserError(f"media item {item!r}: the {kind} is a path, got {type(item[kind]).__name__}.")
    path = folder / item[kind]
    if not path.exists():
        raise UserError(f"{kind} {path} does not exist. Media paths are relative to the JSONL file's folder.")
    if kind == "image":
        return Image(path)
    return Video(path, item.get("timestamps"))


def write_jsonl(path: str | Path, samples: Iterable[Sample]) -> None:
    """Writes a file that `read_jsonl` reads back; whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as out:
            for sample in samples:
                out.write(json.dumps(sample_to_json(sample, path), allow_nan=False) + "\n")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sample_to_json(sample: Sample, path: Path) -> Mapping[str, object]:
    """One line's object for a file at `path`; pixels are saved under `<path's stem>_media`."""
    record: dict[str, object] = {
        "input_ids": sample.input_ids.tolist(),
        "target_ids": sample.target_ids.tolist(),
        "mask": [int(value) for value in sample.mask.tolist()],
    }
    if sample.fields:
        record["fields"] = {name: values.tolist() for name, values in sample.fields.items()}
    if sample.media:
        record["media"] = [_media_json(item, path) for item in sample.media]
    if sample.group is not None:
        record["group"] = sample.group
    if sample.adapter is not None:
        record["adapter"] = sample.adapter
    return record


def _media_json(item: Media, path: Path) -> dict[str, object]:
    store = path.with_name(path.stem + "_media")
    if isinstance(item, Image):
        if isinstance(item.source, str | os.PathLike):
            return {"image": _relative(Path(item.source), path.parent)}
        name = store / f"{item.key()[-1]}.png"
        _save(item.load(), name)
        return {"image": _relative(name, path.parent)}
    if isinstance(item.source, str | os.PathLike):
        target = Path(item.source)
    else:
        frames = item.load()
        target = store / str(Video(frames).key()[-2])
        for number, frame in enumerate(frames):
            _save(PIL.Image.fromarray(np.asarray(frame)), target / f"{number:06d}.png")
    record: dict[str, object] = {"video": _relative(target, path.parent)}
    return record if item.timestamps is None else record | {"timestamps": list(item.timestamps)}


def _save(image: PIL.Image.Image, path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def _relative(path: Path, folder: Path) -> str:
    """Relative where the file lies below the JSONL's folder, else absolute."""
    path, folder = path.resolve(), folder.resolve()
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
