"""Makes the plan of a batch: every sample once, no micro-step over the token budget of a rank, all ranks busy.

Static CP (this file): rows of `cp` ranks. As few micro-steps as first-fit decreasing finds, samples spread over their
rows by cost (data/filling.py), rows of like cost put into the same micro-step, since a micro-step lasts as long as its
slowest row. Dynamic CP (`Limits.sizes`): data/dynamic.py. The result depends on lengths, limits and cost only: it is
the same on every rank.
"""

from collections.abc import Sequence

import numpy as np

from longspan.data.cost import CostModel
from longspan.data.dynamic import plan_dynamic
from longspan.data.filling import Bins, fill, first_fit
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
from longspan.errors import UserError

__all__ = [
    "Cost", "IndexKind", "Limits", "Plan", "Row", "default_cost", "lower_bound", "make_plan", "makespan",
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
    _check_fit(lengths, limits)
    sizes = limits.all_sizes
    times = [_times(lengths, size, cost or default_cost) for size in sizes]
    weights = [[padded_length(length, size, limits.index) for length in lengths] for size in sizes]
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    if limits.sizes is not None:
        return plan_dynamic(order, limits, weights=weights, times=times, step_cost=step_cost)
    return _plan_static(order, limits, weights=weights[0], times=times[0], step_cost=step_cost)


def _times(lengths: Sequence[int], size: int, cost: Cost) -> list[float]:
    if isinstance(cost, CostModel):
        return cost.times(np.asarray(lengths, dtype=np.float64), size).tolist()
    known = {length: float(cost(length, size)) for length in set(lengths)}
    return [known[length] for length in lengths]


def _check_fit(lengths: Sequence[int], limits: Limits) -> None:
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


def _plan_static(order: list[int], limits: Limits, *, weights: list[int], times: list[float], step_cost: float) -> Plan:
    groups, capacity = limits.num_ranks // limits.cp, limits.capacity(limits.cp)
    candidates: list[list[list[int]]] = []
    count = _round_up(-(-sum(weights) // capacity), groups)
    rows = _balanced(order, count, limits, weights=weights, times=times)
    if rows is None:
        rows = first_fit(order, weights, capacity)
        count = _round_up(len(rows), groups)
        candidates.append(_split(rows, count, times))
        rows = _balanced(order, count, limits, weights=weights, times=times)
    while rows is None:
        count += groups * max(1, count // groups // 100)
        rows = _balanced(order, count, limits, weights=weights, times=times)
    candidates.append(rows)
    plans = [_stack(rows, limits, times) for rows in candidates]
    best = min(plans, key=lambda item: item[0] + step_cost * len(item[1].micro_steps))
    return best[1]


def _balanced(
    order: list[int], count: int, limits: Limits, *, weights: list[int], times: list[float]
) -> list[list[int]] | None:
    bins = Bins.empty(limits.cp, limits.capacity(limits.cp), count)
    failed = fill(order, [bins], weights=[weights], times=[times], smallest=[])
    return bins.contents if failed is None else None


def _split(rows: list[list[int]], count: int, times: list[float]) -> list[list[int]]:
    """Cuts the costliest rows of several samples until there are `count`, as far as there are samples."""
    rows = [list(row) for row in rows]
    while len(rows) < count:
        row = max((row for row in rows if len(row) > 1), key=lambda row: sum(times[i] for i in row), default=None)
        if row is None:
            break
        halves: tuple[list[int], list[int]] = ([], [])
        heights = [0.0, 0.0]
        for i in sorted(row, key=lambda i: (-times[i], i)):
            side = 0 if heights[0] <= heights[1] else 1
            halves[side].append(i)
            heights[side] += times[i]
        if not halves[1]:
            halves[1].append(halves[0].pop())
        row[:] = halves[0]
        rows.append(halves[1])
    return rows


def _stack(rows: list[list[int]], limits: Limits, times: list[float]) -> tuple[float, Plan]:
    """Rows of like cost into the same micro-step; gives its makespan too."""
    groups = limits.num_ranks // limits.cp
    heights = [sum(times[i] for i in row) for row in rows]
    ranked = sorted(range(len(rows)), key=lambda number: (-heights[number], number))
    steps: list[tuple[Row, ...]] = []
    total = 0.0
    for first in range(0, len(ranked), groups):
        chosen: list[tuple[int, ...]] = [tuple(sorted(rows[number])) for number in ranked[first : first + groups]]
        chosen += [()] * (groups - len(chosen))
        steps.append(tuple(Row(samples, start=k * limits.cp, size=limits.cp) for k, samples in enumerate(chosen)))
        total += heights[ranked[first]]
    return total, Plan(tuple(steps), limits.num_ranks)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
