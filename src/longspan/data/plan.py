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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from longspan.errors import UserError

IndexKind = Literal["identity", "contiguous", "zigzag"]
Cost = Callable[[int, int], float]  # (tokens of a sample, CP size) -> time that each of the size ranks spends on it


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


def padded_length(length: int, size: int, index: IndexKind) -> int:
    """Tokens that one sample takes in its row, its own pads included (the row's tail pad is not)."""
    return -(-length // (2 * size)) * 2 * size if index == "zigzag" and size > 1 else length


def row_tokens(lengths: Sequence[int], size: int, index: IndexKind, *, multiple: int = 1) -> int:
    """Tokens a rank of a row with these samples, all pads included. A row without samples has the least a row can
    have."""
    unit = _unit(size, index, multiple)
    total = sum(padded_length(length, size, index) for length in lengths)
    return max(-(-total // unit), 1) * unit // size


def row_index(size: int, index: IndexKind) -> IndexKind:
    """The index kind that a row of this size really has: on one rank nothing is cut."""
    return "identity" if size == 1 else index


def step_times(plan: Plan, lengths: Sequence[int], cost: Cost) -> list[float]:
    """Time of each micro-step: that of its slowest row."""
    return [max(sum(cost(lengths[i], row.size) for i in row.samples) for row in rows) for rows in plan.micro_steps]


def makespan(plan: Plan, lengths: Sequence[int], cost: Cost, *, step_cost: float = 0.0) -> float:
    """Sum over micro-steps of the slowest rank; `step_cost` is the fixed time of a micro-step."""
    return math.fsum(step_times(plan, lengths, cost)) + step_cost * len(plan.micro_steps)


def lower_bound(lengths: Sequence[int], limits: Limits, cost: Cost) -> float:
    """No plan is faster than max(sum over samples of min over c of c * t(c) / ranks, max over samples of min over c of
    t(c))."""
    best_work: dict[int, float] = {}
    best_time: dict[int, float] = {}
    for length in set(lengths):
        times = {
            size: cost(length, size)
            for size in limits.all_sizes
            if padded_length(length, size, limits.index) <= limits.capacity(size)
        }
        best_work[length] = min((size * time for size, time in times.items()), default=math.inf)
        best_time[length] = min(times.values(), default=math.inf)
    return max(
        math.fsum(best_work[length] for length in lengths) / limits.num_ranks, max(best_time.values(), default=0.0)
    )


def default_cost(length: int, size: int) -> float:
    """Without a cost model: dense work plus attention that equals it at 32k tokens, 5 % for CP."""
    return length * (1.0 + length / 32768) / size * (1.0 if size == 1 else 1.05)


def _unit(size: int, index: IndexKind, multiple: int) -> int:
    """The padded length of a row is a multiple of this."""
    return size * (math.lcm(2, multiple) if index == "zigzag" and size > 1 else multiple)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
