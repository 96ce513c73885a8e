"""Travel over symmetric memory: every rank posts into a buffer that its peers can read, and each pulls what is its own.

GPUs of one host that reach each other (NVLink). A pull is a contiguous device copy on a side stream, which the copy
engines do: on two H200s 371 GB/s; a FlashAttention-4 block of 3.11 ms and a pull of 0.19 ms end together after 3.18 ms,
where 0.28 ms of NCCL take turns with it (3.53 ms). A rank's own part of an exchange never enters the buffer: it is copied
beside the pull. So is that of a gather, which is posted once for all peers. One barrier a travel, on the side stream,
tells that all ranks have posted. Slots are used in turn, and a slot is written again only when every peer has pulled from
it: a rank's side stream runs barrier m after its pulls of all travels before m, so when a later barrier has passed, every
rank's have ended. That holds whenever an arrival is waited for, or never; any number may be pending. What lands is made on
the current stream and written by the side stream. An arrival that is dropped without a wait makes the stream it was made
on wait, before its memory can be given to anything else.
Plain loads and copies only: multicast is never used. The buffers live as long as this object; their size is what the
largest travel sends, times SLOTS. Source: torch.distributed._symmetric_memory (torch 2.11 and 2.13).
Two ranks on one H200 (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, gloo group) had one GPU's fp32 results within 3.8e-7 in
every case of ring and overlapped Ulysses. Two GPUs have not run this `exchange` yet, and no GPU has run `gather`.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from longspan.layout.mesh import CPGroup
from longspan.mixers.transport import Collective, Transport, copy_rows

__all__ = ["Symmetric", "make_transport", "symmetric_refusal"]

SLOTS = 3  # travels that may be posted before the first is pulled by all
ALIGN = 256  # bytes: start of each tensor in a slot


def symmetric_refusal(group: CPGroup, device: torch.device) -> str | None:
    """Why this group cannot travel over symmetric memory; None when it can. Collective: the same on every rank."""
    if group.size == 1:
        return "one rank needs no travel"
    if device.type != "cuda":
        return f"symmetric memory needs CUDA devices, got {device.type}"
    found: list[Any] = [None] * group.size
    me = socket.gethostname(), device.index, str(torch.cuda.get_device_properties(device).uuid)
    dist.all_gather_object(found, me, group=group.group)
    if len({host for host, *_ in found}) > 1:
        return "the ranks are on several hosts"
    peers = {(index, gpu) for _, index, gpu in found} - {
        me[1:]
    }  # ranks may share a GPU (launch.py), not its number alone
    reached = all(index != device.index and torch.cuda.can_device_access_peer(device, index) for index, _ in peers)
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
        if len(self.passed) == SLOTS:  # barrier of travel n - SLOTS + 1: all ranks have pulled travel n - SLOTS
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
    """Tensors that the side stream pulls, each from a peer's slot. One that is not contiguous is copied again from where
    it landed, while the next is pulled. Make it right after `post`, so that memory it takes is free for the side stream."""

    def __init__(
        self, tensors: tuple[Tensor, ...], pulls: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream
    ) -> None:
        self._tensors = tensors
        self._home = torch.cuda.current_stream()
        self._landings: list[tuple[torch.cuda.Event, Tensor, Tensor]] = []
        for source, into in pulls:
            landed = into if into.is_contiguous() else torch.empty(into.shape, dtype=into.dtype, device=into.device)
            done = torch.cuda.Event()
            with torch.cuda.stream(stream):
                landed.copy_(source)
                done.record()
            self._landings.append((done, into, landed))

    def wait(self) -> tuple[Tensor, ...]:
        """See transport.Arrival."""
        for done, into, landed in self._landings:
            torch.cuda.current_stream().wait_event(done)
            if landed is not into:
                copy_rows(into, landed)
        self._landings = []
        return self._tensors

    def __del__(self) -> None:
        """See the file's head."""
        for done, _, _ in self._landings[-1:]:
            self._home.wait_event(done)


class Symmetric:
    """See the file's head. One object serves all groups; make it once, it holds the buffers."""

    blocking: bool = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[tuple[int, ...], Slots] = {}

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Pulled:
        """See transport.Transport. A slot holds what goes to the other ranks: [N - 1, ...] of each tensor."""
        me = group.rank
        shapes = [(group.size - 1, *x.shape[1:]) for x in parts]
        offsets, size = _offsets([_count(shape) * x.element_size() for shape, x in zip(shapes, parts, strict=True)])
        slots = self._of(group, size)
        slot = slots.open()
        for x, shape, offset in zip(parts, shapes, offsets, strict=True):
            posted = slots.view(me, slot, offset, shape, x.dtype)
            copy_rows(posted[:me], x[:me])
            copy_rows(posted[me:], x[me + 1 :])
        slots.post()
        pulls = []
        for hop in range(1, group.size):  # ranks start at different peers
            source = (me + hop) % group.size
            for x, shape, offset in zip(into, shapes, offsets, strict=True):
                pulls.append((slots.view(source, slot, offset, shape, x.dtype)[me - (me > source)], x[source]))
        arrival = Pulled(into, pulls, slots.stream)
        for x, own in zip(into, parts, strict=True):
            copy_rows(x[me], own[me])
        return arrival

    def rotate(self, tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Pulled:
        """See transport.Transport."""
        received = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)
        slots, posted = self._post(tensors, group)
        sources = posted((group.rank - hops) % group.size)
        return Pulled(received, list(zip(sources, received, strict=True)), slots.stream)

    def gather(self, tensors: tuple[Tensor, ...], group: CPGroup) -> Pulled:
        """See transport.Transport. A rank posts its tensors once, and every peer pulls them."""
        gathered = tuple(x.new_empty(group.size, *x.shape) for x in tensors)
        slots, posted = self._post(tensors, group)
        pulls = []
        for hop in range(1, group.size):  # ranks start at different peers
            source = (group.rank + hop) % group.size
            pulls += [(x, into[source]) for x, into in zip(posted(source), gathered, strict=True)]
        arrival = Pulled(gathered, pulls, slots.stream)
        for into, own in zip(gathered, tensors, strict=True):
            copy_rows(into[group.rank], own)
        return arrival

    def _post(self, tensors: tuple[Tensor, ...], group: CPGroup) -> tuple[Slots, Callable[[int], list[Tensor]]]:
        """Puts whole tensors into a slot for all ranks. The function gives what a rank of the group has put there."""
        offsets, size = _offsets([x.numel() * x.element_size() for x in tensors])
        slots = self._of(group, size)
        slot = slots.open()

        def posted(rank: int) -> list[Tensor]:
            return [slots.view(rank, slot, at, tuple(x.shape), x.dtype) for x, at in zip(tensors, offsets, strict=True)]

        for room, x in zip(posted(group.rank), tensors, strict=True):
            copy_rows(room, x)
        slots.post()
        return slots, posted

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


def _offsets(sizes: list[int]) -> tuple[list[int], int]:
    """The start of each tensor in a slot, in bytes, and the end of the last."""
    ends = list(accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
