"""What a planted fault is. Leaf of the faults files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Change = tuple[str, Callable[[Any], Any]]  # ("module:attribute.path", original -> replacement)


@dataclass(frozen=True, slots=True)
class Fault:
    """A wrong engine. model and layout: the smallest setting in which it can show."""

    name: str
    what: str  # one line; starts with the code of the public bug where there is one
    changes: tuple[Change, ...]
    model: str = "tiny:qwen3"
    layout: str = "cp2-ring"
    hangs: bool = False  # ranks may wait for each other for ever: run it alone, with a time limit
    check: str = "gradient"  # the cheapest check that catches it ("gradient" also compares metrics)
    case: str = "together"  # the case in which it does
