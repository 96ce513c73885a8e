"""The order of one pipeline rank: one forward, one backward; interleaved where a rank holds several chunks. Pure.

Virtual stage v of pp * vpp is chunk v // pp of rank v % pp, as megatron-core counts. Without interleaving rank s runs
pp - 1 - s forwards ahead of its first backward, so it holds at most pp - s micro-steps, and their number need not be
known. Interleaved, it takes micro-steps in rounds of pp through all its chunks, 2 (pp - 1 - s) + (vpp - 1) pp ahead.
A short last round is a full one with moves left out: an order in which nobody waits for ever stays one. (A shorter
round in its own order does not: pp 4, vpp 3 and 5 micro-steps stop.) Interleaved ranks make all micro-steps of a call
first: making them is collective, and ranks stand too far apart to meet between rounds.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from longspan.engine.backend import MicroStep

__all__ = ["Move", "receives_ahead", "schedule"]


@dataclass(frozen=True, slots=True)
class Move:
    """One forward (step given) or backward (step None) of micro-step `number` through chunk `chunk`."""

    number: int
    chunk: int
    step: MicroStep | None


def receives_ahead(vpp: int) -> int:
    """How many moves before its own a receive is posted. Without interleaving none: a micro-step is made only when its turn
    comes, and 1F1B stops in no case."""
    return 1 if vpp > 1 else 0


def schedule(steps: Iterable[MicroStep], *, rank: int, pp: int, vpp: int, trains: bool) -> Iterator[Move]:
    """What a pipeline rank does, in order. Lazy in `steps` unless interleaved."""
    if vpp == 1:
        rounds = ([step] for step in steps)
        ahead = pp - 1 - rank
    else:
        rounds = _full_rounds(list(steps), pp)
        ahead = 2 * (pp - 1 - rank) + (vpp - 1) * pp
    due: deque[Move | None] = deque()
    number, started = 0, 0
    for taken in rounds:
        for chunk in reversed(range(vpp)):
            due.extend(None if step is None else Move(number + place, chunk, None) for place, step in enumerate(taken))
        for chunk in range(vpp):
            for place, step in enumerate(taken):
                if step is not None:
                    yield Move(number + place, chunk, step)
                started += 1
                if trains and started > ahead and (move := due.popleft()) is not None:
                    yield move
        number += len(taken)
    if trains:
        yield from (move for move in due if move is not None)


def _full_rounds(steps: Sequence[MicroStep], size: int) -> Iterator[list[MicroStep | None]]:
    """`size` micro-steps at a time, the last ones None where they run out."""
    for start in range(0, len(steps), size):
        taken = list(steps[start : start + size])
        yield [*taken, *[None] * (size - len(taken))]
