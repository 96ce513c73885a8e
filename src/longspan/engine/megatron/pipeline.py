"""Micro-steps through the stages of a pipeline, in the order of schedule.py: receive, run, send on.

Sends never wait: every receive finds its send posted, whatever the order of the stages. Activations and gradients, and
what travels from the last rank back to the first, use communicators of their own: NCCL runs what shares one in order.
Own schedule: megatron-core's allocates on CUDA by name, wants micro-steps divisible by pp when interleaved, and equal
shapes or a handshake; here both sides know each micro-step's rows from the shared plan.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.engine.backend import MicroStep, Program
from longspan.engine.megatron.groups import Groups
from longspan.engine.megatron.model import Stage
from longspan.engine.megatron.schedule import schedule
from longspan.engine.memory import explain_out_of_memory
from longspan.layout import CPGroup

__all__ = ["connect", "run_pipeline"]


@dataclass(slots=True)
class Flight:
    """A micro-step between its forward and its backward through one chunk."""

    incoming: Tensor | None
    out: Tensor
    aside: Tensor | None  # the chunk's own loss terms, added to what comes back
    step: MicroStep


class Wire:
    """Sends that nobody waits for before the end; tensors that have left are let go."""

    def __init__(self) -> None:
        self.works: list[tuple[dist.Work, Tensor]] = []

    def send(self, x: Tensor, group: CPGroup, target: int) -> None:
        self.works = [(work, sent) for work, sent in self.works if not work.is_completed()]
        kept = x.detach().contiguous()
        work = dist.isend(kept, group.ranks[target], group=group.group)
        assert work is not None
        self.works.append((work, kept))

    def finish(self) -> None:
        for work, _ in self.works:
            work.wait()
        self.works.clear()


@dataclass(frozen=True, slots=True)
class Links:
    """This rank's neighbours and the communicators to them; from the last rank back to the first they are others."""

    following: int
    preceding: int
    forwards_in: CPGroup
    forwards_out: CPGroup
    backwards_in: CPGroup
    backwards_out: CPGroup

    @classmethod
    def of(cls, groups: Groups) -> "Links":
        rank, size = groups.pp.rank, groups.pp.size
        return cls(
            (rank + 1) % size,
            (rank - 1) % size,
            forwards_in=groups.forwards_home if rank == 0 else groups.forwards,
            forwards_out=groups.forwards_home if rank == size - 1 else groups.forwards,
            backwards_in=groups.backwards_home if rank == size - 1 else groups.backwards,
            backwards_out=groups.backwards_home if rank == 0 else groups.backwards,
        )


def connect(groups: Groups, device: torch.device) -> None:
    """One number over every link, one link after the other. Collective over the stages; once, while building.

    NCCL makes a link's communicator at its first use, which may wait for the device. In the first micro-steps the device
    may wait in a send for a rank that waits in the making of the same link.
    """
    last, number = groups.pp.size - 1, torch.zeros(1, device=device)

    def carry(group: CPGroup, source: int, target: int) -> None:
        if groups.pp.rank == source:
            work = dist.isend(number, group.ranks[target], group=group.group)
            assert work is not None
            work.wait()
        elif groups.pp.rank == target:
            _receive(number, group, source)

    for stage in range(last):
        carry(groups.forwards, stage, stage + 1)
        carry(groups.backwards, stage + 1, stage)
    if groups.forwards_home.size > 1:
        carry(groups.forwards_home, last, 0)
        carry(groups.backwards_home, 0, last)


def run_pipeline(
    chunks: Sequence[Stage],
    groups: Groups,
    steps: Iterable[MicroStep],
    program: Program,
    *,
    after_backward: Callable[[], None],
) -> None:
    """Every micro-step forward and, for training programs, backward; after_backward runs when gradients have landed."""
    wire, links = Wire(), Links.of(groups)
    flights: dict[tuple[int, int], Flight] = {}
    moves = schedule(steps, rank=groups.pp.rank, pp=groups.pp.size, vpp=len(chunks), trains=program.trains)
    with torch.set_grad_enabled(program.trains):
        for move in moves:
            chunk, place = chunks[move.chunk], (move.number, move.chunk)
            if move.step is not None:
                with explain_out_of_memory(move.step, trains=program.trains):
                    flight = _forward(chunk, links, move.step, program, wire)
                if program.trains:
                    flights[place] = flight
            else:
                flight = flights.pop(place)
                with explain_out_of_memory(flight.step, trains=True):
                    _backward(chunk, links, flight, wire)
                after_backward()
    wire.finish()


def _forward(stage: Stage, links: Links, step: MicroStep, program: Program, wire: Wire) -> Flight:
    incoming = None
    if not stage.first:
        incoming = torch.empty(stage.shape_between(step), dtype=stage.shape.dtype, device=step.segment.device)
        _receive(incoming, links.forwards_in, links.preceding)
        incoming.requires_grad_(program.trains)
    out, aside = stage(step, incoming, program)
    if not stage.last:
        wire.send(out, links.forwards_out, links.following)
    return Flight(incoming, out, aside, step)


def _backward(stage: Stage, links: Links, flight: Flight, wire: Wire) -> None:
    gradient = None
    if not stage.last:
        gradient = torch.empty_like(flight.out)
        _receive(gradient, links.backwards_in, links.following)
    roots = [(x, g) for x, g in ((flight.out, gradient), (flight.aside, None)) if x is not None and x.requires_grad]
    if roots:
        torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
    if flight.incoming is not None:
        assert flight.incoming.grad is not None, "hidden states of the stage before reach every later one"
        wire.send(flight.incoming.grad, links.backwards_out, links.preceding)


def _receive(into: Tensor, group: CPGroup, source: int) -> None:
    dist.recv(into, group.ranks[source], group=group.group)
