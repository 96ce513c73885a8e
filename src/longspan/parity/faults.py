"""Planted faults: each replaces one function of the engine in one rank process by a wrong one, as a context manager.

Every fault is a bug that some public project shipped (its code in cases/bugs.md stands in front) or its neighbour. A
fault knows nothing of the checks; `longspan parity --plant NAME` and `make mutants` show which check catches it.
Attributes are set on modules and classes from outside on purpose: the engine has no hooks for this. The wrong
functions themselves: faults_data.py (what a rank is given), faults_model.py (how tokens meet), faults_layers.py
(experts, recurrent layers), faults_engine.py (sums, ranks, steps).
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from longspan.parity import faults_data, faults_engine, faults_layers, faults_model
from longspan.parity.mutation import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (*faults_data.FAULTS, *faults_model.FAULTS, *faults_layers.FAULTS, *faults_engine.FAULTS)
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside the block the fault's functions stand in for the engine's; None plants nothing."""
    if name is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for target, make in FAULTS[name].changes:
            stack.enter_context(_replaced(target, make))
        yield


@contextlib.contextmanager
def _replaced(target: str, make: Callable[[Any], Any]) -> Iterator[None]:
    owner, attribute = resolve(target)
    original = vars(owner)[attribute]
    setattr(owner, attribute, make(original))
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def resolve(target: str) -> tuple[Any, str]:
    """The module or class that holds "module:path.name", and the name. A fault whose target is gone is our own bug."""
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for name in [*parents, attribute]:
        assert name in vars(owner), f"a planted fault replaces {target}, which does not exist any more"
        if name is not attribute:
            owner = vars(owner)[name]
    return owner, attribute
