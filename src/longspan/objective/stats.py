"""Metrics of one call as tensors: weighted sums, maxima, fixed-bin histograms. Reduced over ranks once, read once.

Nothing here is a mean of means: a mean keeps the sum of weight * x and the sum of weights, over all tokens of all
micro-steps and ranks, and divides once in `reduce`. A histogram counts |x| in bins that are the same everywhere, so
its quantiles do not depend on how tokens were cut; they are exact to a bin's width (3.7 %). No host sync before
`reduce`. Every rank makes the same calls in the same order (an inert micro-step too, with weights 0).
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.objective.segments import RowGroup

__all__ = ["Stats"]

LOW, DECADES, PER_DECADE = -10, 13, 64  # bins of |x| from 1e-10 to 1e3, 64 a decade
BINS = DECADES * PER_DECADE + 2  # first: below; last: above
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


class Stats:
    """Accumulates over the micro-steps of one call on one rank; `reduce` gives the numbers of all ranks."""

    __slots__ = ("_device", "_histograms", "_maxima", "_means", "_sums")

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._sums: dict[str, Tensor] = {}  # name -> [] f64
        self._means: dict[str, Tensor] = {}  # name -> [2] f64: sum of weight * x, sum of weight
        self._maxima: dict[str, Tensor] = {}  # name -> [] f64
        self._histograms: dict[str, Tensor] = {}  # name -> [BINS] f64 counts

    def sum(self, name: str, value: Tensor) -> None:
        """Adds the sum of `value` (any shape): summed over calls, micro-steps and ranks."""
        _add(self._sums, name, value.detach().double().sum())

    def term(self, name: str, value: Tensor, coefficient: float) -> None:
        """Adds a term's weighted sum: loss/<name>, and coefficient times it to loss/total."""
        self.sum(f"loss/{name}", value)
        self.sum("loss/total", value.detach().double() * coefficient)

    def mean(self, name: str, value: Tensor, weight: Tensor) -> None:
        """Adds value [T] with weight [T]: reported as sum(weight * value) / sum(weight), 0 when nothing weighs."""
        weight = weight.detach().double()
        kept = torch.where(weight != 0, value.detach().double(), 0.0)
        _add(self._means, name, torch.stack([(weight * kept).sum(), weight.sum()]))

    def max(self, name: str, value: Tensor, mask: Tensor) -> None:
        """The largest value [T] where mask [T]; 0 when there is none (or none above 0 in sign: give magnitudes)."""
        kept = torch.where(mask > 0, value.detach().double(), -math.inf)
        largest = torch.cat([kept.reshape(-1), kept.new_full((1,), -math.inf)]).max()
        self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def histogram(self, name: str, value: Tensor, mask: Tensor) -> None:
        """Counts |value| [T] where mask [T]: reported as <name>_p50, _p99, _p99.9."""
        place = torch.floor((value.detach().double().abs().clamp(min=1e-300).log10() - LOW) * PER_DECADE) + 1
        place = torch.nan_to_num(place, nan=BINS - 1).clamp(0, BINS - 1).long()  # NaN counts as above the last bin
        counts = torch.zeros(BINS, dtype=torch.int64, device=value.device)  # integer adds: the order does not matter
        _add(self._histograms, name, counts.index_add_(0, place, (mask > 0).long()).double())

    def distribution(self, name: str, value: Tensor, mask: Tensor) -> None:
        """mean, max and quantiles of |value| over the masked tokens."""
        magnitude = value.detach().double().abs()
        self.mean(f"{name}_mean", magnitude, (mask > 0).double())
        self.max(f"{name}_max", magnitude, mask)
        self.histogram(name, magnitude, mask)

    def state(self) -> object:
        """Everything accumulated, for `adopt` on another rank."""
        return self._sums, self._means, self._maxima, self._histograms

    def adopt(self, states: Sequence[object]) -> None:
        """Take over what the stages of a pipeline accumulated, in place of what is here: sums add up, and only one stage has
        the others."""
        self._sums = {}
        for state in states:
            assert isinstance(state, tuple) and len(state) == 4
            for name, value in state[0].items():
                _add(self._sums, name, value)
            self._means |= state[1]
            self._maxima |= state[2]
            self._histograms |= state[3]

    def reduce(self, group: RowGroup | dist.ProcessGroup | None = None) -> dict[str, float]:
        """The numbers of all ranks of `group` (None: this rank alone), equal on each: two small collectives, one
        read."""
        added = [
            table[name].reshape(-1) for table in (self._sums, self._means, self._histograms) for name in sorted(table)
        ]
        sums = torch.cat([*added, torch.zeros(1, dtype=torch.float64, device=self._device)])
        maxima = torch.stack([*(self._maxima[name] for name in sorted(self._maxima)), sums.new_full((), -math.inf)])
        handle = group if group is None or isinstance(group, dist.ProcessGroup) else group.group
        if handle is not None and dist.get_world_size(handle) > 1:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=handle)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=handle)
        numbers = iter(torch.cat([sums[:-1], maxima[:-1]]).tolist())
        report = {name: next(numbers) for name in sorted(self._sums)}
        for name in sorted(self._means):
            total, weight = next(numbers), next(numbers)
            report[name] = total / weight if weight != 0 else 0.0
        for name in sorted(self._histograms):
            counts = [next(numbers) for _ in range(BINS)]
            report |= {f"{name}_{label}": _quantile(counts, share) for label, share in QUANTILES.items()}
        largest = {name: next(numbers) for name in sorted(self._maxima)}
        return report | {name: value if value != -math.inf else 0.0 for name, value in largest.items()}


def _add(table: dict[str, Tensor], name: str, value: Tensor) -> None:
    table[name] = table[name] + value if name in table else value


def _quantile(counts: Iterable[float], share: float) -> float:
    """The value below which `share` of the counts lie, log-linear inside its bin; below the first bin 0."""
    counts = list(counts)
    wanted, seen = share * sum(counts), 0.0
    for place, count in enumerate(counts):
        if count and seen + count >= wanted:
            if place == 0:
                return 0.0
            inside = (wanted - seen) / count if place < BINS - 1 else 0.0
            return 10.0 ** (LOW + (place - 1 + inside) / PER_DECADE)
        seen += count
    return 0.0
