"""What a plan is: which samples run together, in which micro-step, on which ranks, at which CP size.

A Plan is data, the same object on every rank (law `plan_is_global`). The rows of a micro-step tile the ranks
0..num_ranks-1 in order; a row of `size` ranks holds the tokens of its samples, padded by the rule of its index kind,
cut into `size` equal parts:

    identity    (size 1)  no pad
    contiguous            pad at the end of the row to a multiple of size
    zigzag                each sample is padded to a multiple of 2 * size

and, in addition, `multiple` tokens a rank (sequence parallelism, length buckets) at the end of the row. This is the
only file that knows these rules: a padded length is decided once. Costs are floats in any unit; +, * and / only, so
ranks agree bit for bit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from longspan.errors import UserError

IndexKind = Literal["identity", "contiguous", "zigzag"]
Count = TypeVar("Count", int, np.ndarray)
Cost = Callable[[int, int], float]  # (tokens of a sample, CP size) -> time that each of the size ranks spends on it


@runtime_checkable
class Timed(Protocol):
    """A Cost that also takes many samples at once: 100,000 one by one are 3 s."""

    def times(self, lengths: np.ndarray, size: int) -> np.ndarray:
        """[n] f64 of lengths [n] f64."""
        ...


class Packed(Protocol):
    """Samples that one group of ranks runs together."""

    @property
    def samples(self) -> Sequence[int]: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Row:
    """Samples packed together on data ranks start..start+size-1. No samples: an inert row."""

    samples: tuple[int, ...]  # numbers in the batch
    start: int
    size: int  # CP size


@dataclass(frozen=True, slots=True)
class Plan:
    """Micro-steps in order of time; the rows of each tile the ranks."""

    micro_steps: tuple[tuple[Row, ...], ...]
    num_ranks: int

    def __post_init__(self) -> None:
        for rows in self.micro_steps:
            ends = [0, *(row.start + row.size for row in rows)]
            assert [row.start for row in rows] == ends[:-1] and ends[-1] == self.num_ranks, f"rows do not tile: {rows}"

    def row(self, micro_step: int, rank: int) -> Row:
        """The row that a data rank runs in a micro-step."""
        return next(row for row in self.micro_steps[micro_step] if row.start <= rank < row.start + row.size)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep to."""

    num_ranks: int  # data ranks, dp * cp
    cp: int  # CP size of every row, unless `sizes` is given
    budget: int  # tokens of a rank in one micro-step, pads included; a hard bound
    index: IndexKind = "contiguous"
    sizes: tuple[int, ...] | None = None  # dynamic CP: the sizes that model and mixer can run; 1 among them
    multiple: int = 1  # tokens of a rank in one micro-step are a multiple of this

    def __post_init__(self) -> None:
        if min(self.num_ranks, self.cp, self.budget, self.multiple) < 1:
            raise UserError(
                f"plan limits must be at least 1: num_ranks={self.num_ranks}, cp={self.cp}, "
                f"budget={self.budget} tokens a rank, multiple={self.multiple}."
            )
        if self.index not in ("identity", "contiguous", "zigzag"):
            raise UserError(f"index={self.index!r} is unknown. Use 'identity', 'contiguous' or 'zigzag'.")
        if self.sizes is None and self.num_ranks % self.cp:
            raise UserError(
                f"cp={self.cp} does not divide {self.num_ranks} data ranks. Use a cp in {_divisors(self.num_ranks)}."
            )
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(sorted({size for size in self.sizes if size <= self.num_ranks})))
            if 1 not in self.sizes or min(self.sizes) < 1:
                raise UserError(
                    f"dynamic CP sizes {self.sizes} must contain 1, and no size below it. Add 1: every model runs on "
                    "one rank."
                )
        if self.index == "identity" and max(self.all_sizes) > 1:
            raise UserError(
                f"index='identity' does not cut a row, got CP sizes {self.all_sizes}. Use 'contiguous' or 'zigzag'."
            )
        if self.capacity(1) < 1 or self.capacity(max(self.all_sizes)) < 1:
            unit = self.multiple * 2 // math.gcd(2, self.multiple)
            raise UserError(
                f"budget={self.budget} tokens a rank holds no token at index={self.index!r}, multiple={self.multiple}. "
                f"Use a budget of at least {unit}."
            )

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """CP sizes that rows may have."""
        return (self.cp,) if self.sizes is None else self.sizes

    def capacity(self, size: int) -> int:
        """Most tokens that the padded samples of a row of `size` ranks may sum to."""
        unit = _unit(size, self.index, self.multiple)
        return self.budget * size // unit * unit


