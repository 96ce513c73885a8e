"""Bytes of the tensors that are alive, as torch's operators make them, each storage once. What stands on the host beside a GPU does
not count, nor the metrics. `Direct`: a transport that leaves the SMs alone, whose travels hold nothing but what lands."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from longspan.layout import CPGroup
from longspan.mixers.transport import Collective

HOST = ("longspan/data/", "longspan/engine/batch.py", "longspan/objective/weights.py", "longspan/objective/stats.py")


@cache
def stands_on_the_host(path: str) -> bool:
    """Whether a source file makes what stands on the host beside a GPU, or the metrics."""
    return any(part in path for part in HOST)


def of_the_host() -> bool:
    frame = sys._getframe(2)
    while frame is not None and not stands_on_the_host(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


class Live(TorchDispatchMode):
    """Most bytes alive at once, of the tensors given and of those made inside the block."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.sum = self.peak = 0
        self._see(given)

    def _see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.sum += storage.nbytes()
        if self.sum > self.peak:  # those that have gone since are counted still
            self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
            self.sum = sum(size for _, size in self.alive.values())
            self.peak = max(self.peak, self.sum)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if of_the_host():
            return func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        self._see([x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known])
        return out


class Direct(Collective):
    """What travels takes no memory but where it lands. most: bytes that the largest travel takes to other ranks."""

    blocking = False

    def __init__(self) -> None:
        self.most = 0

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Any:
        self.most = max(self.most, sum(part[1:].numel() * part.element_size() for part in parts))
        with _disable_current_modes():
            arrival = super().exchange(parts, into, group)
            arrival.wait()
        return There(into)


@dataclass(frozen=True)
class There:
    into: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.into
