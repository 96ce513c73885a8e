"""Layouts for a model, a machine and a list of lengths: every sensible one is planned under one cost model, the fastest wins.

Pure CPU and deterministic. A candidate is a backend, a layout (or dynamic CP), a mixer and a recomputation policy; the memory
model turns the GPU's memory into its token budget, and the planner gives its makespan: of backend="megatron" the plan played out
over stages, and the traffic of one optimizer step, which FSDP has in its micro-steps. What does not fit is kept with the reason,
so that the advice can say what the others would cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from longspan.data import Limits, Plan, fullest_row, lower_bound, makespan, padded_length, row_tokens
from longspan.data.cost import CostModel, Recompute
from longspan.data.machine import Machine
from longspan.data.memory import MemoryModel
from longspan.data.planner import Draft, few_sizes, make_draft
from longspan.data.shape import ModelShape
from longspan.data.stage_memory import EVERYTHING, StageMemory, Trained
from longspan.data.stages import WHOLE, own_weights
from longspan.data.travel import Travel
from longspan.engine.cuts import check_cut, cut_layouts
from longspan.engine.mixer_choice import MixerChoice, choose_mixer
from longspan.engine.pipelines import Played, cut_of, in_flight, plan_stages, slowest_stage
from longspan.errors import UserError
from longspan.layout import Layout, resolve

__all__ = ["MOST_GPUS", "Candidate", "Request", "advise", "bound_s", "cost_of", "explain", "memory_of", "mixer_for"]

LEVEL = 1.005  # makespans this close are equal: less context parallelism wins, and a fixed layout over dynamic CP
MOST_GPUS = 2**16  # that are planned for
MOST_GIB = 2**14  # of a GPU that anyone could be advised to get

EAGER = (  # benchmarks/results/megatron_gpu.json
    "seconds are those of compiled layers: backend='megatron' runs eager, 1.25 (one long row) to 1.5 times (short rows) as long on H200s, as "
    "fsdp without compile=True does"
)

Policy = tuple[Recompute, tuple[str, ...]]  # recompute and offload of EngineConfig
POLICIES: tuple[Policy, ...] = (("none", ()), ("selective", ()), ("full", ()))
OFFLOADING: tuple[Policy, ...] = (  # tried where nothing fits the GPUs
    ("selective", ("checkpoints",)),
    ("full", ("checkpoints",)),
    ("full", ("checkpoints", "optimizer")),
    ("full", ("checkpoints", "parameters")),
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
    windowed: bool = False
    trained_share: float = 1.0  # tokens with mask 1, of all
    visual_share: float = 0.0  # visual tokens, of all
    compile: bool = False
    bytes_per_value: int = 2
    backend: Literal["fsdp", "megatron", "any"] = "fsdp"
    left_out: str = ""  # why megatron's layouts are not searched, where "any" asked for them
    layouts: tuple[Layout, ...] = ()  # only these; tp and pp go to megatron
    recompute: Recompute | None = None  # only this policy
    most_tokens: int | None = None  # a token budget below what memory allows
    trained: Trained = EVERYTHING


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the batch; where it cannot, `reason` says why. Its plan is `placed`."""

    layout: Layout
    dynamic: bool
    recompute: Recompute
    offload: tuple[str, ...] = ()
    backend: Literal["fsdp", "megatron"] = "fsdp"
    budget: int = 0  # tokens a rank a micro-step
    room: int = 0  # tokens a rank that the memory holds; `budget` is no more than the batch needs
    plan: Plan | Draft | None = None
    micro_steps: int = 0
    makespan_s: float = float("inf")
    peak_gib: float = 0.0
    peak_row: tuple[int, int] = (0, 1)  # tokens a rank and CP size of the fullest row
    played: Played | None = None  # megatron: the plan on the clock
    reason: str = ""

    @property
    def name(self) -> str:
        """Layout, policy and offload in one word each."""
        parts = [self.layout.name + ("-dynamic" if self.dynamic else ""), self.recompute, *self.offload]
        return " ".join([*parts, *(["megatron"] if self.backend == "megatron" else [])])

    @property
    def placed(self) -> Plan:
        assert self.plan is not None, "advise raises where nothing fits"
        return self.plan.place() if isinstance(self.plan, Draft) else self.plan

    @property
    def data_ranks(self) -> int:
        return self.layout.dp * self.layout.cp


