"""How tensors travel between the ranks of a row while the device computes: started now, taken later.

`exchange`  parts [N, ...]: part i goes to rank i, part i of the result comes from rank i (an all-to-all)
`rotate`    tensors of the same shapes on all ranks go to rank + hops and come from rank - hops
Two ways: `Collective` (NCCL or gloo, any group; NCCL kernels take SMs, so they hardly overlap with attention) and
symmetric.Symmetric (copies between GPUs of one host that the copy engines do). No autograd. Every rank of the group
starts the same travels in the same order.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layout.comm import rotate
from longspan.layout.mesh import CPGroup

__all__ = ["Arrival", "Collective", "Transport", "copy_rows"]

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

    def exchange(self, shape: tuple[int, ...], like: Tensor, fill: Callable[[Tensor], None], group: CPGroup) -> Arrival:
        """fill writes what to send into a tensor [N, ...] of `shape`; one tensor [N, ...] arrives."""
        ...

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Arrival:
        """The tensors of the rank `hops` before this one arrive."""
        ...


class Exchanged:
    """An all-to-all on its way."""

    def __init__(self, sent: Tensor, group: CPGroup) -> None:
        self._sent = sent  # kept alive until it is sent
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._received, sent, group=group.group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """See Arrival."""
        self._work.wait()
        return (self._received,)


class Collective:
    """Through torch.distributed."""

    blocking: bool = True

    def exchange(
        self, shape: tuple[int, ...], like: Tensor, fill: Callable[[Tensor], None], group: CPGroup
    ) -> Exchanged:
        """See Transport."""
        sent = like.new_empty(shape)
        fill(sent)
        return Exchanged(sent, group)

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Arrival:
        """See Transport."""
        return rotate(tensors, group, hops=hops)
