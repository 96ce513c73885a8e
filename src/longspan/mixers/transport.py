"""How tensors travel between the ranks of a row while the device computes: started now, taken later.

`exchange`  parts [N, ...]: part i goes to rank i, what rank i sends lands in part i (an all-to-all), a rank's own part too
`rotate`    tensors of the same shapes on all ranks go to rank + hops and come from rank - hops
`gather`    tensors [n, ...] of the same shapes on all ranks land in [N, n, ...], rank order, a rank's own too
Two ways: `Collective` (NCCL or gloo, any group; NCCL kernels take SMs, so they hardly overlap with attention) and
symmetric.Symmetric (copies between GPUs of one host that the copy engines do). No autograd. Every rank of the group
starts the same travels in the same order.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layout.comm import gather_single, rotate
from longspan.layout.mesh import CPGroup

__all__ = ["Ahead", "Arrival", "Collective", "Transport", "copy_rows"]

WIDE = torch.complex128  # 16 bytes: the widest element that a strided copy moves at once


def copy_rows(into: Tensor, values: Tensor) -> None:
    """into.copy_(values), in elements of 16 bytes where the rows allow it.

    torch copies strided tensors element by element: bf16 then moves at about 1.2 TB/s on an H200, 16-byte elements at
    the memory's speed. The bytes are the same.
    """
    if into.dtype == values.dtype and into.is_cuda and _widens(into) and _widens(values):
        into.view(WIDE).copy_(values.view(WIDE))
    else:
        into.copy_(values)


def _widens(x: Tensor) -> bool:
    """Whether x's rows start and end at multiples of 16 bytes."""
    step = WIDE.itemsize // x.element_size()
    numbers = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(number % step == 0 for number in numbers)


class Arrival(Protocol):
    """Tensors on their way."""

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, for use on the current stream. Called once."""
        ...


class Transport(Protocol):
    """Moves tensors inside one group after another; keeps no data between travels."""

    blocking: bool  # a travel takes SMs from what runs beside it, so that cutting work to overlap does not pay

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Arrival:
        """parts and into: the same shapes [N, ...], any strides. into arrives; until then it is neither read nor written.
        Dropping the arrival without a wait is harmless."""
        ...

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Arrival:
        """The tensors of the rank `hops` before this one arrive."""
        ...

    def gather(self, tensors: tuple[Tensor, ...], group: CPGroup) -> Arrival:
        """The tensors of all ranks arrive: [n, ...] -> [N, n, ...] each, rank order."""
        ...


class Ahead:
    """Travel for a later part of the program, started by whatever comes before that part, or by nothing.

    What is started when depends on the program alone, never on what Python still holds: ranks start the same travels.
    """

    def __init__(self) -> None:
        self._send: Callable[[], list[Arrival]] | None = None
        self._coming: list[Arrival] | None = None

    def promise(self, send: Callable[[], list[Arrival]]) -> None:
        """What `start` will do. Holds what is to be sent until then."""
        self._send = send

    def started(self, coming: list[Arrival]) -> None:
        """It is under way."""
        self._coming = coming

    def start(self) -> None:
        """Starts what was promised, once."""
        send, self._send = self._send, None
        if send is not None:
            self._coming = send()

    def take(self) -> list[Arrival] | None:
        """What was started, handed over once; None where nothing was. Ends the promise."""
        coming, self._coming, self._send = self._coming, None, None
        return coming


class Exchanged:
    """An all-to-all a tensor, on its way."""

    def __init__(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> None:
        self._into = into
        self._sent = [x.contiguous() for x in parts]  # kept alive until it is sent
        self._landed = [x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in into]
        self._works = [
            dist.all_to_all_single(landed, sent, group=group.group, async_op=True)
            for landed, sent in zip(self._landed, self._sent, strict=True)
        ]

    def wait(self) -> tuple[Tensor, ...]:
        """See Arrival."""
        for work, landed, into in zip(self._works, self._landed, self._into, strict=True):
            work.wait()
            if landed is not into:
                copy_rows(into, landed)
        return self._into


class Gathered:
    """An all-gather a tensor, on its way."""

    def __init__(self, tensors: tuple[Tensor, ...], group: CPGroup) -> None:
        self._sent = [x.contiguous() for x in tensors]  # kept alive until it is sent
        self._landed = tuple(x.new_empty(group.size, *x.shape) for x in tensors)
        self._works = [
            gather_single(landed.flatten(0, 1), sent, group=group.group, async_op=True)
            for landed, sent in zip(self._landed, self._sent, strict=True)
        ]

    def wait(self) -> tuple[Tensor, ...]:
        """See Arrival."""
        for work in self._works:
            work.wait()
        return self._landed


class Collective:
    """Through torch.distributed."""

    blocking: bool = True

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Exchanged:
        """See Transport."""
        return Exchanged(parts, into, group)

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Arrival:
        """See Transport."""
        return rotate(tensors, group, hops=hops)

    def gather(self, tensors: tuple[Tensor, ...], group: CPGroup) -> Gathered:
        """See Transport."""
        return Gathered(tensors, group)