def padded_length(length: Count, size: int, index: IndexKind) -> Count:
    """Tokens that one sample (an array: each) takes in its row, its own pads included (the row's tail pad is not)."""
    return -(-length // (2 * size)) * 2 * size if index == "zigzag" and size > 1 else length


def row_tokens(lengths: Sequence[int], size: int, index: IndexKind, *, multiple: int = 1) -> int:
    """Tokens a rank of a row with these samples, all pads included. A row without samples has the least a row can
    have."""
    unit = _unit(size, index, multiple)
    total = sum(lengths if index != "zigzag" else [padded_length(length, size, index) for length in lengths])
    return max(-(-total // unit), 1) * unit // size


def row_index(size: int, index: IndexKind) -> IndexKind:
    """The index kind that a row of this size really has: on one rank nothing is cut."""
    return "identity" if size == 1 else index


def sample_times(lengths: np.ndarray, size: int, cost: Cost) -> np.ndarray:
    """[n] f64, time of each sample at one CP size; lengths [n] i64."""
    if isinstance(cost, Timed):
        return cost.times(lengths.astype(np.float64), size)
    distinct, places = np.unique(lengths, return_inverse=True)
    return np.array([float(cost(length, size)) for length in distinct.tolist()])[places]


def row_times(rows: Sequence[Packed], lengths: Sequence[int], cost: Cost) -> np.ndarray:
    """[rows] f64, summed in the order of a row's samples."""
    samples, owner = _flat(rows)
    tokens, sizes = np.asarray(lengths, np.int64)[samples], np.array([row.size for row in rows])[owner]
    times = np.zeros(len(samples))
    for size in np.unique(sizes).tolist():
        mine = sizes == size
        times[mine] = sample_times(tokens[mine], size, cost)
    return np.bincount(owner, times, len(rows))


def fullest_row(
    steps: Iterable[Sequence[Packed]], lengths: Sequence[int], index: IndexKind, *, multiple: int = 1
) -> tuple[int, int]:
    """(tokens a rank, CP size) of the row with most tokens a rank of these micro-steps, pads included."""
    rows = [row for rows in steps for row in rows]
    samples, owner = _flat(rows)
    sizes, taken = np.array([row.size for row in rows]), np.asarray(lengths, np.int64)[samples]
    found: list[tuple[int, int]] = []
    for size in np.unique(sizes).tolist():
        totals, mine = np.zeros(len(rows), np.int64), sizes[owner] == size
        np.add.at(totals, owner[mine], padded_length(taken[mine], size, index))
        found.append((row_tokens([int(totals.max())], size, index, multiple=multiple), size))
    return max(found)


def _flat(rows: Sequence[Packed]) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all rows, one after the other, and the number of the row that each is in; both i64."""
    owner = np.repeat(np.arange(len(rows)), [len(row.samples) for row in rows])
    return np.fromiter(chain.from_iterable(row.samples for row in rows), np.int64, len(owner)), owner


def step_times(plan: Plan, lengths: Sequence[int], cost: Cost) -> list[float]:
    """Time of each micro-step: that of its slowest row."""
    times = row_times([row for rows in plan.micro_steps for row in rows], lengths, cost)
    ends = np.cumsum([len(rows) for rows in plan.micro_steps])
    return np.maximum.reduceat(times, [0, *ends[:-1]]).tolist()


def makespan(plan: Plan, lengths: Sequence[int], cost: Cost, *, step_cost: float = 0.0) -> float:
    """Sum over micro-steps of the slowest rank; `step_cost` is the fixed time of a micro-step."""
    return math.fsum(step_times(plan, lengths, cost)) + step_cost * len(plan.micro_steps)


def lower_bound(lengths: Sequence[int], limits: Limits, cost: Cost) -> float:
    """No plan is faster than max(sum over samples of min over c of c * t(c) / ranks, max over samples of min over c of
    t(c))."""
    distinct, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    fits = [padded_length(distinct, size, limits.index) <= limits.capacity(size) for size in limits.all_sizes]
    times = np.stack([sample_times(distinct, size, cost) for size in limits.all_sizes])
    times = np.where(np.stack(fits), times, np.inf)
    works = (times * np.array(limits.all_sizes)[:, None]).min(axis=0) * counts
    return max(math.fsum(works.tolist()) / limits.num_ranks, float(times.min(axis=0).max(initial=0.0)))


def default_cost(length: int, size: int) -> float:
    """Without a cost model: dense work plus attention that equals it at 32k tokens, 5 % for CP."""
    return length * (1.0 + length / 32768) / size * (1.0 if size == 1 else 1.05)


def _unit(size: int, index: IndexKind, multiple: int) -> int:
    """The padded length of a row is a multiple of this."""
    return size * (math.lcm(2, multiple) if index == "zigzag" and size > 1 else multiple)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
