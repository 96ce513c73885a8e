"""Longspan: exact reinforcement learning of language and vision-language models on long sequences.

A layout changes speed and memory, never the numbers. Read engine/engine.py first, then the folders in the order of docs/tour.md.
Other names are loaded on first use, so that `import longspan` stays cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

# Eager: the submodule has the same name, and loading it later would put the module in the function's place.
from longspan.launch import launch, world

if TYPE_CHECKING:
    from longspan.data import Image, Sample, Video
    from longspan.engine import SGD, AdamW, Engine, EngineConfig
    from longspan.errors import CheckpointError, LongspanError, OutOfMemory, RankError, UserError
    from longspan.layout import Layout
    from longspan.models.expand import expand
    from longspan.objective import Objective

__version__ = "0.1.0"

_HOMES = {
    "AdamW": "longspan.engine",
    "CheckpointError": "longspan.errors",
    "Engine": "longspan.engine",
    "EngineConfig": "longspan.engine",
    "Image": "longspan.data",
    "Layout": "longspan.layout",
    "LongspanError": "longspan.errors",
    "Objective": "longspan.objective",
    "OutOfMemory": "longspan.errors",
    "RankError": "longspan.errors",
    "SGD": "longspan.engine",
    "Sample": "longspan.data",
    "UserError": "longspan.errors",
    "Video": "longspan.data",
    "expand": "longspan.models.expand",
}

__all__ = [
    "AdamW", "CheckpointError", "Engine", "EngineConfig", "Image", "Layout", "LongspanError", "Objective", "OutOfMemory",
    "RankError", "SGD", "Sample", "UserError", "Video", "expand", "launch", "world",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """PEP 562: the public names, each from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