def advise(request: Request) -> list[Candidate]:
    """All candidates, the fastest first (of equals the simplest); those that cannot run come last.

    Raises UserError where nothing fits, with the smallest change that would.
    """
    policies = [policy for policy in POLICIES if request.recompute in (None, policy[0])]
    found = _evaluated(request, policies)
    if found[0].plan is None and request.recompute is None:
        found = sorted([*_evaluated(request, OFFLOADING), *found], key=_order)
    if found[0].plan is None:
        raise UserError(". ".join(filter(None, (_refusal(request, found), request.left_out))))
    level = [c for c in found if c.makespan_s <= LEVEL * found[0].makespan_s]
    simplest = min(level, key=lambda c: (c.layout.cp, c.dynamic, c.makespan_s))
    return [_exact(request, simplest), *(c for c in found if c is not simplest)]


def _exact(request: Request, candidate: Candidate) -> Candidate:
    """With its rows on ranks."""
    plan = candidate.placed
    if plan is candidate.plan:
        return candidate
    cost = cost_of(request, candidate)
    return replace(candidate, plan=plan, makespan_s=makespan(plan, request.lengths, cost, step_cost=cost.step_s))


def _evaluated(request: Request, policies: Sequence[Policy]) -> list[Candidate]:
    """Every layout under every policy, the fastest first."""
    found = [
        _evaluate(request, replace(blank, recompute=recompute, offload=offload))
        for blank in _blanks(request)
        for recompute, offload in policies
        if blank.backend == "fsdp" or not offload
    ]
    return sorted(found, key=_order)


def _blanks(request: Request) -> list[Candidate]:
    """Layouts to evaluate, each with the backend that runs it."""
    if request.layouts:
        cut = [layout.tp * layout.pp > 1 or request.backend == "megatron" for layout in request.layouts]
        found = [
            Candidate(layout, False, "selective", backend="megatron" if stages else "fsdp")
            for layout, stages in zip(request.layouts, cut, strict=True)
        ]
        again = [replace(c, backend="megatron") for c in found if request.backend == "any" and c.backend == "fsdp"]
        return [*found, *again]
    found = []
    if request.backend != "megatron":
        found += [Candidate(layout, dynamic, "selective") for layout, dynamic in _layouts(request)]
    if request.backend != "fsdp":
        found += [
            Candidate(mixer_for(request, layout).layout, False, "selective", backend="megatron")
            for layout in cut_layouts(request.shape, request.gpus, request.machine.node_ranks)
        ]
    return found


def _order(candidate: Candidate) -> tuple[float, int, int, int]:
    policies = [*POLICIES, *OFFLOADING]
    number = policies.index((candidate.recompute, candidate.offload))
    return candidate.makespan_s, candidate.layout.cp, len(candidate.offload), number


def bound_s(request: Request, candidate: Candidate) -> float:
    """No plan under this candidate's policy is faster, whatever the sizes."""
    cost = slowest_stage(cost_of(request, candidate), request.lengths, candidate.layout.cp)
    sizes = _sizes(request, candidate.layout)
    limits = Limits(candidate.data_ranks, 1, max(candidate.budget, 2), candidate.layout.index, sizes)
    return lower_bound(request.lengths, limits, cost)


