"""Travel over symmetric memory: every rank posts into a buffer that its peers can read, and each pulls what is its own.

GPUs of one host that reach each other (NVLink). A pull is a contiguous device copy on a side stream, which the copy
engines do: on two H200s 371 GB/s, at 2 % of a running FlashAttention-4 block, where NCCL kernels take turns with
it (GPU.md). One barrier a travel, on the side stream, tells that all ranks have posted. Slots are used in turn: a slot
is written again only after a later barrier has shown that every peer finished pulling from it.
Plain loads and copies only: multicast is never used. The buffers live as long as this object; their size is that of the
largest travel, times SLOTS. Source: torch.distributed._symmetric_memory (torch 2.11 and 2.13).
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from longspan.layout.mesh import CPGroup
from longspan.mixers.transport import Collective, Transport, copy_rows

__all__ = ["Symmetric", "make_transport", "symmetric_refusal"]

SLOTS = 3  # travels that may be on their way at once
ALIGN = 256  # bytes: start of each tensor in a slot


def symmetric_refusal(group: CPGroup, device: torch.device) -> str | None:
    """Why this group cannot travel over symmetric memory; None when it can. Collective: the same on every rank."""
    if group.size == 1:
        return "one rank needs no travel"
    if device.type != "cuda":
        return f"symmetric memory needs CUDA devices, got {device.type}"
    found: list[Any] = [None] * group.size
    dist.all_gather_object(found, (socket.gethostname(), device.index), group=group.group)
    if len({host for host, _ in found}) > 1:
        return "the ranks are on several hosts"
    peers = [index for _, index in found if index != device.index]
    reached = len(peers) == group.size - 1 and all(torch.cuda.can_device_access_peer(device, p) for p in peers)
    answers: list[Any] = [None] * group.size
    dist.all_gather_object(answers, reached, group=group.group)
    return None if all(answers) else "the GPUs cannot reach each other's memory"


@dataclass(slots=True, eq=False)
class Slots:
    """The buffer of one group: SLOTS * size bytes here, and handles to those of the peers."""

    group: CPGroup
    size: int
    memory: Tensor  # [SLOTS * size] uint8, symmetric
    handle: Any  # _SymmetricMemory, no public type
    stream: torch.cuda.Stream
    travels: int = 0
    passed: list[torch.cuda.Event] = field(default_factory=list)  # of the last SLOTS barriers, oldest first

    def view(self, rank: int, slot: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at `offset` bytes of a rank's slot."""
        return self.handle.get_buffer(rank, shape, dtype, (slot * self.size + offset) // dtype.itemsize)

    def open(self) -> int:
        """A slot that the current stream may write."""
        if len(self.passed) == SLOTS:  # barrier of travel n - SLOTS + 1: all peers have pulled travel n - SLOTS
            torch.cuda.current_stream().wait_event(self.passed[1])
        return self.travels % SLOTS

    def post(self) -> None:
        """What the current stream wrote is there for all, and what all wrote is there for the side stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.handle.barrier(channel=0)
        event = torch.cuda.Event()
        event.record(self.stream)
        self.passed = [*self.passed, event][-SLOTS:]
        self.travels += 1


class Pulled:
    """Tensors that the side stream is pulling."""

    def __init__(self, tensors: tuple[Tensor, ...], stream: torch.cuda.Stream) -> None:
        self._tensors = tensors
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> tuple[Tensor, ...]:
        """See transport.Arrival."""
        torch.cuda.current_stream().wait_event(self._done)
        return self._tensors


class Symmetric:
    """See the file's head. One object serves all groups; make it once, it holds the buffers."""

    blocking: bool = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[tuple[int, ...], Slots] = {}

    def exchange(self, shape: tuple[int, ...], like: Tensor, fill: Callable[[Tensor], None], group: CPGroup) -> Pulled:
        """See transport.Transport."""
        slots = self._of(group, like.element_size() * _count(shape))
        slot = slots.open()
        fill(slots.view(group.rank, slot, 0, shape, like.dtype))
        received = like.new_empty(shape)
        slots.post()
        with torch.cuda.stream(slots.stream):
            for hop in range(group.size):  # ranks start at different peers
                source = (group.rank + hop) % group.size
                received[source].copy_(slots.view(source, slot, 0, shape, like.dtype)[group.rank])
        return Pulled((received,), slots.stream)

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Pulled:
        """See transport.Transport."""
        offsets, size = [], 0
        for x in tensors:
            offsets.append(size)
            size += -(-x.numel() * x.element_size() // ALIGN) * ALIGN
        slots = self._of(group, size)
        slot = slots.open()
        for x, offset in zip(tensors, offsets, strict=True):
            copy_rows(slots.view(group.rank, slot, offset, tuple(x.shape), x.dtype), x)
        received = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)
        slots.post()
        source = (group.rank - hops) % group.size
        with torch.cuda.stream(slots.stream):
            for x, offset in zip(received, offsets, strict=True):
                x.copy_(slots.view(source, slot, offset, tuple(x.shape), x.dtype))
        return Pulled(received, slots.stream)

    def _of(self, group: CPGroup, size: int) -> Slots:
        """The buffer of a group, grown to `size` bytes a slot. Growing is collective and waits for the device."""
        found = self._slots.get(group.ranks)
        if found is not None and found.size >= size:
            return found
        size = -(-size // ALIGN) * ALIGN
        if found is not None:
            torch.cuda.synchronize(self._device)  # a peer may still pull from the old one
            dist.barrier(group=group.group)
        memory = symm_mem.empty(SLOTS * size, dtype=torch.uint8, device=self._device)
        handle = symm_mem.rendezvous(memory, group.group)
        stream = found.stream if found is not None else torch.cuda.Stream(self._device)
        self._slots[group.ranks] = Slots(group, size, memory, handle, stream)
        return self._slots[group.ranks]


def make_transport(group: CPGroup, device: torch.device) -> Transport:
    """Symmetric memory where every rank of the group can use it, else collectives. Collective itself."""
    return Collective() if symmetric_refusal(group, device) else Symmetric(device)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
