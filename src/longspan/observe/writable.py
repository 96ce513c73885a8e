"""What a command is to write at its end is tried at its start.

One rule for all commands: a file goes into a folder that is there; a folder that the command fills is made by it, with those above.
"""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from longspan.errors import UserError

__all__ = ["check_makeable", "check_writable"]


def check_writable(name: str, path: Path) -> None:
    """Raises UserError where a run would fail at its end: `path` is a folder, its own folder is missing, or it may not be written."""
    _check(name, path, _no_file)


def check_makeable(name: str, folder: Path) -> None:
    """Raises UserError where `folder` is no folder that takes files and cannot become one. Makes nothing: a refused command
    leaves nothing behind."""
    _check(name, folder, _no_folder)


def _check(name: str, path: Path, obstacle: Callable[[Path], str | None]) -> None:
    try:
        why = obstacle(Path(os.path.realpath(path)))
    except OSError as error:  # a name too long, a folder that may not be looked into
        why = f"{error.strerror}: {path}"
    if why is not None:
        raise UserError(f"{name}: {path} cannot be written, because {why}")


def _no_file(path: Path) -> str | None:
    if path.is_dir():
        return "it is a folder. Name a file in it"
    if path.exists():
        return None if os.access(path, os.W_OK) else "this user may not change it"
    if not path.parent.exists():
        return f"there is no folder {path.parent}. Make it first, or name another"
    return _no_folder(path.parent)


def _no_folder(path: Path) -> str | None:
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with TemporaryFile(dir=nearest):  # tells more than the rights do: in /proc they allow the superuser everything
            return None
    except OSError:
        return f"{nearest} is no folder that this user may write to"
