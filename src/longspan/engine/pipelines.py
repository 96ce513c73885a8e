"""What backend="megatron"'s schedule means for memory and time: micro-steps in flight, and a plan played out over stages.

`in_flight` counts what megatron/schedule.py really holds. `play` runs its moves on a clock for every pipeline rank and data
rank: a move starts when the rank is free, what it needs has arrived and the other ranks of its row are there. Data ranks
wait for each other only inside a row, over experts (ep > 1: all of them, a bound) and where making a micro-step is collective
(batches with media, unless interleaved). Tensor-parallel ranks move together. Pure, the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from longspan.data import Limits, Plan, Row, make_plan, row_tokens
from longspan.data.cost import FORWARDS, CostModel
from longspan.data.stages import Cut
from longspan.engine.megatron.schedule import Move, schedule
from longspan.layout import Layout

__all__ = ["Played", "cut_of", "in_flight", "play", "plan_stages", "slowest_stage"]

ROUNDS = 4  # of pp micro-steps: more do not raise what is in flight
SPLITS = 4  # times that a budget is halved in search of more, smaller micro-steps


@dataclass(frozen=True, slots=True)
class Played:
    """A plan on the clock, in seconds of the cost model."""

    makespan_s: float
    busy_s: tuple[float, ...]  # of each pipeline rank, over its data ranks
    alone_s: float  # the makespan if no stage waited for another: the busiest rank

    @property
    def bubble_share(self) -> float:
        """Share of the makespan in which the busiest rank waits for other stages."""
        return 1.0 - self.alone_s / self.makespan_s if len(self.busy_s) > 1 and self.makespan_s else 0.0


def cut_of(layout: Layout) -> Cut:
    """The part of a layout that cuts the model."""
    return Cut(layout.tp, layout.sequence_parallel, layout.pp, layout.vpp, layout.etp)


def in_flight(pp: int, vpp: int) -> tuple[int, ...]:
    """Most (micro-step, chunk) pairs between forward and backward on each pipeline rank, for any number of micro-steps."""
    found = []
    for rank in range(pp):
        held = most = 0
        for move in moves_of(ROUNDS * pp, rank, pp, vpp):
            held += 1 if move.step is not None else -1
            most = max(most, held)
        found.append(most)
    return tuple(found)


def moves_of(count: int, rank: int, pp: int, vpp: int) -> list[Move]:
    """The moves of a pipeline rank for `count` micro-steps; a forward's `step` is its number."""
    steps = cast(Any, range(count))  # schedule() hands steps on and looks at none
    return list(schedule(steps, rank=rank, pp=pp, vpp=vpp, trains=True))


def slowest_stage(cost: CostModel, lengths: Sequence[int], size: int) -> CostModel:
    """Of the stages' cost models the one that takes longest for these samples: what a steady pipeline waits for."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return max(cost.stages(), key=lambda stage: float(stage.times(tokens, size).sum()) + stage.step_s)


def plan_stages(
    lengths: Sequence[int], limits: Limits, cost: CostModel, layout: Layout, *, media: bool = False
) -> tuple[Plan, Played]:
    """The plan of least makespan over stages: pipelines also try smaller budgets, since more micro-steps fill them better."""
    stage = slowest_stage(cost, lengths, limits.all_sizes[-1])
    longest = row_tokens([max(lengths)], max(limits.all_sizes), limits.index, multiple=limits.multiple)
    found: list[tuple[Plan, Played]] = []
    for halved in range(SPLITS + 1 if layout.pp > 1 else 1):
        budget = limits.budget if halved == 0 else max(longest, limits.budget >> halved)
        plan = make_plan(lengths, replace(limits, budget=budget), stage)
        found.append((plan, play(plan, lengths, cost, layout, media=media)))
        if budget <= longest:
            break
    return min(found, key=lambda pair: pair[1].makespan_s)


def play(plan: Plan, lengths: Sequence[int], cost: CostModel, layout: Layout, *, media: bool = False) -> Played:
    """The makespan of a plan under the layout's schedule. media: making a micro-step is collective."""
    return _Clock(plan, lengths, cost, layout, media).run()


