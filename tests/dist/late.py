"""Travel by gloo that lands at the last moment: what arrives is NaN until it is waited for, and the order is noted.

`log` has s3 where travel 3 starts and w3 where it is waited for.
"""

from typing import Any

import torch
from torch import Tensor

from longspan.layout.mesh import CPGroup
from longspan.mixers.transport import Arrival, Collective

__all__ = ["Late", "There"]


class LateArrival:
    """An arrival that is NaN until it is waited for."""

    def __init__(self, number: int, into: tuple[Tensor, ...], arrival: Arrival, log: list[str]) -> None:
        self.number, self.into, self.arrival, self.log = number, into, arrival, log
        for x in into:
            x.fill_(float("nan"))
        log.append(f"s{number}")

    def wait(self) -> tuple[Tensor, ...]:
        self.log.append(f"w{self.number}")
        for x, landed in zip(self.into, self.arrival.wait(), strict=True):
            x.copy_(landed)
        return self.into


class There:
    """An arrival whose wait is left out: what it brings stays NaN. gloo wants an end to what it receives, unseen."""

    def __init__(self, late: LateArrival) -> None:
        self.late = late

    def wait(self) -> tuple[Tensor, ...]:
        self.late.arrival.wait()
        return self.late.into


class Late(Collective):
    """See the file's head."""

    blocking = False

    def __init__(self) -> None:
        self.log: list[str] = []
        self.travels = 0

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Any:
        landing = tuple(x.new_empty(x.shape) for x in into)
        return self.late(into, super().exchange(parts, landing, group))

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Any:
        into = tuple(torch.empty_like(x) for x in tensors)
        return self.late(into, super().rotate(tensors, group, hops=hops))

    def gather(self, tensors: tuple[Tensor, ...], group: CPGroup) -> Any:
        into = tuple(x.new_empty(group.size, *x.shape) for x in tensors)
        return self.late(into, super().gather(tensors, group))

    def late(self, into: tuple[Tensor, ...], arrival: Arrival) -> LateArrival:
        self.travels += 1
        return LateArrival(self.travels - 1, into, arrival, self.log)
