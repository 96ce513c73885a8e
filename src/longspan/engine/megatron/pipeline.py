"""One forward, one backward: micro-steps through the stages of a pipeline, without interleaving.

Stage s of S runs S - 1 - s forwards ahead of its first backward and then alternates, so it holds at most S - s
micro-steps. Their number need not be known in advance. Sends never wait: every receive finds its send posted, whatever
the order of the stages. Activations and gradients use two communicators, because NCCL runs what shares one in order.
Own schedule: megatron-core's allocates on CUDA by name and wants equal shapes or a handshake; here both sides know
each micro-step's rows from the shared plan.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.engine.backend import MicroStep, Program
from longspan.engine.megatron.groups import Groups
from longspan.engine.megatron.model import Stage
from longspan.engine.memory import explain_out_of_memory
from longspan.layout import CPGroup

__all__ = ["run_pipeline"]


@dataclass(slots=True)
class Flight:
    """A micro-step between its forward and its backward."""

    step: MicroStep
    incoming: Tensor | None
    out: Tensor


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


def run_pipeline(
    stage: Stage, groups: Groups, steps: Iterable[MicroStep], program: Program, *, after_backward: Callable[[], None]
) -> None:
    """Every micro-step forward and, for training programs, backward; after_backward runs when gradients have landed."""
    wire = Wire()
    flights: deque[Flight] = deque()
    ahead = groups.pp.size - 1 - groups.pp.rank
    with torch.set_grad_enabled(program.trains):
        for step in steps:
            with explain_out_of_memory(step, trains=program.trains):
                flights.append(_forward(stage, groups, step, program, wire))
                if not program.trains:
                    flights.clear()
                elif len(flights) > ahead:
                    _backward(stage, groups, flights.popleft(), wire)
                    after_backward()
        while flights:
            _backward(stage, groups, flights.popleft(), wire)
            after_backward()
    wire.finish()


def _forward(stage: Stage, groups: Groups, step: MicroStep, program: Program, wire: Wire) -> Flight:
    incoming = None
    if not groups.first:
        incoming = torch.empty(stage.shape_between(step), dtype=stage.shape.dtype, device=step.segment.device)
        _receive(incoming, groups.forwards, groups.pp.rank - 1)
        incoming.requires_grad_(program.trains)
    out = stage(step, incoming, program)
    if not groups.last:
        wire.send(out, groups.forwards, groups.pp.rank + 1)
    return Flight(step, incoming, out)


def _backward(stage: Stage, groups: Groups, flight: Flight, wire: Wire) -> None:
    gradient = None
    if not groups.last:
        gradient = torch.empty_like(flight.out)
        _receive(gradient, groups.backwards, groups.pp.rank + 1)
    if flight.out.requires_grad:
        flight.out.backward(gradient)
    if flight.incoming is not None:
        assert flight.incoming.grad is not None, "hidden states of the stage before reach every later one"
        wire.send(flight.incoming.grad, groups.backwards, groups.pp.rank - 1)


def _receive(into: Tensor, group: CPGroup, source: int) -> None:
    dist.recv(into, group.ranks[source], group=group.group)
