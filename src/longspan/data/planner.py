"""Makes the plan of a batch: every sample once, no micro-step over the token budget of a rank, all ranks busy.

Static CP: all rows have `cp` ranks. Dynamic CP (`Limits.sizes`): a row has as many ranks as its samples need, or more
where that shortens the makespan. Both come from data/schedule.py. The result depends on lengths, limits and cost only,
so that every rank makes the same plan by itself.
"""

from collections.abc import Sequence
from dataclasses import replace

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
    step_times,
)
from longspan.data.schedule import Problem, schedule
from longspan.errors import UserError

__all__ = [
    "Cost", "IndexKind", "Limits", "Plan", "Row", "check_fit", "default_cost", "lower_bound", "make_plan", "makespan",
    "padded_length", "row_index", "row_tokens", "step_times",
]  # fmt: skip


def make_plan(
    lengths: Sequence[int], limits: Limits, cost: Cost | None = None, *, step_cost: float | None = None
) -> Plan:
    """A plan for samples of these lengths. `step_cost`: fixed time of a micro-step, in the unit of `cost`.

    By default it is 0 for a cost function, what the cost model says for a CostModel, and 1,024 tokens without a cost.
    """
    if step_cost is None:
        step_cost = 1024.0 if cost is None else cost.step_s if isinstance(cost, CostModel) else 0.0
    if len(lengths) == 0:
        raise UserError("the batch is empty: 0 samples to plan. Skip the call when a batch has none.")
    check_fit(lengths, limits)
    if limits.sizes is not None:
        limits = replace(limits, sizes=few_sizes(limits.sizes))
    sizes = limits.all_sizes
    times = [_times(lengths, size, cost or default_cost) for size in sizes]
    weights = [[padded_length(length, size, limits.index) for length in lengths] for size in sizes]
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return schedule(Problem(limits, order, weights, times, step_cost))


def few_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of many CP sizes the small ones, 2^k, 3 * 2^k and the largest: what lies between gains little and costs
    groups."""
    return tuple(
        c for c in sizes if c <= 4 or c == max(sizes) or c & (c - 1) == 0 or (c % 3 == 0 and c // 3 & (c // 3 - 1) == 0)
    )


def _times(lengths: Sequence[int], size: int, cost: Cost) -> list[float]:
    if isinstance(cost, CostModel):
        return cost.times(np.asarray(lengths, dtype=np.float64), size).tolist()
    known = {length: float(cost(length, size)) for length in set(lengths)}
    return [known[length] for length in lengths]


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
