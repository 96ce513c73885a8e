"""Puts samples into bins of several widths: list scheduling with a token cap.

Samples come longest first; each goes to the bin where it would end earliest, among the widths allowed to it and the
bins with room (Graham's LPT rule, on machines of several speeds). A bin without room for a sample waits until the
samples have become small enough, so that the whole pass is O(n log bins) for each width.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Bins:
    """The open bins of one width."""

    size: int  # ranks
    capacity: int  # tokens
    contents: list[list[int]] = field(default_factory=list)
    heights: list[float] = field(default_factory=list)  # time so far
    rooms: list[int] = field(default_factory=list)  # tokens left
    ready: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (height, samples in it, bin)
    waiting: list[tuple[int, int]] = field(
        default_factory=list
    )  # heap of (-room, bin): no room for the sample that came last

    @staticmethod
    def empty(size: int, capacity: int, count: int) -> "Bins":
        bins = Bins(size=size, capacity=capacity)
        bins.contents = [[] for _ in range(count)]
        bins.heights = [0.0] * count
        bins.rooms = [capacity] * count
        bins.ready = [(0.0, 0, number) for number in range(count)]
        return bins

    def top(self, weight: int) -> tuple[float, int, int] | None:
        """The lowest bin with room for `weight` tokens; weights may not grow from call to call."""
        ready, waiting, rooms = self.ready, self.waiting, self.rooms
        while waiting and -waiting[0][0] >= weight:
            number = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (self.heights[number], len(self.contents[number]), number))
        while ready and rooms[ready[0][2]] < weight:
            number = heapq.heappop(ready)[2]
            heapq.heappush(waiting, (-rooms[number], number))
        return ready[0] if ready else None

    def put(self, sample: int, weight: int, time: float) -> None:
        """Adds a sample to the bin that `top` gave."""
        height, _, number = self.ready[0]
        inside = self.contents[number]
        inside.append(sample)
        self.heights[number] = height + time
        self.rooms[number] -= weight
        heapq.heapreplace(self.ready, (height + time, len(inside), number))


def fill(
    order: Sequence[int],
    bins: Sequence[Bins],
    *,
    weights: Sequence[Sequence[int]],
    times: Sequence[Sequence[float]],
    smallest: Sequence[int],
) -> int | None:
    """Fills the bins in place; weights[k][i], times[k][i]: tokens and time of sample i in bins[k]; smallest[i]: first
    k allowed to it.

    Gives None, or the number of the bins that ran out of room: the plan needs more of them.
    """
    if len(bins) == 1:
        return _fill_one(order, bins[0], weights=weights[0], times=times[0])
    last = len(bins)
    for sample in order:
        best, best_end = -1, float("inf")
        for k in range(smallest[sample], last):
            if not bins[k].contents:
                continue
            top = bins[k].top(weights[k][sample])
            if top is not None and top[0] + times[k][sample] < best_end:
                best, best_end = k, top[0] + times[k][sample]
        if best < 0:
            return smallest[sample]
        bins[best].put(sample, weights[best][sample], times[best][sample])
    return None


def _fill_one(order: Sequence[int], bins: Bins, *, weights: Sequence[int], times: Sequence[float]) -> int | None:
    """`fill` for one width, without the choice: 100,000 samples take about 0.2 s."""
    ready, rooms, heights, contents, waiting = bins.ready, bins.rooms, bins.heights, bins.contents, bins.waiting
    push, pop, replace = heapq.heappush, heapq.heappop, heapq.heapreplace
    for sample in order:
        weight = weights[sample]
        while waiting and -waiting[0][0] >= weight:
            number = pop(waiting)[1]
            push(ready, (heights[number], len(contents[number]), number))
        while ready and rooms[ready[0][2]] < weight:
            number = pop(ready)[2]
            push(waiting, (-rooms[number], number))
        if not ready:
            return 0
        height, _, number = ready[0]
        height += times[sample]
        heights[number] = height
        rooms[number] -= weight
        contents[number].append(sample)
        replace(ready, (height, len(contents[number]), number))
    return None


def first_fit(order: Sequence[int], weights: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing by tokens: few bins, whatever they cost. O(n log n) by a tree of the largest room below
    each node."""
    leaves = 1
    while leaves < len(order):
        leaves *= 2
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for sample in order:
        weight = weights[sample]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < weight:
                node += 1
        number = node - leaves
        if number == len(bins):
            bins.append([])
        bins[number].append(sample)
        room[node] -= weight
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            largest = left if left > right else right
            if room[node] == largest:
                break
            room[node] = largest
    return bins
