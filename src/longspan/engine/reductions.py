"""What ranks of the fsdp backend tell each other in a call: how often gradients are summed, and a layer's weights gathered.

Gradients are summed once a call, after its last micro-step, or after each one. Once saves a reduce-scatter of all weights a
micro-step; until then a rank holds whole gradients in master precision. Weights stay gathered from a layer's forward to its
backward, or are gathered twice. Either is done where the memory model says that it fits beside the largest micro-step, on the fullest
device of all ranks. A CPU has no limit that is known: sums once, gathers twice.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from longspan.data import Plan, Row, row_tokens
from longspan.data.memory import CONTEXT_GIB, GIB, ROOM
from longspan.engine.backend import Backend, MicroStep
from longspan.engine.batch import Batch
from longspan.engine.memory import used_gib
from longspan.engine.planning import Planner

__all__ = ["Reductions", "Room", "Traffic", "marked"]

log = logging.getLogger("longspan.plan")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one call; zeros where it is not decided here (one rank, megatron, no decoder layer trained)."""

    sums: int  # of gradients over ranks in the call
    gathers: int  # of a decoder layer's weights in a micro-step

    def report(self) -> dict[str, float]:
        return {"plan/reductions": float(self.sums), "plan/gathers": float(self.gathers)}


@dataclass(frozen=True, slots=True)
class Room:
    """GiB on one rank's device, of a call; all 0 but `spare` where no limit is known."""

    spare: float  # beside the largest micro-step; infinite where no limit is known
    peak: float = 0.0  # of the largest micro-step
    others: int = 0  # that others hold there
    gradients: float = 0.0  # whole ones, if they wait
    layers: float = 0.0  # if they stay gathered


class Reductions:
    """Decides for each call of one engine, on every rank from what all ranks say of their room."""

    def __init__(self, planner: Planner, backend: Backend, device: torch.device) -> None:
        self.planner, self.backend, self.device = planner, backend, device
        self._said: set[str] = set()

    def room(self, batch: Batch, plan: Plan) -> Room | None:
        """This rank's, now; None where nothing is decided. Whatever the device holds beside this engine and a context is others':
        a second engine, rollouts, another process. In whole GiB, so that it is mostly the same from call to call."""
        held = self.backend.held()
        if held is None:
            return None
        if self.planner.room_gib is None:
            return Room(math.inf)
        peak = max(self._peak_gib(batch, row) for rows in plan.micro_steps for row in rows if row.samples)
        own = held.own / GIB + self.planner.buffers_gib
        others = max(0, math.ceil(used_gib(self.device) - own - CONTEXT_GIB))
        spare = ROOM * self.planner.room_gib - CONTEXT_GIB - others - peak
        return Room(spare, peak, others, held.gradients / GIB, held.layers / GIB)

    def traffic(self, plan: Plan, rooms: Sequence[Room | None]) -> Traffic:
        """rooms: of every rank, in one order on all of them. The fullest device decides."""
        steps = len(plan.micro_steps)
        known = [room for room in rooms if room is not None]
        if not known:
            return Traffic(0, 0)
        room = min(known, key=lambda each: each.spare)
        if math.isinf(room.spare):
            self._say(
                "gradients are summed over ranks once a call", "no limit of this device's memory is known", steps > 1
            )
            return Traffic(1, 2)
        beside = f"beside the largest micro-step ({room.peak:.2f} GiB) in {room.peak + room.spare:.2f} GiB"
        beside += f", without {room.others} GiB that others hold there" if room.others else ""
        waiting = room.gradients if steps > 1 else 0.0
        once = waiting <= room.spare
        self._say(
            f"gradients are summed over ranks {'once a call' if once else 'after every micro-step'}",
            f"whole ones ({waiting:.2f} GiB) {'fit' if once else 'do not fit'} {beside}",
            steps > 1,
        )
        stay = (waiting if once else 0.0) + room.layers <= room.spare
        self._say(
            f"weights of decoder layers {'stay gathered until' if stay else 'are gathered again for'} backward",
            f"all of them ({room.layers:.2f} GiB) {'fit' if stay else 'do not fit'} {beside}",
        )
        return Traffic(1 if once else steps, 1 if stay else 2)

    def _say(self, what: str, why: str, applies: bool = True) -> None:
        if applies and self.planner.lead and what not in self._said:
            self._said.add(what)
            log.info(f"{what}: {why}")

    def _peak_gib(self, batch: Batch, row: Row) -> float:
        index = self.planner.layout.index
        assert index != "auto", "a mesh's layout is resolved"
        lengths = [batch.lengths[sample] for sample in row.samples]
        visual = sum(sum(batch.media_tokens[sample]) for sample in row.samples)
        model = self.planner.memory_of(visual / sum(lengths))
        return model.peak(row_tokens(lengths, row.size, index), row.size) / GIB


def marked(steps: Iterable[MicroStep], plan: Plan, traffic: Traffic) -> Iterator[MicroStep]:
    """The micro-steps of a plan, each told whether gradients are summed after it, and whether weights stay gathered in it."""
    last = len(plan.micro_steps) - 1
    for place, step in enumerate(steps):
        yield replace(step, reduces=traffic.sums != 1 or place == last, gathered=traffic.gathers == 1)
