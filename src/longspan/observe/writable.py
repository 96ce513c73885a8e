"""What a command is to write at its end is tried at its start.

One rule for all commands: a file goes into a folder that is there; a folder that the command fills is made, with those above it.
"""

import os
from pathlib import Path
from tempfile import TemporaryFile

from longspan.errors import UserError

__all__ = ["check_writable", "make_folder"]


def check_writable(name: str, path: Path) -> None:
    """Raises UserError where a run would fail at its end: `path` is a folder, its own folder is missing, or it may not be written."""
    real = Path(os.path.realpath(path))
    try:
        why = _obstacle(real)
    except OSError as error:  # a name too long, a folder that may not be looked into
        why = f"{error.strerror}: {real}"
    if why is not None:
        raise UserError(f"{name}: {path} cannot be written, because {why}")


def make_folder(name: str, path: Path) -> None:
    """Make a folder for files to come. Raises UserError where it cannot be made or takes no files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try_file(path)
    except OSError as error:
        raise UserError(
            f"{name}: {path} cannot be written, because it cannot be made a folder that this user may write to ({error.strerror})"
        ) from error


def _obstacle(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder. Name a file in it"
    if path.exists():
        return None if os.access(path, os.W_OK) else "this user may not change it"
    if not path.parent.exists():
        return f"there is no folder {path.parent}. Make it first, or name another"
    try:
        _try_file(path.parent)
    except OSError:
        return f"{path.parent} is no folder that this user may write to"
    return None


def _try_file(folder: Path) -> None:
    """A nameless file tells more than the rights do: in /proc they allow the superuser everything."""
    with TemporaryFile(dir=folder):
        pass
