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

from longspan.data import Limits, Plan, Row, fullest_row, make_plan, row_tokens
from longspan.data.cost import FORWARDS, CostModel
from longspan.data.stages import Cut
from longspan.engine.megatron.schedule import Move, schedule
from longspan.layout import Layout

__all__ = ["Played", "cut_of", "in_flight", "play", "plan_stages", "slowest_stage"]

ROUNDS = 4  # of pp micro-steps: more do not raise what is in flight
SPLITS = 4  # times that the fullest row is halved in search of more, smaller micro-steps
NEAR = 0.95  # of the fullest row: a budget above it makes much the same plan
SMALL = 0.01  # a bubble that more micro-steps could not repay


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
    budget = limits.budget
    for _ in range(SPLITS + 1 if layout.pp > 1 else 1):
        plan = make_plan(lengths, replace(limits, budget=budget), stage)
        found.append((plan, play(plan, lengths, cost, layout, media=media)))
        # a budget above it binds nothing
        fullest, _ = fullest_row(plan.micro_steps, lengths, limits.index, multiple=limits.multiple)
        budget = max(longest, fullest // 2)
        if budget > NEAR * fullest or found[-1][1].bubble_share < SMALL:
            break
    return min(found, key=lambda pair: pair[1].makespan_s)


def play(plan: Plan, lengths: Sequence[int], cost: CostModel, layout: Layout, *, media: bool = False) -> Played:
    """The makespan of a plan under the layout's schedule. media: making a micro-step is collective."""
    return _Clock(plan, lengths, cost, layout, media).run()


class _Clock:
    """One play. Times are arrays by data rank; the ranks of a row move together."""

    def __init__(self, plan: Plan, lengths: Sequence[int], cost: CostModel, layout: Layout, media: bool) -> None:
        self.pp, self.vpp, self.ranks = layout.pp, layout.vpp, plan.num_ranks
        self.together = layout.ep > 1
        self.meets = media and layout.vpp == 1
        self.stages, self.count = cost.stages(), len(plan.micro_steps)
        rows = [row for rows in plan.micro_steps for row in rows]
        sizes = np.array([row.size for row in rows])
        owner = np.repeat(np.arange(len(rows)), sizes).reshape(self.count, self.ranks)  # [micro-step, rank] -> row
        by_row = self._seconds(rows, np.asarray(lengths, dtype=np.float64))
        self.forward, self.backward = (seconds[:, owner] for seconds in by_row)  # [stage, micro-step, rank]
        self.rows = owner - owner[:, :1] if sizes.max() > 1 else None  # [micro-step, rank] -> row within it
        self.hops = (_tokens(rows, lengths)[owner].max(axis=1) * cost.hop_token_s + cost.machine.latency_s).tolist()
        self.free = [np.zeros(self.ranks)] * self.pp
        self.there: dict[tuple[bool, int, int], np.ndarray] = {}  # (forward, stage, micro-step) -> end by data rank

    def _seconds(self, rows: Sequence[Row], tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward, each [stage, row]; stages between the first and the last are alike."""
        ends = {(stage.first, stage.last): stage for stage in self.stages}
        known = {end: _row_seconds(stage, rows, tokens) for end, stage in ends.items()}
        forward, backward = zip(*(known[stage.first, stage.last] for stage in self.stages), strict=True)
        return np.stack(forward), np.stack(backward)

    def run(self) -> Played:
        waiting = [moves_of(self.count, rank, self.pp, self.vpp) for rank in range(self.pp)]
        places = [0] * self.pp
        while any(place < len(moves) for place, moves in zip(places, waiting, strict=True)):
            moved = False
            for rank in range(self.pp):
                while places[rank] < len(waiting[rank]) and self._ready(waiting, places, rank):
                    self._move(waiting[rank][places[rank]], rank)
                    places[rank] += 1
                    moved = True
            assert moved, "the schedule of megatron/schedule.py never stops"
        stages = self.forward + self.backward
        busy = np.stack([stages[rank :: self.pp].sum(axis=(0, 1)) for rank in range(self.pp)])  # [pp, rank]
        # the busiest pipeline rank by itself: its moves one after the other, data ranks meeting as they do
        met = stages.max(axis=2).sum(axis=1)
        alone = max(met[rank :: self.pp].sum() for rank in range(self.pp)) if self.together else busy.max()
        makespan = max(clock.max() for clock in self.free)
        return Played(float(makespan), tuple(busy.sum(axis=1).tolist()), float(alone))

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
        last = max(clock.max() for clock in self.free)
        self.free = [np.full(self.ranks, last)] * self.pp
        self.there[key] = self.free[0]
        return True

    def _needs(self, move: Move, rank: int) -> tuple[bool, int, int] | None:
        stage = move.chunk * self.pp + rank
        if move.step is not None:
            return None if stage == 0 else (True, stage - 1, move.number)
        return None if stage == len(self.stages) - 1 else (False, stage + 1, move.number)

    def _move(self, move: Move, rank: int) -> None:
        stage, forward = move.chunk * self.pp + rank, move.step is not None
        before, ready = self._needs(move, rank), self.free[rank]
        if before is not None:
            ready = np.maximum(ready, self.there[before] + self.hops[move.number])
        if self.rows is not None:
            rows = self.rows[move.number]
            ready = np.maximum.reduceat(ready, np.flatnonzero(np.diff(rows, prepend=-1)))[rows]
        took = (self.forward if forward else self.backward)[stage, move.number]
        ends = np.full(self.ranks, ready.max() + took.max()) if self.together else ready + took
        self.free[rank] = self.there[forward, stage, move.number] = ends


def _row_seconds(stage: CostModel, rows: Sequence[Row], tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of each row on one stage. The head forms its gradients in its forward."""
    total, head = np.full(len(rows), stage.step_s), np.zeros(len(rows))
    for size in sorted({row.size for row in rows}):
        pairs = [(number, i) for number, row in enumerate(rows) if row.size == size for i in row.samples]
        owner, samples = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        total += np.bincount(owner, stage.times(tokens[samples], size), len(rows))
        head += np.bincount(owner, stage.parts(tokens[samples], size)["head"] * stage.scale, len(rows))
    forward = head + (total - head) / FORWARDS[stage.recompute]
    return forward, total - forward


def _tokens(rows: Sequence[Row], lengths: Sequence[int]) -> np.ndarray:
    """Of a rank of each row, pads left out."""
    return np.array([sum(lengths[i] for i in row.samples) / row.size for row in rows])
