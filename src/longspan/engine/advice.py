"""Layouts for a model, a machine and a list of lengths: every sensible one is planned under one cost model, the fastest wins.

Pure CPU and deterministic. A candidate is a context-parallel size (or dynamic CP), a mixer and a recomputation policy; the memory
model turns the GPU's memory into its token budget, and the planner gives its makespan. What does not fit is kept with the reason,
so that the advice can say what the others would cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longspan.data import Limits, Plan, lower_bound, make_plan, makespan, padded_length, row_tokens
from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.memory import MemoryModel
from longspan.data.shape import ModelShape
from longspan.errors import UserError
from longspan.layout import Layout

__all__ = ["Candidate", "Request", "advise", "bound_s", "cost_of", "memory_of"]

POLICIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("none", ()),
    ("selective", ()),
    ("full", ()),
)


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan for."""

    shape: ModelShape
    lengths: tuple[int, ...]  # tokens of each sample
    gpus: int
    memory_gib: float  # of one GPU
    machine: Machine
    recurrent: bool = False
    bytes_per_value: int = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the batch; plan is None where it cannot, and `reason` says why."""

    layout: Layout
    dynamic: bool
    recompute: str
    offload: tuple[str, ...]
    budget: int = 0  # tokens a rank a micro-step
    plan: Plan | None = None
    makespan_s: float = float("inf")
    peak_gib: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """Layout, policy and offload in one word each."""
        parts = [self.layout.name + ("-dynamic" if self.dynamic else ""), self.recompute, *self.offload]
        return " ".join(parts)


def advise(request: Request) -> list[Candidate]:
    """All candidates, the fastest first; those that cannot run come last.

    Raises UserError where nothing fits, with the smallest change that would.
    """
    found = [
        _evaluate(request, layout, dynamic=dynamic, recompute=recompute, offload=offload)
        for layout, dynamic in _layouts(request)
        for recompute, offload in POLICIES
    ]
    found.sort(key=lambda c: (c.makespan_s, c.layout.cp, len(c.offload), POLICIES.index((c.recompute, c.offload))))
    if found[0].plan is None:
        raise UserError(_smallest_change(request, found))
    return found


def bound_s(request: Request, candidate: Candidate) -> float:
    """No plan under this candidate's policy is faster, whatever the sizes."""
    cost = cost_of(request, candidate.layout, candidate.recompute)
    sizes = tuple(size for size in range(1, request.gpus + 1) if _deals(request, candidate.layout.mixer, size))
    limits = Limits(request.gpus, 1, max(candidate.budget, 2), candidate.layout.index, sizes)
    return lower_bound(request.lengths, limits, cost)


def _layouts(request: Request) -> list[tuple[Layout, bool]]:
    """Static CP of every divisor, with ulysses and ring where they run, and dynamic CP over all GPUs."""
    mixers = [
        ("ulysses", "contiguous"),
        ("gather" if request.recurrent else "ring", "contiguous" if request.recurrent else "zigzag"),
    ]
    found: list[tuple[Layout, bool]] = []
    for cp in range(1, request.gpus + 1):
        if request.gpus % cp == 0:
            for mixer, index in mixers[: 1 if cp == 1 else 2]:
                if _deals(request, mixer, cp):
                    found.append((Layout(dp=request.gpus // cp, cp=cp, mixer=mixer, index=index), False))
    if request.gpus > 1:
        found += [(Layout(dp=1, cp=request.gpus, mixer=mixer, index=index), True) for mixer, index in mixers]
    return found


def _deals(request: Request, mixer: str, size: int) -> bool:
    return mixer != "ulysses" or request.shape.heads % size == 0


def cost_of(request: Request, layout: Layout, recompute: str) -> CostModel:
    return CostModel(
        request.shape,
        request.machine,
        request.gpus,
        mixer=layout.mixer,
        index=layout.index,
        recompute=recompute,
        bytes_per_value=request.bytes_per_value,
    )


def memory_of(request: Request, recompute: str, offload: tuple[str, ...]) -> MemoryModel:
    return MemoryModel(request.shape, request.gpus, recompute, offload, bytes_per_value=request.bytes_per_value)


def _evaluate(
    request: Request, layout: Layout, *, dynamic: bool, recompute: str, offload: tuple[str, ...]
) -> Candidate:
    blank = Candidate(layout, dynamic, recompute, offload)
    memory = memory_of(request, recompute, offload)
    sizes = tuple(s for s in range(1, request.gpus + 1) if _deals(request, layout.mixer, s)) if dynamic else None
    cost = cost_of(request, layout, recompute)
    try:
        budget = min(memory.budget(request.memory_gib, size=layout.cp), _enough(request, layout))
        limits = Limits(request.gpus, layout.cp, budget, layout.index, sizes)
        plan = make_plan(request.lengths, limits, cost)
    except UserError as error:
        return replace(blank, reason=str(error))
    tokens, size = max(
        (row_tokens([request.lengths[i] for i in row.samples], row.size, layout.index), row.size)
        for rows in plan.micro_steps
        for row in rows
    )
    return replace(
        blank,
        budget=budget,
        plan=plan,
        makespan_s=makespan(plan, request.lengths, cost, step_cost=cost.step_s),
        peak_gib=memory.peak(tokens, size) / 2**30,
    )


def _enough(request: Request, layout: Layout) -> int:
    """Tokens a rank that hold the whole batch at once; a larger budget changes nothing."""
    padded = sum(padded_length(length, layout.cp, layout.index) for length in request.lengths)
    return -(-padded // 2) * 2 + 2 * layout.cp


def _smallest_change(request: Request, found: Sequence[Candidate]) -> str:
    """What to say when nothing fits: the memory a GPU, or the number of GPUs, that would."""
    longest = max(request.lengths)
    lean = memory_of(request, "full", ())
    need = lean.peak(-(-longest // request.gpus), request.gpus) / 2**30 + 1.0
    more = next(
        (
            gpus
            for gpus in (request.gpus * 2**k for k in range(1, 11))
            if MemoryModel(request.shape, gpus, "full").peak(-(-longest // gpus), gpus) / 2**30 + 1.0
            <= request.memory_gib
        ),
        None,
    )
    ways = [f"{need:.0f} GiB a GPU"] + ([f"{more} GPUs"] if more else [])
    return (
        f"no layout of {request.gpus} GPUs with {request.memory_gib:g} GiB each runs the longest sample ({longest} tokens). "
        f"The smallest change that would: {' or '.join(ways)} (recompute='full'). "
        f"The closest layout says: {found[0].reason}"
    )
