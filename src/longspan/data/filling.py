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
    """The open bins of one width. weights[p] and times[p]: tokens and time, in a bin of this width, of the sample that comes p-th:
    read in sequence they are twice as fast as by sample, whose numbers lie all over the memory."""

    capacity: int  # tokens
    weights: Sequence[int]
    times: Sequence[float]
    contents: list[list[int]]
    rooms: list[int]  # tokens left
    ready: list[tuple[float, int, int]]  # heap of (height, samples in it, bin); height: time so far
    # heap of (-room, bin, height, samples): no room for the sample that came last
    waiting: list[tuple[int, int, float, int]]

    @staticmethod
    def empty(count: int, capacity: int, *, weights: Sequence[int], times: Sequence[float]) -> "Bins":
        ready = [(0.0, 0, number) for number in range(count)]
        return Bins(capacity, weights, times, [[] for _ in ready], [capacity] * count, ready, [])

    def open(self) -> None:
        number = len(self.contents)
        self.contents.append([])
        self.rooms.append(self.capacity)
        heapq.heappush(self.ready, (0.0, 0, number))

    def settle(self, weight: int) -> None:
        """Makes ready[0] the lowest bin with room for `weight` tokens; weights may not grow from call to call."""
        ready, waiting, rooms = self.ready, self.waiting, self.rooms
        while waiting and -waiting[0][0] >= weight:
            _, number, height, inside = heapq.heappop(waiting)
            heapq.heappush(ready, (height, inside, number))
        while ready and rooms[ready[0][2]] < weight:
            height, inside, number = heapq.heappop(ready)
            heapq.heappush(waiting, (-rooms[number], number, height, inside))

    def heights(self) -> list[float]:
        """Time of each bin."""
        found = [0.0] * len(self.contents)
        for height, _, number in self.ready:
            found[number] = height
        for _, number, height, _ in self.waiting:
            found[number] = height
        return found


def fill(order: Sequence[int], bins: Sequence[Bins], smallest: list[int]) -> None:
    """Fills the bins in place; smallest[p]: the first of `bins` that may hold the sample that comes p-th."""
    first = smallest[0]
    if not any(kind.contents for kind in bins[first + 1 :]) and smallest.count(first) == len(smallest):
        _fill_one(order, bins[first])
        return
    kinds = [(kind.ready, kind.waiting, kind.rooms, kind.weights, kind.times) for kind in bins]
    last = len(kinds)
    for place, sample in enumerate(order):
        best, best_end = -1, float("inf")
        for k in range(smallest[place], last):
            ready, waiting, rooms, weights, times = kinds[k]
            if not ready and not waiting:
                continue
            weight = weights[place]
            if (waiting and -waiting[0][0] >= weight) or (ready and rooms[ready[0][2]] < weight):
                bins[k].settle(weight)
            if ready:
                end = ready[0][0] + times[place]
                if end < best_end:
                    best, best_end = k, end
        if best < 0:
            best = smallest[place]
            bins[best].open()
            best_end = bins[best].times[place]
        ready, _, rooms, weights, _ = kinds[best]
        _, inside, number = ready[0]
        bins[best].contents[number].append(sample)
        rooms[number] -= weights[place]
        heapq.heapreplace(ready, (best_end, inside + 1, number))


def _fill_one(order: Sequence[int], bins: Bins) -> None:
    """`fill` for one width, without the choice: 100,000 samples take about 0.1 s."""
    contents, rooms, ready, waiting, replace = bins.contents, bins.rooms, bins.ready, bins.waiting, heapq.heapreplace
    rest = iter(zip(order, bins.weights, bins.times, strict=True))
    for number, (sample, weight, time) in zip(range(len(contents)), rest, strict=False):  # one in each bin
        contents[number].append(sample)
        rooms[number] -= weight
        ready[number] = (time, 1, number)
    heapq.heapify(ready)
    for sample, weight, time in rest:
        if (waiting and -waiting[0][0] >= weight) or (ready and rooms[ready[0][2]] < weight):
            bins.settle(weight)
        if not ready:
            bins.open()
        height, inside, number = ready[0]
        contents[number].append(sample)
        rooms[number] -= weight
        replace(ready, (height + time, inside + 1, number))


def first_fit(order: Sequence[int], weights: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing by tokens, weights[p] of the sample that comes p-th: few bins, whatever they cost. O(n log n) by a tree of
    the largest rooms."""
    leaves = 1
    while leaves < len(order):
        leaves *= 2
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for sample, weight in zip(order, weights, strict=True):
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
