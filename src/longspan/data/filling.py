"""Puts samples into bins of several widths: list scheduling with a token cap.

Samples come longest first; each goes to the bin where it would end earliest, among the widths allowed to it and the
bins with room (Graham's LPT rule, on machines of several speeds). A bin without room for a sample waits until the
samples have become small enough, so that the whole pass is O(n log bins) for each width. Where no bin has room a new
one is opened, and the caller sees that it asked for too few.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Bins:
    """The open bins of one width. weights[i] and times[i]: tokens and time of sample i in a bin of this width."""

    capacity: int  # tokens
    weights: Sequence[int]
    times: Sequence[float]
    contents: list[list[int]]
    heights: list[float]  # time so far
    rooms: list[int]  # tokens left
    ready: list[tuple[float, int, int]]  # heap of (height, samples in it, bin)
    waiting: list[tuple[int, int]]  # heap of (-room, bin): no room for the sample that came last

    @staticmethod
    def empty(count: int, capacity: int, *, weights: Sequence[int], times: Sequence[float]) -> "Bins":
        ready = [(0.0, 0, number) for number in range(count)]
        return Bins(capacity, weights, times, [[] for _ in ready], [0.0] * count, [capacity] * count, ready, [])

    def open(self) -> None:
        number = len(self.contents)
        self.contents.append([])
        self.heights.append(0.0)
        self.rooms.append(self.capacity)
        heapq.heappush(self.ready, (0.0, 0, number))

    def settle(self, weight: int) -> None:
        """Makes ready[0] the lowest bin with room for `weight` tokens; weights may not grow from call to call."""
        ready, waiting, rooms = self.ready, self.waiting, self.rooms
        while waiting and -waiting[0][0] >= weight:
            number = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (self.heights[number], len(self.contents[number]), number))
        while ready and rooms[ready[0][2]] < weight:
            number = heapq.heappop(ready)[2]
            heapq.heappush(waiting, (-rooms[number], number))

    def put(self, sample: int) -> None:
        """Adds a sample to ready[0]."""
        height, _, number = self.ready[0]
        inside = self.contents[number]
        inside.append(sample)
        self.heights[number] = height = height + self.times[sample]
        self.rooms[number] -= self.weights[sample]
        heapq.heapreplace(self.ready, (height, len(inside), number))


def fill(order: Sequence[int], bins: Sequence[Bins], smallest: Sequence[int]) -> None:
    """Fills the bins in place; smallest[i]: the first of `bins` that may hold sample i."""
    last = len(bins)
    if last == 1:
        _fill_one(order, bins[0])
        return
    for sample in order:
        best, best_end = -1, float("inf")
        for k in range(smallest[sample], last):
            kind = bins[k]
            ready, waiting, weight = kind.ready, kind.waiting, kind.weights[sample]
            if not kind.contents:
                continue
            if (waiting and -waiting[0][0] >= weight) or (ready and kind.rooms[ready[0][2]] < weight):
                kind.settle(weight)
            if ready:
                end = ready[0][0] + kind.times[sample]
                if end < best_end:
                    best, best_end = k, end
        if best < 0:
            best = smallest[sample]
            bins[best].open()
        bins[best].put(sample)


def _fill_one(order: Sequence[int], bins: Bins) -> None:
    """`fill` for one width, without the choice: 100,000 samples take about 0.2 s."""
    weights, ready, rooms, waiting = bins.weights, bins.ready, bins.rooms, bins.waiting
    settle, put = bins.settle, bins.put
    for sample in order:
        weight = weights[sample]
        if (waiting and -waiting[0][0] >= weight) or (ready and rooms[ready[0][2]] < weight):
            settle(weight)
        if not ready:
            bins.open()
        put(sample)


def first_fit(order: Sequence[int], weights: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing by tokens: few bins, whatever they cost. O(n log n) by a tree of the largest rooms."""
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
