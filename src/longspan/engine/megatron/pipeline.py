"""Micro-steps through the stages of a pipeline, in the order of schedule.py: receive, run, send on.

Sends never wait: every receive finds its send posted, whatever the order of the stages. Activations and gradients, and
what travels from the last rank back to the first, use communicators of their own: NCCL runs what shares one in order.
Interleaved, a receive is posted before the move ahead of it runs: then no order stops even if every move waited for its
whole device, pending sends too (a first kernel, or memory given back, does that under CUDA; the tests play it).
Own schedule: megatron-core's allocates on CUDA by name, wants micro-steps divisible by pp when interleaved, and equal
shapes or a handshake; here both sides know each micro-step's rows from the shared plan.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.engine.backend import MicroStep, Program
from longspan.engine.megatron.groups import Groups
from longspan.engine.megatron.model import Stage
from longspan.engine.megatron.schedule import Move, receives_ahead, schedule
from longspan.engine.memory import explain_out_of_memory
from longspan.errors import UserError
from longspan.layout import CPGroup

__all__ = ["UpToError", "connect", "run_pipeline"]


class UpToError:
    """Micro-steps up to the first that cannot be made; `check` raises why.

    Those that have started then go all their way, as the last ones of any call do, so that nothing is left between stages.
    For a UserError alone, since all ranks raise it at the same micro-step (an image that is cut off). What one rank raises
    by itself leaves here at once.
    """

    def __init__(self, steps: Iterable[MicroStep]) -> None:
        self.steps = steps
        self.error: UserError | None = None

    def __iter__(self) -> Iterator[MicroStep]:
        try:
            yield from self.steps
        except UserError as error:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class Flight:
    """A micro-step between its forward and its backward through one chunk."""

    incoming: Tensor | None
    out: Tensor
    aside: Tensor | None  # the chunk's own loss terms, added to what comes back


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor on its way here."""

    tensor: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


class Wire:
    """Sends that nobody waits for before the end; tensors that have left are let go."""

    def __init__(self) -> None:
        self.works: list[tuple[dist.Work, Tensor]] = []

    def send(self, x: Tensor, group: CPGroup, target: int) -> None:
        self.works = [(work, sent) for work, sent in self.works if not work.is_completed()]
        kept = x.detach().contiguous()
        self.works.append((_started(dist.isend(kept, group.ranks[target], group=group.group)), kept))

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
            _started(dist.isend(number, group.ranks[target], group=group.group)).wait()
        elif groups.pp.rank == target:
            dist.recv(number, group.ranks[source], group=group.group)

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
    passage, ahead = Passage(chunks, Links.of(groups), program), receives_ahead(len(chunks))
    with torch.set_grad_enabled(program.trains):
        for move in schedule(steps, rank=groups.pp.rank, pp=groups.pp.size, vpp=len(chunks), trains=program.trains):
            passage.post(move)
            if len(passage.posted) > ahead:
                passage.run(after_backward)
        while passage.posted:
            passage.run(after_backward)
    passage.wire.finish()


class Passage:
    """The micro-steps of one call on their way through this rank's chunks."""

    def __init__(self, chunks: Sequence[Stage], links: Links, program: Program) -> None:
        self.chunks, self.links, self.program = chunks, links, program
        self.wire = Wire()
        self.posted: deque[tuple[Move, Arrival | None]] = deque()  # moves to run, in order
        self.steps: dict[int, MicroStep] = {}  # by number, until a move is its last one here
        self.flights: dict[tuple[int, int], Flight] = {}  # by number and chunk

    def post(self, move: Move) -> None:
        """Put a move in line, and the receive that it starts with on its way."""
        if move.step is not None:
            self.steps[move.number] = move.step
        stage, step, links = self.chunks[move.chunk], self.steps[move.number], self.links
        if move.step is not None:
            alone, group, source = stage.first, links.forwards_in, links.preceding
        else:
            alone, group, source = stage.last, links.backwards_in, links.following
        arrival = None
        if not alone:
            with explain_out_of_memory(step, trains=self.program.trains):
                into = torch.empty(stage.shape_between(step), dtype=stage.shape.dtype, device=step.shard.segment.device)
            arrival = Arrival(into, _started(dist.irecv(into, group.ranks[source], group=group.group)))
        self.posted.append((move, arrival))

    def run(self, after_backward: Callable[[], None]) -> None:
        """The next move."""
        move, arrival = self.posted.popleft()
        trains = self.program.trains
        with explain_out_of_memory(self.steps[move.number], trains=trains):
            if move.step is not None:
                self._forward(move, move.step, arrival)
            else:
                self._backward(move, arrival)
                del arrival
                after_backward()
        if (move.step is None) == trains and move.chunk == (0 if trains else len(self.chunks) - 1):
            del self.steps[move.number]

    def _forward(self, move: Move, step: MicroStep, arrival: Arrival | None) -> None:
        stage, trains = self.chunks[move.chunk], self.program.trains
        incoming = None if arrival is None else arrival.wait().requires_grad_(trains)
        out, aside = stage(step, incoming, self.program)
        if not stage.last:
            self.wire.send(out, self.links.forwards_out, self.links.following)
        if trains:
            self.flights[move.number, move.chunk] = Flight(incoming, out, aside)

    def _backward(self, move: Move, arrival: Arrival | None) -> None:
        flight = self.flights.pop((move.number, move.chunk))
        gradient = None if arrival is None else arrival.wait()
        roots = [(x, g) for x, g in ((flight.out, gradient), (flight.aside, None)) if x is not None and x.requires_grad]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        if flight.incoming is not None:
            assert flight.incoming.grad is not None, "hidden states of the stage before reach every later one"
            self.wire.send(flight.incoming.grad, self.links.backwards_out, self.links.preceding)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