class _Clock:
    """One play. Times are by data rank; a micro-step's rows are tuples of ranks that move together."""

    def __init__(self, plan: Plan, lengths: Sequence[int], cost: CostModel, layout: Layout, media: bool) -> None:
        self.pp, self.vpp, self.ranks = layout.pp, layout.vpp, plan.num_ranks
        self.together = layout.ep > 1
        self.meets = media and layout.vpp == 1
        self.stages, self.steps = cost.stages(), plan.micro_steps
        sizes, tokens = {row.size for rows in plan.micro_steps for row in rows}, np.asarray(lengths, dtype=np.float64)
        each = [(number, stage, size) for number, stage in enumerate(self.stages) for size in sorted(sizes)]
        self.times = {(number, size): stage.times(tokens, size) for number, stage, size in each}
        self.heads = {(number, size): stage.parts(tokens, size)["head"] * stage.scale for number, stage, size in each}
        self.seconds = [self._seconds(rows) for rows in plan.micro_steps]
        self.hops = [max(_tokens(row, lengths) for row in rows) * cost.hop_token_s for rows in plan.micro_steps]
        self.latency = cost.machine.latency_s
        self.free = [[0.0] * self.ranks for _ in range(self.pp)]
        self.busy = [[0.0] * self.ranks for _ in range(self.pp)]
        self.there: dict[tuple[bool, int, int], list[float]] = {}  # (forward, stage, micro-step) -> end by data rank

    def _seconds(self, rows: Sequence[Row]) -> list[list[tuple[range, float, float]]]:
        """By stage: (data ranks, forward, backward) of each row. The head forms its gradients in its forward."""
        found = []
        for number, stage in enumerate(self.stages):
            again = FORWARDS[stage.recompute]
            here = []
            for row in rows:
                samples = list(row.samples)
                total = float(self.times[number, row.size][samples].sum()) + stage.step_s
                head = float(self.heads[number, row.size][samples].sum())
                forward = head + (total - head) / again
                here.append((range(row.start, row.start + row.size), forward, total - forward))
            found.append(here)
        return found

    def run(self) -> Played:
        waiting = [moves_of(len(self.steps), rank, self.pp, self.vpp) for rank in range(self.pp)]
        places = [0] * self.pp
        while any(place < len(moves) for place, moves in zip(places, waiting, strict=True)):
            moved = False
            for rank in range(self.pp):
                while places[rank] < len(waiting[rank]) and self._ready(waiting, places, rank):
                    self._move(waiting[rank][places[rank]], rank)
                    places[rank] += 1
                    moved = True
            assert moved, "the schedule of megatron/schedule.py never stops"
        busy = tuple(sum(clock) for clock in self.busy)
        makespan = max(max(clock) for clock in self.free)
        return Played(makespan, busy, self._alone())

    def _alone(self) -> float:
        """The busiest pipeline rank by itself: its moves one after the other, data ranks meeting as they do."""
        if not self.together:
            return max(max(clock) for clock in self.busy)
        slowest = [[max(fore + back for _, fore, back in rows) for rows in stages] for stages in self.seconds]
        return max(sum(sum(times[rank :: self.pp]) for times in slowest) for rank in range(self.pp))

    def _ready(self, waiting: Sequence[Sequence[Move]], places: Sequence[int], rank: int) -> bool:
        move = waiting[rank][places[rank]]
        if self.meets and move.step is not None and not self._met(move.number, waiting, places):
            return False
        before = self._needs(move, rank)
        return before is None or before in self.there

    def _met(self, number: int, waiting: Sequence[Sequence[Move]], places: Sequence[int]) -> bool:
        """Whether every pipeline rank has come to the forward of this micro-step; then their clocks meet."""
        key = (True, -1, number)
        if key in self.there:
            return True
        for moves, place in zip(waiting, places, strict=True):
            if place >= len(moves) or moves[place].step is None or moves[place].number != number:
                return False
        last = max(max(clock) for clock in self.free)
        self.free = [[last] * self.ranks for _ in range(self.pp)]
        self.there[key] = self.free[0]
        return True

    def _needs(self, move: Move, rank: int) -> tuple[bool, int, int] | None:
        stage = move.chunk * self.pp + rank
        if move.step is not None:
            return None if stage == 0 else (True, stage - 1, move.number)
        return None if stage == len(self.stages) - 1 else (False, stage + 1, move.number)

    def _move(self, move: Move, rank: int) -> None:
        stage, forward = move.chunk * self.pp + rank, move.step is not None
        before = self._needs(move, rank)
        arrived = self.there[before] if before is not None else None
        hop = self.hops[move.number] + self.latency
        clock, ends = self.free[rank], [0.0] * self.ranks
        rows = [(ranks, fore if forward else back) for ranks, fore, back in self.seconds[move.number][stage]]
        starts = [
            max(max(clock[d], arrived[d] + hop if arrived is not None else 0.0) for d in ranks) for ranks, _ in rows
        ]
        met = max(starts) + max(took for _, took in rows) if self.together else 0.0
        for (ranks, took), start in zip(rows, starts, strict=True):
            for d in ranks:
                clock[d] = ends[d] = max(start + took, met)
                self.busy[rank][d] += took
        self.there[forward, stage, move.number] = ends


def _tokens(row: Row, lengths: Sequence[int]) -> float:
    """Of a rank of a row, pads left out."""
    return sum(lengths[i] for i in row.samples) / row.size
