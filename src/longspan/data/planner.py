"""Makes the plan of a batch: every sample once, no micro-step over the token budget of a rank, all ranks busy.

Static CP: all rows have `cp` ranks. Dynamic CP (`Limits.sizes`): a row has as many ranks as its samples need, or more
where that shortens the makespan. Both come from data/schedule.py. The result depends on lengths, limits and cost only,
so that every rank makes the same plan by itself.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from longspan.data.cost import CostModel
from longspan.data.plan import (
    Cost,
    IndexKind,
    Limits,
    Plan,
    Row,
    default_cost,
    lower_bound,
    makespan,
    padded_length,
    row_index,
    row_tokens,
    sample_times,
    step_times,
)
from longspan.data.schedule import Problem, place, schedule, total_time
from longspan.data.touch_up import Steps
from longspan.errors import UserError

__all__ = [
    "Cost", "Draft", "IndexKind", "Limits", "Plan", "Row", "check_fit", "default_cost", "lower_bound", "make_draft",
    "make_plan", "makespan", "padded_length", "row_index", "row_tokens", "step_times",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan whose rows have no ranks yet: all that comparing plans needs."""

    steps: Steps
    limits: Limits
    step_cost: float

    @property
    def makespan(self) -> float:
        """Of the plan, but for rounding: a row's times are added in another order."""
        return total_time(self.steps, self.step_cost)

    def place(self) -> Plan:
        with _uncollected():
            return place(self.steps, self.limits)


def make_plan(
    lengths: Sequence[int], limits: Limits, cost: Cost | None = None, *, step_cost: float | None = None
) -> Plan:
    """A plan for samples of these lengths. `step_cost`: fixed time of a micro-step, in the unit of `cost`.

    By default it is 0 for a cost function, what the cost model says for a CostModel, and 1,024 tokens without a cost.
    """
    return make_draft(lengths, limits, cost, step_cost=step_cost).place()


def make_draft(
    lengths: Sequence[int], limits: Limits, cost: Cost | None = None, *, step_cost: float | None = None
) -> Draft:
    """`make_plan`, but for the ranks."""
    if step_cost is None:
        step_cost = 1024.0 if cost is None else cost.step_s if isinstance(cost, CostModel) else 0.0
    if len(lengths) == 0:
        raise UserError("the batch is empty: 0 samples to plan. Skip the call when a batch has none.")
    check_fit(lengths, limits)
    if limits.sizes is not None:
        limits = replace(limits, sizes=few_sizes(limits.sizes))
    tokens = np.asarray(lengths, dtype=np.int64)
    with _uncollected():
        seconds = np.stack([sample_times(tokens, size, cost or default_cost) for size in limits.all_sizes])
        padded = np.stack([padded_length(tokens, size, limits.index) for size in limits.all_sizes])
        problem = Problem.of(limits, np.argsort(-tokens, kind="stable"), padded, seconds, step_cost)
        return Draft(schedule(problem), limits, step_cost)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector: a plan has no cycles, and looking for some among all that is imported is a third of the
    time that 100,000 samples take."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def few_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of many CP sizes the small ones, 2^k, 3 * 2^k and the largest: what lies between gains little and costs
    groups."""
    most = max(sizes)
    return tuple(
        c for c in sizes if c <= 4 or c == most or c & (c - 1) == 0 or (c % 3 == 0 and c // 3 & (c // 3 - 1) == 0)
    )


def check_fit(lengths: Sequence[int], limits: Limits) -> None:
    """Raises UserError for a sample that fits no row, naming the longest."""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if min(lengths) < 1:
        raise UserError(
            f"sample {list(lengths).index(min(lengths))} has length {min(lengths)}. A sample needs at least 1 token."
        )
    size = max(limits.all_sizes)
    length, padded = lengths[longest], padded_length(lengths[longest], size, limits.index)
    if padded <= limits.capacity(size):
        return
    pads = f" ({padded} with the pads of {limits.index} at cp={size})" if padded != length else ""
    need = row_tokens([length], size, limits.index, multiple=limits.multiple)
    raise UserError(
        f"sample {longest} has {length} tokens{pads}, more than {limits.capacity(size)}: the budget of "
        f"{limits.budget} tokens a rank "
        f"(max_tokens_per_rank) times cp={size} is {limits.budget * size}. Raise the budget to at least {need}, "
        "raise cp, or cut the sample."
    )
