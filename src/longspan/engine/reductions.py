"""What ranks of the fsdp backend tell each other in a call: how often gradients are summed, and a layer's weights gathered.

Gradients are summed once a call, after its last micro-step, or after each one. Once saves a reduce-scatter of all weights a
micro-step; until then a rank holds whole gradients in master precision. Weights stay gathered from a layer's forward to its
backward, or are gathered twice. Either is done where the memory model says that it fits beside the largest micro-step. A CPU has
no limit that is known: sums once, gathers twice.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from longspan.data import Plan, Row, row_tokens
from longspan.data.memory import CONTEXT_GIB, GIB, ROOM, MemoryModel
from longspan.data.stage_memory import StageMemory
from longspan.engine.backend import MicroStep
from longspan.engine.batch import Batch
from longspan.engine.planning import SHARES, Planner

__all__ = ["Reductions", "Traffic", "marked"]

log = logging.getLogger("longspan.plan")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one call; zeros where it is not decided here (one rank, megatron, no decoder layer trained)."""

    sums: int  # of gradients over ranks in the call
    gathers: int  # of a decoder layer's weights in a micro-step

    def report(self) -> dict[str, float]:
        return {"plan/reductions": float(self.sums), "plan/gathers": float(self.gathers)}


class Reductions:
    """Decides for each call of one engine. whole_bytes: of gradients that may wait, and of gathered layers, as a rank holds them."""

    def __init__(self, planner: Planner, whole_bytes: tuple[int, int]) -> None:
        self.planner = planner
        self.gradients_gib, self.weights_gib = (size / GIB for size in whole_bytes)
        self._said: set[str] = set()
        self._models: dict[float, MemoryModel | StageMemory] = {}  # by the share of visual tokens

    def traffic(self, batch: Batch, plan: Plan) -> Traffic:
        steps = len(plan.micro_steps)
        if not self.gradients_gib:
            return Traffic(0, 0)
        if self.planner.room_gib is None:
            self._say(
                "gradients are summed over ranks once a call", "no limit of this device's memory is known", steps > 1
            )
            return Traffic(1, 2)
        room = ROOM * self.planner.room_gib - CONTEXT_GIB
        peak = max(self._peak_gib(batch, row) for rows in plan.micro_steps for row in rows if row.samples)
        beside = f"beside the largest micro-step ({peak:.2f} GiB) in {room:.2f} GiB"
        waiting = self.gradients_gib if steps > 1 else 0.0
        once = peak + waiting <= room
        self._say(
            f"gradients are summed over ranks {'once a call' if once else 'after every micro-step'}",
            f"whole ones ({waiting:.2f} GiB) {'fit' if once else 'do not fit'} {beside}",
            steps > 1,
        )
        stay = peak + (waiting if once else 0.0) + self.weights_gib <= room
        self._say(
            f"weights of decoder layers {'stay gathered until' if stay else 'are gathered again for'} backward",
            f"all of them ({self.weights_gib:.2f} GiB) {'fit' if stay else 'do not fit'} {beside}",
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
        share = math.ceil(visual / sum(lengths) * SHARES) / SHARES
        if share not in self._models:
            self._models[share] = self.planner.memory_of(share)
        return self._models[share].peak(row_tokens(lengths, row.size, index), row.size) / GIB


def marked(steps: Iterable[MicroStep], plan: Plan, traffic: Traffic) -> Iterator[MicroStep]:
    """The micro-steps of a plan, each told whether gradients are summed after it, and whether weights stay gathered in it."""
    last = len(plan.micro_steps) - 1
    for place, step in enumerate(steps):
        yield replace(step, reduces=traffic.sums != 1 or place == last, gathered=traffic.gathers == 1)
