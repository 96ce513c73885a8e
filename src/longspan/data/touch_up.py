"""Touches up the micro-steps of a schedule, in place; the makespan never grows.

`even_out` works within a micro-step: rows give up CP that does not shorten it; idle ranks take samples of crowded
rows, or widen the slowest row. `polish` works between micro-steps: the slowest row of one gives samples to rows of
others that have time and tokens to spare.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.data.plan import Limits

Weights = Sequence[Sequence[int]]  # [size number][sample] tokens
Times = Sequence[Sequence[float]]  # [size number][sample]


@dataclass(slots=True)
class OpenRow:
    """A row that may still change."""

    samples: list[int]
    size: int
    height: float  # its time


Steps = list[list[OpenRow]]
GAIN = 2e-3  # of a row's time: what a move between rows must bring
TOGETHER = 1024  # samples among which micro-steps exchange: twice as many take four times as long


def even_out(rows: list[OpenRow], weights: Weights, times: Times, limits: Limits) -> None:
    """Within one micro-step."""
    if len(limits.all_sizes) > 1:
        limit = max(row.height for row in rows)
        for row in rows:
            _narrow(row, limit, weights, times, limits)
    idle = limits.num_ranks - sum([row.size for row in rows])
    while idle > 0:
        used = _split(rows, idle, weights, times, limits) or _widen(rows, idle, weights, times, limits)
        if not used:
            return
        idle -= used


def _narrow(row: OpenRow, limit: float, weights: Weights, times: Times, limits: Limits) -> None:
    """The smallest size that holds the row and keeps it within the step."""
    for k, size in enumerate(limits.all_sizes):
        if size >= row.size:
            return
        if sum(weights[k][i] for i in row.samples) > limits.capacity(size):
            continue
        height = sum(times[k][i] for i in row.samples)
        if height <= limit:
            row.size, row.height = size, height
            return


def _split(rows: list[OpenRow], idle: int, weights: Weights, times: Times, limits: Limits) -> int:
    """The slowest row that can gives the smaller half of its time to a new row of the smallest size."""
    size, room = limits.all_sizes[0], limits.capacity(limits.all_sizes[0])
    if idle < size:
        return 0
    limit = max(row.height for row in rows)
    for row in sorted(rows, key=lambda row: (-row.height, row.samples)):
        if len(row.samples) < 2:
            continue
        k = limits.all_sizes.index(row.size)
        given: list[int] = []
        height, tokens, left = 0.0, 0, row.height
        for i in sorted(row.samples, key=lambda i: (times[0][i], i))[:-1]:
            rest = left - times[k][i]
            if tokens + weights[0][i] > room or height + times[0][i] > (limit if not given else rest):
                break
            given.append(i)
            height, tokens, left = height + times[0][i], tokens + weights[0][i], rest
        if given:
            away = set(given)
            row.samples = [i for i in row.samples if i not in away]
            row.height = sum(times[k][i] for i in row.samples)
            rows.append(OpenRow(given, size, height))
            return size
    return 0


def _widen(rows: list[OpenRow], idle: int, weights: Weights, times: Times, limits: Limits) -> int:
    """The slowest row takes idle ranks, if that makes the micro-step shorter."""
    row = max(rows, key=lambda row: row.height)
    others = max((other.height for other in rows if other is not row), default=0.0)
    if others >= row.height:
        return 0
    for k, size in enumerate(limits.all_sizes):
        if not row.size < size <= row.size + idle:
            continue
        height = sum(times[k][i] for i in row.samples)
        if height < row.height and sum(weights[k][i] for i in row.samples) <= limits.capacity(size):
            used = size - row.size
            row.size, row.height = size, height
            return used
    return 0


def polish(steps: Steps, weights: Weights, times: Times, limits: Limits) -> None:
    """Between micro-steps, until nothing moves (at most four rounds). Of many samples only about TOGETHER at a time exchange, so that
    the work grows with their number and not with its square."""
    shifts = _Shifts(weights, times, {size: k for k, size in enumerate(limits.all_sizes)}, limits)
    samples = sum(len(row.samples) for rows in steps for row in rows)
    groups = -(-samples // TOGETHER)
    for first in range(groups):
        _polish(steps[first::groups], shifts)  # every groups-th: tall and low micro-steps in each


def _polish(steps: Steps, shifts: "_Shifts") -> None:
    for _ in range(4):
        moved = False
        for rows in steps:
            lasts = [max([row.height for row in others]) for others in steps]
            spare = [
                (row, last)
                for others, last in zip(steps, lasts, strict=True)
                for row in others
                if others is not rows and row.height < last
            ]
            while shifts.relieve(rows, spare):
                moved = True
        if not moved:
            return


@dataclass(frozen=True, slots=True)
class _Shifts:
    """Moves and swaps of samples between rows."""

    weights: Weights
    times: Times
    positions: dict[int, int]  # CP size -> its number
    limits: Limits

    def relieve(self, rows: list[OpenRow], spare: list[tuple[OpenRow, float]]) -> bool:
        """Makes the slowest row shorter if it is the only slowest. spare: other rows, and when each must end."""
        row = max(rows, key=lambda row: row.height)
        most = row.height * (1 - GAIN)
        beside = [(other, most) for other in rows if other is not row]
        if any(other.height > most for other, _ in beside):
            return False
        offers = [(other, end, self.times[self.positions[other.size]]) for other, end in (*beside, *spare)]
        own = self.times[self.positions[row.size]]
        mine = [i for i in sorted(row.samples, key=lambda i: (-own[i], i)) if row.height - own[i] <= most]
        if len(row.samples) > 1:
            for i in mine:
                for other, end, theirs in offers:
                    if other.height + theirs[i] <= end and self._exchange(row, other, [i], []):
                        return True
        longest = [max([theirs[o] for o in other.samples]) for other, _, theirs in offers]
        for i in mine:
            left = row.height - own[i]
            for (other, end, theirs), most_taken in zip(offers, longest, strict=True):
                raised = other.height + theirs[i]
                if raised - most_taken > end:
                    continue
                for o in other.samples:
                    if raised - theirs[o] <= end and left + own[o] <= most and self._exchange(row, other, [i], [o]):
                        return True
        return False

    def _exchange(self, row: OpenRow, other: OpenRow, given: list[int], taken: list[int]) -> bool:
        """Unless a row would have too many tokens."""
        k, j = self.positions[row.size], self.positions[other.size]
        theirs = [i for i in other.samples if i not in taken] + given
        ours = [i for i in row.samples if i not in given] + taken
        if sum([self.weights[j][i] for i in theirs]) > self.limits.capacity(other.size):
            return False
        if sum([self.weights[k][i] for i in ours]) > self.limits.capacity(row.size):
            return False
        row.samples, row.height = ours, sum([self.times[k][i] for i in ours])
        other.samples, other.height = theirs, sum([self.times[j][i] for i in theirs])
        return True
