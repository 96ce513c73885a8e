"""What a command is to write at its end is tried at its start."""

import os
from pathlib import Path

from longspan.errors import UserError

__all__ = ["check_writable"]


def check_writable(name: str, path: Path) -> None:
    """Raises UserError where a run would fail at its end: a parent of `path` is no folder, or `path` is one, or it may not be
    written."""
    if path.is_dir():
        raise UserError(f"{name}: {path} cannot be written, because it is a folder. Name a file in it")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise UserError(f"{name}: {path} cannot be written, because this user may not change it")
        return
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{name}: {path} cannot be written, because {nearest} is no folder that this user may write to")
