"""When the fsdp backend sums gradients over ranks: once a call, after its last micro-step, or after each one.

Once saves a reduce-scatter of all weights a micro-step. Until then a rank holds whole gradients in master precision, so it is
done where the memory model says that they fit beside the largest micro-step. A CPU has no limit that is known: always once.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from longspan.data import Plan, Row, row_tokens
from longspan.data.memory import CONTEXT_GIB, GIB, ROOM, MemoryModel
from longspan.data.stage_memory import StageMemory
from longspan.engine.backend import MicroStep
from longspan.engine.batch import Batch
from longspan.engine.planning import SHARES, Planner

__all__ = ["Reductions", "marked"]

log = logging.getLogger("longspan.plan")


class Reductions:
    """Decides for each call of one engine. whole_bytes: of gradients that may wait; 0 where none may (one rank, megatron)."""

    def __init__(self, planner: Planner, whole_bytes: int) -> None:
        self.planner = planner
        self.whole_gib = whole_bytes / GIB
        self._said: set[bool] = set()
        self._models: dict[float, MemoryModel | StageMemory] = {}  # by the share of visual tokens

    def number(self, batch: Batch, plan: Plan) -> int:
        """Sums of gradients over ranks in a call with this plan; 0 where that is not decided here."""
        steps = len(plan.micro_steps)
        if not self.whole_gib or steps == 1:
            return steps if self.whole_gib else 0
        once, why = self._once(batch, plan)
        if self.planner.lead and once not in self._said:
            self._said.add(once)
            log.info(f"gradients are summed over ranks {'once a call' if once else 'after every micro-step'}: {why}")
        return 1 if once else steps

    def _once(self, batch: Batch, plan: Plan) -> tuple[bool, str]:
        if self.planner.room_gib is None:
            return True, "no limit of this device's memory is known"
        room = ROOM * self.planner.room_gib - CONTEXT_GIB
        peak = max(self._peak_gib(batch, row) for rows in plan.micro_steps for row in rows if row.samples)
        once = peak + self.whole_gib <= room
        return once, (
            f"whole ones ({self.whole_gib:.2f} GiB) {'fit' if once else 'do not fit'} beside the largest micro-step "
            f"({peak:.2f} GiB) in {room:.2f} GiB"
        )

    def _peak_gib(self, batch: Batch, row: Row) -> float:
        index = self.planner.layout.index
        assert index != "auto", "a mesh's layout is resolved"
        lengths = [batch.lengths[sample] for sample in row.samples]
        visual = sum(sum(batch.media_tokens[sample]) for sample in row.samples)
        share = math.ceil(visual / sum(lengths) * SHARES) / SHARES
        if share not in self._models:
            self._models[share] = self.planner.memory_of(share)
        return self._models[share].peak(row_tokens(lengths, row.size, index), row.size) / GIB


def marked(steps: Iterable[MicroStep], plan: Plan, number: int) -> Iterator[MicroStep]:
    """The micro-steps of a plan, each told whether gradients are summed after it: all of them, or the last one."""
    last = len(plan.micro_steps) - 1
    for place, step in enumerate(steps):
        yield replace(step, reduces=number != 1 or place == last)
