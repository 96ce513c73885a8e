"""An exact search over all plans of small batches judges the planner's heuristic."""

from functools import cache

import numpy as np
import pytest

from longspan.data.plan import Limits, lower_bound, makespan, padded_length
from longspan.data.planner import make_plan


def tilings(ranks: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Multisets of sizes that fit the ranks and are maximal: no further row fits."""
    result = []

    def extend(chosen: tuple[int, ...], left: int) -> None:
        allowed = [size for size in sizes if size <= left and (not chosen or size <= chosen[-1])]
        for size in allowed:
            extend((*chosen, size), left - size)
        if left < min(sizes):
            result.append(chosen)

    extend((), ranks)
    return result


def best_makespan(lengths: list[int], limits: Limits, cost) -> float:
    """Dynamic programme over subsets: a micro-step runs a subset on some tiling; the rest follows."""
    number = len(lengths)
    full = (1 << number) - 1
    members = [[i for i in range(number) if subset >> i & 1] for subset in range(full + 1)]
    height = {}
    for size in limits.all_sizes:
        for subset in range(full + 1):
            tokens = sum(padded_length(lengths[i], size, limits.index) for i in members[subset])
            fits = tokens <= limits.capacity(size)
            height[size, subset] = sum(cost(lengths[i], size) for i in members[subset]) if fits else float("inf")

    @cache
    def rows(subset: int, tiling: tuple[int, ...]) -> float:
        """Least height of the slowest row."""
        if not tiling:
            return 0.0 if subset == 0 else float("inf")
        best, part = float("inf"), subset
        while True:
            if height[tiling[0], part] < best:
                best = min(best, max(height[tiling[0], part], rows(subset & ~part, tiling[1:])))
            if part == 0:
                return best
            part = (part - 1) & subset

    choices = tilings(limits.num_ranks, limits.all_sizes)
    step = [0.0] + [min(rows(subset, tiling) for tiling in choices) for subset in range(1, full + 1)]

    @cache
    def total(subset: int) -> float:
        if subset == 0:
            return 0.0
        lowest = subset & -subset
        best, part = step[subset], subset
        while part := (part - 1) & subset:
            if part & lowest:
                best = min(best, step[part] + total(subset & ~part))
        return best

    return total(full)


def batches(count: int, samples: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    kinds = [
        lambda n: rng.integers(1, 60, n),
        lambda n: np.minimum(4 + rng.pareto(1.0, n) * 8, 110).astype(int),
        lambda n: np.where(rng.random(n) < 0.3, rng.integers(60, 120, n), rng.integers(1, 10, n)),
    ]
    return [kinds[k % 3](samples).tolist() for k in range(count)]


def slow_exchange(length: int, size: int) -> float:
    return length * (1 + length / 64) / size * (1 + 0.1 * (size > 1))


@pytest.mark.parametrize(
    ("limits", "samples", "mean", "worst"),
    [
        (Limits(4, 1, 32, sizes=(1, 2, 4)), 6, 1.015, 1.1),
        (Limits(4, 1, 32, "zigzag", sizes=(1, 2, 3, 4)), 5, 1.015, 1.1),
        (Limits(2, 1, 64, sizes=(1, 2)), 7, 1.02, 1.1),
        (Limits(2, 1, 128), 7, 1.015, 1.1),
    ],
)
def test_heuristic_against_the_exact_optimum(limits, samples, mean, worst):
    ratios = []
    for lengths in batches(24, samples):
        optimum = best_makespan(lengths, limits, slow_exchange)
        bound = lower_bound(lengths, limits, slow_exchange)
        ours = makespan(make_plan(lengths, limits, slow_exchange), lengths, slow_exchange)
        assert bound <= optimum * (1 + 1e-9) and optimum <= ours * (1 + 1e-9)
        ratios.append(ours / optimum)
    print(f"{limits}: mean {np.mean(ratios):.4f} worst {max(ratios):.4f}")
    assert np.mean(ratios) <= mean and max(ratios) <= worst


def test_the_judge_sees_a_bad_plan():
    """The control: one sample a micro-step is not optimal, and the exact search says so."""
    lengths = [10, 10, 10, 10]
    limits = Limits(4, 1, 32, sizes=(1, 2, 4))
    assert best_makespan(lengths, limits, slow_exchange) < sum(slow_exchange(length, 1) for length in lengths)