def _layouts(request: Request) -> list[tuple[Layout, bool]]:
    """Static CP of every divisor with its cheapest mixer, and dynamic CP over all GPUs with each of these mixers."""
    found = [
        (mixer_for(request, Layout(dp=request.gpus // cp, cp=cp)).layout, False)
        for cp in range(1, request.gpus + 1)
        if request.gpus % cp == 0
    ]
    kinds = {(layout.mixer, layout.index): layout for layout, _ in found if layout.cp > 1 and layout.mixer != "hybrid"}
    found += [(replace(layout, dp=1, cp=request.gpus), True) for layout in kinds.values()]
    return found


def mixer_for(request: Request, layout: Layout) -> MixerChoice:
    """The layout with its cheapest mixer for the longest sample, as the engine's mixer="auto" has it, and why."""
    if layout.cp == 1:
        return MixerChoice(replace(layout, mixer="ulysses", index="contiguous"))
    backend = "megatron" if layout.tp * layout.pp > 1 else "fsdp"
    return choose_mixer(
        layout,
        lambda each: cost_of(request, Candidate(each, False, "selective", backend=backend)),
        size=layout.cp,
        heads=request.shape.heads // layout.tp,
        recurrent=request.recurrent,
        windowed=request.windowed,
        tokens=-(-max(request.lengths) // layout.cp),
    )


def _sizes(request: Request, layout: Layout) -> tuple[int, ...]:
    """CP sizes that dynamic CP may use."""
    deals, heads = layout.mixer != "ulysses", request.shape.heads // layout.tp
    return tuple(size for size in range(1, layout.dp * layout.cp + 1) if deals or heads % size == 0)


def explain(request: Request, found: Sequence[Candidate]) -> list[str]:
    """Why the first candidate and not another: one sentence a choice that was open."""
    best = found[0]
    said = [_why_size(request, best)]
    said += [request.left_out] if request.left_out else []
    said += [EAGER] if any(c.backend == "megatron" and c.plan for c in found) else []
    if best.layout.cp > 1:
        why = mixer_for(request, replace(best.layout, mixer="auto", index="auto", ulysses=None)).why
        said += [why] if why.startswith(f"mixer {best.layout.mixer}") else []
    for name, same in (
        ("dynamic CP", lambda c: c.dynamic == best.dynamic),
        ("how weights are cut", lambda c: _weights_of(c) == _weights_of(best)),
        ("the CP size", lambda c: c.dynamic != best.dynamic or c.layout.cp == best.layout.cp),
        ("recomputation", lambda c: c.recompute == best.recompute),
    ):
        others = [c for c in found[1:] if not same(c)]
        if others:
            other = min(others, key=lambda c: c.makespan_s)
            costs = (
                f"{other.makespan_s / best.makespan_s:.2f} times"
                if other.plan
                else f"cannot run: {other.reason.partition(':')[0]}"
            )
            said.append(f"another choice of {name}: {other.name} at best, {costs}")
    return said


def _weights_of(candidate: Candidate) -> tuple[str, int, int]:
    return candidate.backend, candidate.layout.tp, candidate.layout.pp


def _why_size(request: Request, best: Candidate) -> str:
    """What the longest and the middle sample cost at each CP size, in GPU-seconds against the cheapest."""
    cost, index = cost_of(request, best), best.layout.index
    ordered, parts = sorted(request.lengths), []
    for length in dict.fromkeys((ordered[-1], ordered[len(ordered) // 2])):
        sizes = few_sizes(_sizes(request, best.layout))
        fitting = [size for size in sizes if row_tokens([length], size, index) <= best.room]
        work = {size: size * cost(length, size) for size in fitting}
        least = min(work.values())
        shown = [f"cp={size} {each / least:.2f}" for size, each in list(work.items())[:5]]
        small = [f"needs cp={fitting[0]}"] if fitting[0] > 1 else []
        parts.append(f"{length:,} tokens: {', '.join(small + shown)}")
    return "GPU time of a sample by CP size, against the least: " + "; ".join(parts)


def cost_of(request: Request, candidate: Candidate) -> CostModel:
    layout = candidate.layout
    return CostModel(
        request.shape,
        request.machine,
        candidate.data_ranks,
        mixer=layout.mixer,
        index=layout.index,
        linear="heads" if layout.linear == "heads" else "state",
        ulysses=layout.ulysses,
        recompute=candidate.recompute,
        trained_share=request.trained_share,
        visual_share=request.visual_share,
        ep=layout.ep,
        offload=candidate.offload,
        bytes_per_value=request.bytes_per_value,
        sharded=candidate.backend == "fsdp",
        cut=cut_of(layout),
    )


def memory_of(request: Request, candidate: Candidate) -> MemoryModel | StageMemory:
    layout, trained = candidate.layout, request.trained
    if candidate.backend == "megatron":
        return StageMemory(
            request.shape,
            cut_of(layout),
            candidate.data_ranks,
            in_flight(layout.pp, layout.vpp),
            candidate.recompute,
            bytes_per_value=request.bytes_per_value,
            trained=trained,
            visual_share=request.visual_share,
            ep=layout.ep,
            travel=_travel(request, candidate),
        )
    return MemoryModel(
        request.shape,
        request.gpus,
        candidate.recompute,
        candidate.offload,
        bytes_per_value=request.bytes_per_value,
        trainable_share=trained.of(own_weights(request.shape, WHOLE, 0)).total / request.shape.weights,
        head_trained=trained.embeddings,
        visual_share=request.visual_share,
        compile=request.compile,
        ep=layout.ep,
        travel=_travel(request, candidate),
    )


def _travel(request: Request, candidate: Candidate) -> Travel:
    """As the engine will have it: over symmetric memory where all data ranks of each stage are on one host, not of each row alone
    (engine/steps.py makes one transport for all groups)."""
    layout, host = candidate.layout, request.machine.node_ranks
    assert layout.mixer != "auto", "resolve the layout first"
    stage = layout.dp * layout.cp * layout.tp  # consecutive ranks
    near = all(first // host == (first + stage - 1) // host for first in range(0, layout.ranks, stage))
    sizes = few_sizes(_sizes(request, layout)) if candidate.dynamic else ()
    return Travel(layout.mixer, near, layout.ulysses or 1, sizes)


def _evaluate(request: Request, blank: Candidate) -> Candidate:
    try:
        candidate = replace(blank, layout=_resolved(request, blank))
        layout, memory, cost = candidate.layout, memory_of(request, candidate), cost_of(request, candidate)
        room = memory.budget(request.memory_gib, size=layout.cp)
        budget = min(room, _enough(request, layout), request.most_tokens or room)
        sizes = _sizes(request, layout) if candidate.dynamic else None
        limits = Limits(candidate.data_ranks, layout.cp, budget, layout.index, sizes)
        if cost.sharded:
            plan, played = make_draft(request.lengths, limits, cost), None
            steps, makespan_s = plan.steps, plan.makespan
        else:
            plan, played = plan_stages(request.lengths, limits, cost, layout, media=request.visual_share > 0)
            steps, makespan_s = plan.micro_steps, played.makespan_s + cost.update_s
    except UserError as error:
        return replace(blank, reason=str(error))
    fullest = fullest_row(steps, request.lengths, layout.index)
    return replace(
        candidate,
        budget=budget,
        room=room,
        plan=plan,
        micro_steps=len(steps),
        makespan_s=makespan_s,
        peak_gib=memory.peak(*fullest) / 2**30,
        peak_row=fullest,
        played=played,
    )


def _resolved(request: Request, blank: Candidate) -> Layout:
    """The layout without "auto"; UserError for what the model or the backend cannot do."""
    layout, shape = blank.layout, request.shape
    if layout.ranks != request.gpus:
        raise UserError(f"layout {layout.name} needs {layout.equation} GPUs, and there are {request.gpus}")
    if blank.backend == "megatron":
        check_cut(shape, layout)
    else:
        _check_spread(shape, layout)
    if not request.layouts:
        return layout
    found = resolve(
        mixer_for(request, layout).layout if layout.mixer == "auto" else layout,
        heads=shape.heads // layout.tp,
        kv_heads=shape.kv_heads // layout.tp,
        recurrent=request.recurrent,
        windowed=request.windowed,
    )
    return found if request.recurrent else replace(found, linear="auto")  # no layer that it would say anything of


def _check_spread(shape: ModelShape, layout: Layout) -> None:
    """Raises UserError for experts that backend='fsdp' cannot spread so."""
    if max(layout.ep, layout.etp) > 1 and not shape.experts:
        raise UserError(f"ep={layout.ep}, etp={layout.etp} spread experts, and the model has no experts. Set both to 1")
    if layout.etp > 1:
        raise UserError(f"etp={layout.etp} needs backend='megatron'; the fsdp backend keeps an expert whole")
    if shape.experts and shape.experts % layout.ep:
        raise UserError(f"ep={layout.ep} must divide the model's {shape.experts} experts")


def _enough(request: Request, layout: Layout) -> int:
    """Tokens a rank that hold the whole batch at once; a larger budget changes nothing."""
    padded = int(padded_length(np.array(request.lengths), layout.cp, layout.index).sum())
    return -(-padded // 2) * 2 + 2 * layout.cp


def _refusal(request: Request, found: Sequence[Candidate]) -> str:
    """What to say when nothing can run."""
    longest, least = max(request.lengths), _least_budget(request, found)
    if least is not None and request.most_tokens is not None and least > request.most_tokens:
        return (
            f"max_tokens_per_rank={request.most_tokens} holds no row with the longest sample ({longest} tokens), whatever the layout here. "
            f"The memory holds it: from max_tokens_per_rank={least} on a layout runs; or leave it out"
        )
    if request.layouts or request.backend == "megatron":
        said = [_refused(policies) for policies in _by_layout(found)]
        return f"no layout can run on {request.gpus} GPUs of {request.memory_gib:g} GiB. " + "; ".join(said[:6])
    return _smallest_change(request, found)


def _by_layout(found: Sequence[Candidate]) -> list[list[Candidate]]:
    """The policies of each layout, the leanest last, as they come."""
    layouts: dict[tuple[str, bool, str], list[Candidate]] = {}
    for c in found:
        layouts.setdefault((c.layout.name, c.dynamic, c.backend), []).append(c)
    return list(layouts.values())


def _refused(policies: Sequence[Candidate]) -> str:
    """One line of a layout: what all policies say, or the leanest one."""
    leanest = policies[-1]
    alike = all(c.reason == leanest.reason for c in policies)
    return f"{leanest.layout.name if alike else leanest.name}: {leanest.reason.rstrip('.')}"


def _least_budget(request: Request, found: Sequence[Candidate]) -> int | None:
    """Tokens a rank from which on a layout runs the longest sample, were there no most_tokens; None where none does."""
    if request.most_tokens is None:
        return None
    free = replace(request, most_tokens=None, lengths=(max(request.lengths),))
    policies: list[Policy] = [*dict.fromkeys((c.recompute, c.offload) for c in found)]
    return min((c.peak_row[0] for c in _evaluated(free, policies) if c.plan is not None), default=None)


def _smallest_change(request: Request, found: Sequence[Candidate]) -> str:
    """What to say when nothing fits: the memory of a GPU, and the number of GPUs, from which on a layout runs."""
    longest = replace(request, lengths=(max(request.lengths),))
    low, high = math.ceil(request.memory_gib), math.ceil(request.memory_gib)
    while high < MOST_GIB and not _runs(replace(longest, memory_gib=high)):
        low, high = high, 2 * high
    while high < MOST_GIB and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _runs(replace(longest, memory_gib=middle)) else (middle, high)
    sizes = (n for n in (request.gpus * 2**k for k in range(1, 11)) if n <= MOST_GPUS)
    more = next((n for n in sizes if _runs(replace(longest, gpus=n))), None)
    ways = ([f"{high} GiB a GPU"] if high < MOST_GIB else []) + ([f"{more} GPUs"] if more else [])
    change = " or ".join(ways) or "a smaller model, or a shorter sample: no memory and no number of GPUs helps"
    return (
        f"no layout of {request.gpus} GPUs with {request.memory_gib:g} GiB each runs the longest sample ({max(request.lengths)} "
        f"tokens), not even with recompute='full' and checkpoints and parameters on the host. The smallest change that would: {change}. "
        f"The closest layout says: {found[0].reason}"
    )


def _runs(request: Request) -> bool:
    """Whether the layout that needs least can run: all GPUs on each sample, under the leanest policies."""
    layout = mixer_for(request, Layout(cp=request.gpus)).layout
    leanest: list[Policy] = [POLICIES[-1], *OFFLOADING]
    lean = [Candidate(layout, False, recompute, offload) for recompute, offload in leanest]
    return any(_evaluate(request, candidate).plan is not None for candidate in lean)
