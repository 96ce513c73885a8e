"""The scheduler behind both kinds of plan: rows of ranks x time, stacked into micro-steps.

For a threshold D every sample takes the smallest CP size at which it fits its ranks' budget and ends within D. That
fixes how many rows of each size are needed; the samples are spread over them (data/filling.py), and rows of like time
share a micro-step (first-fit decreasing height, as in strip packing: width = ranks, height = time). A low D means more
CP, which costs communication but evens the micro-steps out; a high D means long micro-steps that only long rows fill.
A few D are tried, from high to low, and the shortest makespan wins; ties go to less CP. Then each micro-step is
touched up (data/touch_up.py). With one size (static CP), D only sets the number of rows.

A heuristic: benchmarks/planner.py and docs/planning.md state how far it is from the bound and from the exact optimum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter

import numpy as np

from longspan.data.filling import Bins, fill, first_fit
from longspan.data.plan import Limits, Plan, Row
from longspan.data.touch_up import OpenRow, Steps, even_out, polish

SAMPLES_TRIED = 30_000  # thresholds tried: about this / samples, within 2..24, so that 10,000 samples take under 1 s
EVEN = 1.05  # a sample this much taller than an even micro-step gets a micro-step of its own height
CLOSE = 1.002  # of the lower bound: good enough to stop
POLISHED = 40_000  # samples x ranks up to which more is tried and micro-steps exchange samples
STACKED = 512 * 513 // 2  # samples looked at for micro-steps of one tall sample each: never too few for 512 samples


@dataclass(frozen=True, slots=True)
class Problem:
    """Samples as numbers: for each CP size k, what they take. Arrays for what is done to all samples at once, the same numbers as
    lists for what goes from sample to sample."""

    limits: Limits
    order: np.ndarray  # [m] i64, samples, longest first
    tokens: np.ndarray  # [k, n] i64, pads included
    seconds: np.ndarray  # [k, n] f64
    weights: list[list[int]]  # tokens
    times: list[list[float]]  # seconds
    step_cost: float

    @staticmethod
    def of(limits: Limits, order: np.ndarray, tokens: np.ndarray, seconds: np.ndarray, step_cost: float) -> "Problem":
        return Problem(limits, order, tokens, seconds, tokens.tolist(), seconds.tolist(), step_cost)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.limits.all_sizes

    @property
    def capacities(self) -> list[int]:
        return [self.limits.capacity(size) for size in self.sizes]


def schedule(problem: Problem) -> Steps:
    """Rows without ranks yet. The best of a few thresholds, and never behind static CP at the smallest size that holds every sample."""
    best, best_time = _search(problem)
    if (static := _static(problem)) is not None:
        fixed, fixed_time = _search(static)
        if fixed_time < best_time * (1 - 1e-9):
            best = fixed
    _even_out(best, problem)
    if len(problem.order) * problem.limits.num_ranks <= POLISHED:
        polish(best, problem.weights, problem.times, problem.limits)
    return best


def _static(problem: Problem) -> Problem | None:
    """The same samples at one CP size, the smallest that cuts the ranks evenly and holds all."""
    if len(problem.sizes) == 1:
        return None
    for k, size in enumerate(problem.sizes):
        if problem.limits.num_ranks % size == 0 and problem.tokens[k].max() <= problem.capacities[k]:
            limits = replace(problem.limits, cp=size, sizes=None)
            return replace(
                problem, limits=limits, tokens=problem.tokens[k : k + 1], seconds=problem.seconds[k : k + 1],
                weights=[problem.weights[k]], times=[problem.times[k]],
            )  # fmt: skip
    return None


def _search(problem: Problem) -> tuple[Steps, float]:
    times, fits = problem.seconds, problem.tokens <= np.asarray(problem.capacities)[:, None]
    works = np.where(fits, times * np.asarray(problem.sizes)[:, None], np.inf)
    bound = math.fsum(works.min(axis=0).tolist()) / problem.limits.num_ranks
    bound = max(bound, float(np.where(fits, times, np.inf).min(axis=0).max()))
    best: Steps | None = None
    best_time = math.inf
    seen: set[tuple[bytes, tuple[int, ...]]] = set()
    thresholds = _thresholds(problem, works, fits)
    trials = ((_choose(times, fits, threshold), threshold) for threshold in thresholds)
    if len(problem.order) * problem.limits.num_ranks <= POLISHED:
        # as static CP would: at least so many ranks for every row
        wider = ((np.maximum(fits.argmax(axis=0), k), thresholds[0]) for k in range(1, len(problem.sizes)))
        trials = chain(trials, wider)
    for chosen, threshold in trials:
        counts = _counts(problem, chosen, threshold)
        if (key := (chosen.tobytes(), tuple(counts))) in seen:
            continue
        seen.add(key)
        candidates = _candidates(problem, chosen, counts)
        if len(problem.order) * problem.limits.num_ranks <= POLISHED:
            candidates.append(_stacks(problem, chosen))
        for steps in candidates:
            time = total_time(steps, problem.step_cost)
            if time < best_time * (1 - 1e-9):
                best, best_time = steps, time
        if best_time <= CLOSE * bound + problem.step_cost * len(best or ()):
            break
    assert best is not None
    return best, best_time


def total_time(steps: Steps, step_cost: float) -> float:
    return sum(max(row.height for row in rows) for rows in steps) + step_cost * len(steps)


def _thresholds(problem: Problem, works: np.ndarray, fits: np.ndarray) -> list[float]:
    """From the height of the tallest sample at its smallest size down to a fraction of an even micro-step."""
    limits, columns = problem.limits, np.arange(fits.shape[1])
    least = fits.argmax(axis=0)
    tallest = float(problem.seconds[least, columns].max())
    work = math.fsum(works[least, columns].tolist()) / limits.num_ranks
    tokens = int(problem.tokens[least, columns].sum())
    steps = max(1, -(-tokens // (limits.budget * limits.num_ranks)))
    count = min(24, max(2, SAMPLES_TRIED // len(problem.order)))
    even = [work / number for number in range(steps, steps + max(1, count // 3))]
    low = min(work / steps / 2, tallest)
    grid = [tallest * (low / tallest) ** (step / count) for step in range(count + 1)] if low > 0 else [tallest]
    return sorted({*grid, *even}, reverse=True)


def _choose(times: np.ndarray, fits: np.ndarray, threshold: float) -> np.ndarray:
    """The smallest size that fits and ends within the threshold; the fastest where none does."""
    within = fits & (times <= threshold * (1 + 1e-9))
    fastest = np.where(fits, times, np.inf).argmin(axis=0)
    return np.where(within.any(axis=0), within.argmax(axis=0), fastest)


def _counts(problem: Problem, chosen: np.ndarray, threshold: float) -> list[int]:
    """Rows of each size: enough for tokens and time; ranks left over become rows of the smallest size."""
    numbers = chosen[problem.order]
    tokens, seconds = problem.tokens[numbers, problem.order], problem.seconds[numbers, problem.order]
    heights = np.bincount(numbers, seconds, len(problem.sizes)).tolist()  # summed in order: alike on every CPU
    counts: list[int] = []
    for k, capacity in enumerate(problem.capacities):
        mine = tokens[numbers == k]
        large = int((2 * mine > capacity).sum())  # no two of them share a row
        rows = max(-(-int(mine.sum()) // capacity), large, math.ceil(heights[k] / threshold - 1e-6))
        counts.append(min(len(mine), rows))
    return _fill_ranks(problem, counts, int((numbers == 0).sum()))


def _fill_ranks(problem: Problem, counts: list[int], samples: int) -> list[int]:
    """Adds rows of the smallest size until the micro-steps are full."""
    width = sum(count * size for count, size in zip(counts, problem.sizes, strict=True))
    idle = -width % problem.limits.num_ranks // problem.sizes[0]
    return [min(max(samples, counts[0]), counts[0] + idle), *counts[1:]]


def _candidates(problem: Problem, chosen: np.ndarray, counts: list[int]) -> list[Steps]:
    """Samples spread over so many rows (or the next number that holds them); for one size also first-fit decreasing."""
    order, smallest = problem.order.tolist(), chosen[problem.order].tolist()
    weights, times = problem.tokens[:, problem.order].tolist(), problem.seconds[:, problem.order].tolist()
    samples = smallest.count(0)
    result: list[Steps] = []
    for _ in range(3):
        kinds = [
            Bins.empty(counts[k], capacity, weights=weights[k], times=times[k])
            for k, capacity in enumerate(problem.capacities)
        ]
        fill(order, kinds, smallest)
        rows = [
            OpenRow(samples, size, height)
            for size, bins in zip(problem.sizes, kinds, strict=True)
            for samples, height in zip(bins.contents, bins.heights(), strict=True)
            if samples
        ]
        result = [_shelves(rows, problem)]
        opened = [len(bins.contents) for bins in kinds]
        if opened == counts:
            return result
        counts = _fill_ranks(problem, opened, samples)
    if len(problem.sizes) == 1:  # too tight for spreading by cost: fewest tokens lost counts more
        seconds, size = problem.times[0], problem.sizes[0]
        bins = first_fit(order, weights[0], problem.capacities[0])
        result.append(_shelves([OpenRow(row, size, sum(seconds[i] for i in row)) for row in bins], problem))
    return result


def _shelves(rows: Sequence[OpenRow], problem: Problem) -> Steps:
    """First-fit decreasing height: each row into the first micro-step with enough free ranks; then touched up."""
    steps: Steps = []
    free: list[int] = []
    first = dict.fromkeys(problem.sizes, 0)  # steps before it have fewer free ranks than the size
    for row in sorted(rows, key=lambda row: (-row.height, -row.size, row.samples[0])):
        number = first[row.size]
        while number < len(steps) and free[number] < row.size:
            number += 1
        first[row.size] = number
        if number == len(steps):
            steps.append([])
            free.append(problem.limits.num_ranks)
        steps[number].append(row)
        free[number] -= row.size
    if len(problem.order) * problem.limits.num_ranks <= POLISHED:
        _even_out(steps, problem)
    return steps


def _even_out(steps: Steps, problem: Problem) -> None:
    for step in steps:
        even_out(step, problem.weights, problem.times, problem.limits)


def _stacks(problem: Problem, sizes_of: np.ndarray) -> Steps:
    """While one sample is taller than an even micro-step: a micro-step as tall as it, filled with the tallest samples
    that still end in time. The rest is spread evenly, and so is what is left after STACKED looks at a sample: each
    micro-step looks at all that is left.

    Better than spreading alone where few micro-steps hold samples of very different cost a token.
    """
    sizes, weights, times, capacities = problem.sizes, problem.weights, problem.times, problem.capacities
    ranks, chosen = problem.limits.num_ranks, sizes_of.tolist()
    tall = [times[k][i] for i, k in enumerate(chosen)]
    works = [time * sizes[k] for time, k in zip(tall, chosen, strict=True)]
    left = sorted(problem.order.tolist(), key=lambda i: (-tall[i], i))
    tokens = sum(weights[chosen[i]][i] for i in left)
    steps: Steps = []
    looks = 0
    while left:
        looks += len(left)
        work = math.fsum([works[i] for i in left])
        even = work / ranks / -(-tokens // (problem.limits.budget * ranks))
        if tall[left[0]] <= EVEN * even or looks > STACKED:
            part = replace(problem, order=problem.order[np.isin(problem.order, left)])
            spread = _candidates(part, sizes_of, _counts(part, sizes_of, even))
            return steps + min(spread, key=lambda steps: total_time(steps, problem.step_cost))
        limit = tall[left[0]] * (1 + 1e-9)
        free = ranks
        rows: list[list[OpenRow]] = [[] for _ in sizes]
        rooms: list[list[int]] = [[] for _ in sizes]
        later: list[int] = []
        for i in left:
            k = chosen[i]
            if free >= sizes[k]:
                rows[k].append(OpenRow([i], sizes[k], tall[i]))
                rooms[k].append(capacities[k] - weights[k][i])
                free -= sizes[k]
                tokens -= weights[k][i]
                continue
            best, best_height = None, -1.0
            for j in range(k, len(sizes)):
                if not rows[j]:
                    continue
                time, weight = times[j][i], weights[j][i]
                for number, row in enumerate(rows[j]):
                    if best_height < row.height <= limit - time and rooms[j][number] >= weight:
                        best, best_height = (j, number), row.height
                if best is not None:
                    break
            if best is None:
                later.append(i)
                continue
            j, number = best
            rows[j][number].samples.append(i)
            rows[j][number].height += times[j][i]
            rooms[j][number] -= weights[j][i]
            tokens -= weights[k][i]
        steps.append([row for kind in rows for row in kind])
        even_out(steps[-1], weights, times, problem.limits)
        left = later
    return steps


def place(steps: Steps, limits: Limits) -> Plan:
    """Ranks for the rows: large groups first, so that powers of two start at multiples of themselves.

    Among groups of one size the row that costs most goes to the ranks that have done least. Idle ranks run inert rows.
    """
    done = [0.0] * limits.num_ranks
    result: list[tuple[Row, ...]] = []
    unit = limits.all_sizes[0]
    for rows in sorted(steps, key=lambda rows: -max([row.height for row in rows])):
        idle = (limits.num_ranks - sum([row.size for row in rows])) // unit
        everything = [*rows, *(OpenRow([], unit, 0.0) for _ in range(idle))]
        everything.sort(key=lambda row: (-row.size, -row.height, row.samples))
        placed: list[tuple[int, OpenRow]] = []
        start = 0
        for size, group in groupby(everything, attrgetter("size")):
            mine = list(group)
            starts = range(start, start + size * len(mine), size)
            start += size * len(mine)
            load = {first: max(done[first : first + size]) for first in starts} if size > 1 else done
            for row, first in zip(mine, sorted(starts, key=load.__getitem__), strict=True):
                placed.append((first, row))
                done[first : first + size] = [load[first] + row.height] * size
        placed.sort()  # no two at one start
        result.append(tuple([Row(tuple(sorted(row.samples)), first, row.size) for first, row in placed]))
    return Plan(tuple(result), limits.num_ranks)
