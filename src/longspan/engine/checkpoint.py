"""Checkpoints: all or nothing on disk, verified before anything in memory changes.

A save goes to `<path>.saving`, every rank writes and fsyncs its part, CRCs are recorded, and only then the folder takes the name
(the one before moves aside first and is deleted last). So a full disk or a killed process leaves the previous checkpoint usable.
Tensors travel by torch.distributed.checkpoint, which reshards DTensors: any dp x cp loads what any other saved, bit for bit.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor

from longspan.errors import CheckpointError, LongspanError
from longspan.layout import Mesh

__all__ = ["agree", "publish", "read_tensors", "saved_keys", "telling", "verify", "write_tensors"]

TENSORS = "tensors"
MANIFEST = "manifest.json"
CHUNK = 1 << 24  # bytes read at a time for a CRC


def write_tensors(folder: Path, state: dict[str, Tensor], mesh: Mesh) -> None:
    """Write {key: tensor or DTensor} under folder/tensors; collective."""
    dcp.save(state, checkpoint_id=str(folder / TENSORS), process_group=mesh.host_group)


def read_tensors(folder: Path, state: dict[str, Tensor], mesh: Mesh) -> None:
    """Fill the given tensors in place from folder/tensors; collective."""
    dcp.load(state, checkpoint_id=str(folder / TENSORS), process_group=mesh.host_group)


def saved_keys(folder: Path) -> set[str]:
    """The keys of the tensors under folder/tensors."""
    return set(dcp.FileSystemReader(folder / TENSORS).read_metadata().state_dict_metadata)


def publish(path: Path, mesh: Mesh, write: Callable[[Path], None]) -> None:
    """Run `write(temporary folder)` on all ranks, then give the folder its final name on rank 0.

    Raises CheckpointError on every rank if any rank failed, or if `path` is a file or a folder of other things; then it
    still holds what it held before.
    """
    temporary = path.with_name(path.name + ".saving")
    with agree(mesh, f"saving {path}"):
        if mesh.rank == 0:
            _check_ours(path)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        with agree(mesh, f"saving {path}"):
            write(temporary)
        with agree(mesh, f"saving {path}"):
            if mesh.rank == 0:
                _write_manifest(temporary)
                _swap(temporary, path)
    except LongspanError:
        if mesh.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_ours(path: Path) -> None:
    """What a folder replaces must have been written by a save or an export, or be empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file()):
        raise CheckpointError(
            f"{path} exists and was not written by save or export, so it is not replaced. Give a path that does not exist"
        )


class agree:
    """`with agree(mesh, what):` - if the block failed on any rank, every rank raises `raises` naming the first such rank, with `advice`."""

    def __init__(
        self,
        mesh: Mesh,
        what: str,
        *,
        raises: type[LongspanError] = CheckpointError,
        advice: str = "The checkpoint before it is untouched",
    ) -> None:
        self.mesh, self.what, self.raises, self.advice = mesh, what, raises, advice

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception | dcp.api.CheckpointException):
            return  # the process is to end
        said = self.mesh.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        for rank, message in enumerate(said):
            if message is not None:
                raise self.raises(f"{self.what} failed on rank {rank}: {message.rstrip('.')}. {self.advice}") from error


class telling:
    """`with telling(mesh):` - what fails inside on this rank alone, such as a file that only other machines have, is told to the
    ranks, whose next `gather_objects` gets its text in this rank's place."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.mesh.gather_objects(f"{type(error).__name__}: {error}")


def verify(path: Path, mesh: Mesh) -> dict:
    """Check that the folder is complete and uncorrupted (CRC of every file, shared over the ranks); returns the manifest."""
    with agree(mesh, f"loading {path}"):
        if not (path / MANIFEST).is_file():
            raise CheckpointError(
                f"{path} holds no checkpoint: {MANIFEST} is missing. Pass a folder made by engine.save"
            )
        try:
            manifest = json.loads((path / MANIFEST).read_text())
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path / MANIFEST} is corrupt ({error}). Load an earlier checkpoint") from error
        for number, (name, (size, crc)) in enumerate(sorted(manifest["files"].items())):
            file = path / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing. Load an earlier checkpoint")
            if file.stat().st_size != size:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size} bytes, saved with {size}. Load an earlier checkpoint"
                )
            if number % mesh.data_ranks == mesh.data_rank and _crc(file) != crc:
                raise CheckpointError(
                    f"{file} is corrupt: its CRC differs from the manifest's. Load an earlier checkpoint"
                )
    return manifest


def _write_manifest(folder: Path) -> None:
    files = {
        str(file.relative_to(folder)): (file.stat().st_size, _crc(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}))


def _swap(temporary: Path, path: Path) -> None:
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
