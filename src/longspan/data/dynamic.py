"""Dynamic CP: each micro-step cuts the ranks into groups of several sizes, so that a long row takes many ranks beside
short rows.

For a threshold D every sample takes the smallest CP size at which it fits its ranks' budget and ends within D. That
fixes how many rows of each size are needed; the samples are spread over them (data/filling.py), and rows of like time
share a micro-step (first-fit decreasing height, as in strip packing: width = ranks, height = time). A low D means more
CP, which costs communication but evens the micro-steps out; a high D means long micro-steps that only long rows fill.
A few D are tried and the shortest makespan wins; ties go to less CP. The result is a heuristic:
`benchmarks/planner.py` states how far it is from the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longspan.data.filling import Bins, fill
from longspan.data.plan import Limits, Plan, Row

SAMPLES_TRIED = 160_000  # thresholds tried = this / samples, within 3..32: 10,000 samples stay under 1 s on one core


@dataclass(slots=True)
class _Row:
    samples: list[int]
    size: int
    height: float


@dataclass(frozen=True, slots=True)
class _Problem:
    order: list[int]  # samples, longest first
    limits: Limits
    weights: list[list[int]]  # [size][sample] tokens
    times: list[list[float]]  # [size][sample]
    step_cost: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.limits.all_sizes

    def capacity(self, k: int) -> int:
        return self.limits.capacity(self.sizes[k])


def plan_dynamic(
    order: list[int], limits: Limits, *, weights: list[list[int]], times: list[list[float]], step_cost: float
) -> Plan:
    """weights[k][i], times[k][i]: tokens and time of sample i at CP size limits.sizes[k]."""
    problem = _Problem(order, limits, weights, times, step_cost)
    best: list[list[_Row]] | None = None
    best_time = math.inf
    for threshold in _thresholds(problem):
        steps = _improve(_shelves(_rows(problem, threshold), limits.num_ranks), problem)
        time = sum(max(row.height for row in rows) for rows in steps) + step_cost * len(steps)
        if time < best_time * (1 - 1e-9):
            best, best_time = steps, time
    assert best is not None
    return _plan(best, limits.num_ranks)


def _smallest_fitting(problem: _Problem) -> list[int]:
    """First size whose ranks hold the sample, by sample."""
    result = []
    capacities = [problem.capacity(k) for k in range(len(problem.sizes))]
    for i in range(len(problem.order)):
        k = 0
        while problem.weights[k][i] > capacities[k]:
            k += 1
        result.append(k)
    return result


def _thresholds(problem: _Problem) -> list[float]:
    """From the height of the tallest sample at its smallest size down to a fraction of an even micro-step."""
    fitting = _smallest_fitting(problem)
    tallest = max(problem.times[k][i] for i, k in enumerate(fitting))
    least = max(min(times[i] for times in problem.times) for i in problem.order[:64])
    work = math.fsum(problem.times[k][i] * problem.sizes[k] for i, k in enumerate(fitting))
    tokens = sum(problem.weights[k][i] for i, k in enumerate(fitting))
    steps = max(1, -(-tokens // (problem.limits.budget * problem.limits.num_ranks)))
    low = min(max(least, work / problem.limits.num_ranks / steps / 2), tallest)
    count = min(32, max(3, SAMPLES_TRIED // len(problem.order)))
    even = [work / problem.limits.num_ranks / number for number in range(steps, steps + count // 3)]
    grid = [tallest * (low / tallest) ** (step / (count - 1)) for step in range(count)]
    return sorted({*grid, *even, tallest}, reverse=True)


def _rows(problem: _Problem, threshold: float) -> list[_Row]:
    """Rows in which every sample ends within the threshold where some size allows it."""
    chosen = [_choose(problem, i, threshold) for i in range(len(problem.order))]
    counts = _counts(problem, chosen, threshold)
    while True:
        bins = [Bins.empty(size, problem.capacity(k), counts[k]) for k, size in enumerate(problem.sizes)]
        short = fill(problem.order, bins, weights=problem.weights, times=problem.times, smallest=chosen)
        if short is None:
            break
        counts[short] += max(1, counts[short] // 50)
    return [
        _Row(samples, size, height)
        for size, group in zip(problem.sizes, bins, strict=True)
        for samples, height in zip(group.contents, group.heights, strict=True)
        if samples
    ]


def _choose(problem: _Problem, sample: int, threshold: float) -> int:
    best, best_time = -1, math.inf
    for k in range(len(problem.sizes)):
        if problem.weights[k][sample] > problem.capacity(k):
            continue
        time = problem.times[k][sample]
        if time <= threshold * (1 + 1e-9):
            return k
        if time < best_time * (1 - 1e-9):
            best, best_time = k, time
    return best


def _counts(problem: _Problem, chosen: Sequence[int], threshold: float) -> list[int]:
    """Rows of each size: enough for tokens and time; ranks left over in the last micro-step become rows of size 1."""
    num_sizes = len(problem.sizes)
    tokens, time, samples, large = [0] * num_sizes, [0.0] * num_sizes, [0] * num_sizes, [0] * num_sizes
    for i, k in enumerate(chosen):
        tokens[k] += problem.weights[k][i]
        time[k] += problem.times[k][i]
        samples[k] += 1
        large[k] += 2 * problem.times[k][i] > threshold or 2 * problem.weights[k][i] > problem.capacity(k)
    counts = [
        min(samples[k], max(-(-tokens[k] // problem.capacity(k)), math.ceil(time[k] / threshold - 1e-6)))
        for k in range(num_sizes)
    ]
    width = sum(count * size for count, size in zip(counts, problem.sizes, strict=True))
    ranks = problem.limits.num_ranks
    counts[0] = min(samples[0], counts[0] + -width % ranks)
    return counts


def _shelves(rows: list[_Row], num_ranks: int) -> list[list[_Row]]:
    """First-fit decreasing height: each row into the first micro-step with enough free ranks."""
    steps: list[list[_Row]] = []
    free: list[int] = []
    first = 0  # steps before it are full
    for row in sorted(rows, key=lambda row: (-row.height, -row.size, row.samples)):
        number = first
        while number < len(steps) and free[number] < row.size:
            number += 1
        if number == len(steps):
            steps.append([])
            free.append(num_ranks)
        steps[number].append(row)
        free[number] -= row.size
        while first < len(free) and free[first] == 0:
            first += 1
    return steps


def _improve(steps: list[list[_Row]], problem: _Problem) -> list[list[_Row]]:
    """Within each micro-step: idle ranks take samples of crowded rows; a row gives up CP that does not shorten the
    step."""
    for rows in steps:
        limit = max(row.height for row in rows)
        for row in list(rows):
            _narrow(row, rows, limit, problem)
        _spread(rows, problem)
    return steps


def _narrow(row: _Row, rows: list[_Row], limit: float, problem: _Problem) -> None:
    """The smallest size that holds the row and keeps it within the step."""
    for k, size in enumerate(problem.sizes):
        if size >= row.size:
            return
        height = sum(problem.times[k][i] for i in row.samples)
        if height <= limit and sum(problem.weights[k][i] for i in row.samples) <= problem.capacity(k):
            row.size, row.height = size, height
            return


def _spread(rows: list[_Row], problem: _Problem) -> None:
    """While ranks are idle: the tallest row of several samples gives half of them away, if a row of one rank can hold
    them."""
    idle = problem.limits.num_ranks - sum(row.size for row in rows)
    times, weights, room = problem.times[0], problem.weights[0], problem.capacity(0)
    while idle:
        limit = max(row.height for row in rows)
        for row in sorted(rows, key=lambda row: (-row.height, row.samples)):
            k = problem.sizes.index(row.size)
            given: list[int] = []
            height, tokens, left = 0.0, 0, row.height
            for i in sorted(row.samples, key=lambda i: (times[i], i)):
                rest = left - problem.times[k][i]
                if (
                    len(given) + 1 == len(row.samples)
                    or tokens + weights[i] > room
                    or (given and height + times[i] > rest)
                ):
                    break
                given.append(i)
                height, tokens, left = height + times[i], tokens + weights[i], rest
            if given and height <= limit:
                row.samples = [i for i in row.samples if i not in set(given)]
                row.height = sum(problem.times[k][i] for i in row.samples)
                rows.append(_Row(given, problem.sizes[0], height))
                idle -= 1
                break
        else:
            return


def _plan(steps: list[list[_Row]], num_ranks: int) -> Plan:
    """Ranks for the rows: large groups first, so that powers of two start at multiples of themselves; idle ranks run
    inert rows."""
    result: list[tuple[Row, ...]] = []
    for rows in sorted(steps, key=lambda rows: -max(row.height for row in rows)):
        placed: list[Row] = []
        start = 0
        for row in sorted(rows, key=lambda row: (-row.size, -row.height, row.samples)):
            placed.append(Row(tuple(sorted(row.samples)), start=start, size=row.size))
            start += row.size
        placed += [Row((), start=rank, size=1) for rank in range(start, num_ranks)]
        result.append(tuple(placed))
    return Plan(tuple(result), num_ranks)
