"""From a batch to its plan: the limits that a model, a layout and a budget set, and the cost that ranks plans.

The same inputs on every rank give the same plan (law 2). Does not know tensors or process groups.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from longspan.data import Limits, Plan, fullest_row, lower_bound, make_plan, makespan, row_times
from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.memory import MemoryModel
from longspan.data.plan import Cost, default_cost
from longspan.data.planner import few_sizes
from longspan.data.shape import ModelShape
from longspan.data.stage_memory import StageMemory
from longspan.data.travel import Travel
from longspan.engine.batch import Batch
from longspan.engine.config import EngineConfig
from longspan.engine.memory import device_gib, peak_gib
from longspan.engine.memory_model import WIDTHS, memory_model
from longspan.engine.mixer_choice import MixerChoice, choose_mixer
from longspan.engine.pipelines import Played, cut_of, plan_stages, play, slowest_stage
from longspan.engine.watch import Call, Watch, signals
from longspan.errors import UserError
from longspan.layout import Layout, Mesh
from longspan.layout.resolve import ulysses_refusal
from longspan.mixers.symmetric import symmetric_refusal
from longspan.models.adapter import Adapter

__all__ = ["Expected", "Planner", "cp_sizes", "heads_per_rank", "mixer_choice"]

log = logging.getLogger("longspan.plan")

CPU_BUDGET = 8192  # tokens a rank under max_tokens_per_rank="auto" without a GPU: small models, host memory
SHARES = 64  # steps in which the share of visual tokens is rounded up: a model and a budget are made once for each
MACHINE = "h200"  # whose constants rank mixers and plans where none are named: only their ratios matter then


@dataclass(frozen=True, slots=True)
class Expected:
    """What a plan says of its call, in the cost model's seconds."""

    steps: int
    played: Played
    bound_s: float  # no plan is faster
    parts: Mapping[str, float]  # rank-seconds by cause
    peak_gib: float | None  # at this rank's peak, of the allocator; None on a CPU
    buffers_gib: float = 0.0  # beside it, that attention travels through


class Planner:
    """Makes plans for one engine. why: a sentence about the mixer, where it was chosen."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh, why: str = "") -> None:
        self.layout = mesh.layout
        self.ranks = mesh.data_ranks
        self.budget = config.max_tokens_per_rank
        self.sizes = cp_sizes(mesh.layout, adapter, mesh.data_ranks) if config.dynamic_cp else None
        self.lead = mesh.rank == 0
        self.stage, first = divmod(mesh.rank, mesh.data_ranks * mesh.layout.tp)
        self.stage_lead = first == 0  # memory differs by stage: each one's first rank speaks of its own
        self.why = why
        if self.lead and self.why:
            log.info(self.why)

        self.shape = ModelShape.from_config(adapter.model.config.to_dict())
        on_gpu = mesh.device.type == "cuda"
        named = MACHINE if config.machine == "auto" and on_gpu else config.machine
        self.model = None if named == "auto" else _cost_model(self.shape, config, self.layout, self.ranks, named)
        self.travel = _travel(mesh, self.sizes)
        # kept, because it counts every parameter
        self._memory = cache(partial(memory_model, self.shape, config, adapter, self.ranks, mesh.device, self.travel))
        self.buffers_gib = 0.0  # that calls so far have made, outside the allocator
        room = device_gib(mesh.device)
        self.room_gib = None if room is None else min(mesh.gather_objects(room))  # GPUs need not be equal
        self._budgets: dict[float, int] = {}  # tokens a rank under "auto", by the share of visual tokens
        if self.budget == "auto":
            self.limits([1])  # a model that the GPU cannot hold is refused here, not in the first call
        stage = self.stage if self.layout.pp > 1 else None
        self.watch = Watch(None if self.model is None else self.model.machine.name, mesh.device.type, stage)
        self._before = signals()
        self._kept: tuple[Plan, Played] | None = None  # the last plan over stages, as it was played

    def limits(self, lengths: Sequence[int], visual_share: float = 0.0) -> Limits:
        """ "auto" is what the memory model says of the GPU; on a CPU it grows with the longest sample, so that it always runs.
        An explicit budget is hard."""
        budget = self.budget
        if budget == "auto" and self.room_gib is not None:
            share = _rounded(visual_share)
            if share not in self._budgets:
                self._budgets[share] = self.memory_of(share).budget(self.room_gib, size=self.layout.cp)
            budget = self._budgets[share]
        elif budget == "auto":
            size = self.layout.cp if self.sizes is None else max(self.sizes)
            budget = max(CPU_BUDGET, -(-max(lengths) // (2 * size)) * 2)
        return Limits(self.ranks, self.layout.cp, budget, self.layout.index, self.sizes)

    def memory_of(self, visual_share: float) -> MemoryModel | StageMemory:
        """The memory model of tokens of which such a share is visual, rounded up."""
        return self._memory(_rounded(visual_share))

    def plan(self, batch: Batch) -> Plan:
        self._before = signals()
        limits, cost = self._limits(batch), self._cost(batch)
        if isinstance(cost, CostModel) and not cost.sharded:
            self._kept = plan_stages(batch.lengths, limits, cost, self.layout, media=_sees(batch))
            return self._kept[0]
        return make_plan(batch.lengths, limits, cost, step_cost=_step_cost(cost))

    def expect(self, batch: Batch, plan: Plan) -> Expected:
        """What the plan says of its call: there is time for it while the device works."""
        cost = self._cost(batch)
        peak, buffers = (None, 0.0) if self.room_gib is None else self._memory_gib(batch, plan)
        return Expected(
            len(plan.micro_steps),
            self._played(batch, plan, cost),
            lower_bound(batch.lengths, self._limits(batch), self._bottleneck(batch, cost)),
            _parts(batch, plan, cost) if isinstance(cost, CostModel) else {},
            peak,
            buffers,
        )

    def observe(self, expected: Expected, seconds: float) -> dict[str, float]:
        """plan/* metrics: what was predicted beside what was measured, and how long ranks waited for each other: of a
        pipeline, bubble_share is the part of idle_share in which the busiest rank waits for other stages.

        Rank 0 logs a warning with the likeliest reason where they part (watch.py).
        """
        played = expected.played
        self.buffers_gib = max(self.buffers_gib, expected.buffers_gib)
        report = {
            "plan/micro_steps": float(expected.steps),
            "plan/predicted_s": self.watch.predicted_s(played.makespan_s),
            "plan/measured_s": seconds,
            "plan/idle_share": max(
                0.0, 1.0 - sum(played.busy_s) / (self.ranks * len(played.busy_s) * played.makespan_s)
            ),
            "plan/over_bound": played.makespan_s / max(expected.bound_s, 1e-30),
        }
        if self.layout.pp > 1:
            report["plan/bubble_share"] = played.bubble_share
        call = self._call(expected, seconds)
        said = self.watch.see(call)
        if said and (self.lead or (self.stage_lead and call.after.retries > call.before.retries)):
            log.warning(said)
        return report

    def _played(self, batch: Batch, plan: Plan, cost: Cost) -> Played:
        """The plan on the clock of its backend; without a cost model, stages are taken as one."""
        if isinstance(cost, CostModel) and not cost.sharded:
            if self._kept is not None and self._kept[0] is plan:
                return self._kept[1]
            return play(plan, batch.lengths, cost, self.layout, media=_sees(batch))
        step_cost, rows = _step_cost(cost), [row for rows in plan.micro_steps for row in rows]
        whole = makespan(plan, batch.lengths, cost, step_cost=step_cost)
        seconds = row_times(rows, batch.lengths, cost).tolist()
        work = math.fsum(row.size * each for row, each in zip(rows, seconds, strict=True))
        return Played(whole, (work + self.ranks * step_cost * len(plan.micro_steps),), whole)

    def _bottleneck(self, batch: Batch, cost: Cost) -> Cost:
        return slowest_stage(cost, batch.lengths, self.layout.cp) if isinstance(cost, CostModel) else cost

    def _call(self, expected: Expected, seconds: float) -> Call:
        played, steps = expected.played, expected.steps
        return Call(
            modelled_s=played.makespan_s,
            measured_s=seconds,
            parts=expected.parts,
            layer_s=played.makespan_s * self.layout.pp / (steps * self.shape.layers),
            traffic_s=0.0 if self.model is None else steps * self.model.traffic_s,
            before=self._before,
            after=signals(),
            bubble_share=played.bubble_share,
            memory=None if expected.peak_gib is None else (expected.peak_gib, peak_gib()),
        )

    def _memory_gib(self, batch: Batch, plan: Plan) -> tuple[float, float]:
        """What the memory model says of the fullest row of a plan, on this rank: the allocator's peak, and buffers beside it."""
        assert self.layout.index != "auto", "a mesh's layout is resolved"
        tokens, size = fullest_row(plan.micro_steps, batch.lengths, self.layout.index)
        model = self.memory_of(sum(map(sum, batch.media_tokens)) / sum(batch.lengths))
        peak = model.peak(tokens, size)
        if isinstance(model, StageMemory):
            peak = sum(model.by_rank(tokens, size)[self.stage].values())
        buffers = model.buffers(tokens, size)
        return (peak - buffers) / 2**30, buffers / 2**30

    def _limits(self, batch: Batch) -> Limits:
        shares = [sum(media) / length for media, length in zip(batch.media_tokens, batch.lengths, strict=True)]
        return self.limits(batch.lengths, max(shares))  # any micro-step may consist of the samples that see most

    def _cost(self, batch: Batch) -> Cost:
        """Time of a sample at a CP size."""
        if self.model is None:
            return default_cost
        total = sum(batch.lengths)
        trained = int(batch.columns["needed"].sum()) / total
        visual = sum(map(sum, batch.media_tokens)) / total
        return replace(self.model, trained_share=trained, visual_share=visual)


def _rounded(visual_share: float) -> float:
    """Up to the next of SHARES steps."""
    return math.ceil(visual_share * SHARES) / SHARES


def _travel(mesh: Mesh, sizes: tuple[int, ...] | None) -> Travel:
    """How the mixer of this mesh travels (engine/steps.py makes it). Collective."""
    assert mesh.layout.mixer != "auto", "a mesh's layout is resolved"
    dealt = few_sizes(sizes) if sizes else ()
    symmetric = symmetric_refusal(mesh.all, mesh.device) is None
    return Travel(mesh.layout.mixer, symmetric, mesh.layout.ulysses or 1, dealt)


def _step_cost(cost: Cost) -> float:
    """Time of a micro-step as such; without a model in default_cost's unit, tokens."""
    return cost.step_s if isinstance(cost, CostModel) else 1024.0


def _sees(batch: Batch) -> bool:
    """Whether any sample has media."""
    return any(map(sum, batch.media_tokens))


def _parts(batch: Batch, plan: Plan, model: CostModel) -> dict[str, float]:
    """Modelled rank-seconds by cause, of all stages."""
    stages = model.stages()
    found = {"micro-steps": model.num_ranks * sum(stage.step_s for stage in stages) * len(plan.micro_steps)}
    for size in sorted({row.size for rows in plan.micro_steps for row in rows}):
        rows = [row for rows in plan.micro_steps for row in rows if row.size == size]
        lengths = np.array([batch.lengths[i] for row in rows for i in row.samples], dtype=np.float64)
        for stage in stages:
            for name, values in stage.parts(lengths, size).items():
                found[name] = found.get(name, 0.0) + size * float(values.sum())
    return found


def mixer_choice(config: EngineConfig, adapter: Adapter) -> MixerChoice:
    """The layout of `config` without mixer="auto", and why."""
    layout = config.layout
    shape = ModelShape.from_config(adapter.model.config.to_dict())
    ranks = layout.dp * layout.cp
    heads, _ = heads_per_rank(layout, adapter)
    machine = MACHINE if config.machine == "auto" else config.machine
    return choose_mixer(
        layout,
        lambda each: _cost_model(shape, config, each, ranks, machine),
        size=ranks if config.dynamic_cp else layout.cp,
        heads=heads,
        recurrent=adapter.recurrent,
        windowed=adapter.windowed,
        tokens=config.max_tokens_per_rank if isinstance(config.max_tokens_per_rank, int) else None,
    )


def _cost_model(shape: ModelShape, config: EngineConfig, layout: Layout, ranks: int, machine: str) -> CostModel:
    return CostModel(
        shape,
        Machine.load(machine),
        ranks,
        mixer=layout.mixer,
        index=layout.index,
        linear="heads" if layout.linear == "heads" else "state",
        ulysses=layout.ulysses,
        recompute=config.recompute,
        ep=layout.ep,
        offload=config.offload,
        bytes_per_value=WIDTHS[config.dtype],
        sharded=config.backend == "fsdp",
        cut=cut_of(layout),
    )


def cp_sizes(layout: Layout, adapter: Adapter, ranks: int) -> tuple[int, ...]:
    """CP sizes that dynamic CP may give a row: those whose heads can be dealt (ulysses, linear="heads"); else any."""
    heads, _ = heads_per_rank(layout, adapter)
    sizes = [size for size in range(1, ranks + 1) if adapter.linear_refusal(layout.linear, size) is None]
    if layout.mixer == "ulysses":
        sizes = [size for size in sizes if ulysses_refusal(size, heads) is None]
    return tuple(sizes)


def heads_per_rank(layout: Layout, adapter: Adapter) -> tuple[int, int]:
    """(query heads, KV heads) of a tensor-parallel rank: what mixers may deal. Raises UserError with the sizes that work."""
    if adapter.num_kv_heads % layout.tp or adapter.num_heads % layout.tp:
        sizes = ", ".join(str(n) for n in range(1, adapter.num_kv_heads + 1) if adapter.num_kv_heads % n == 0)
        raise UserError(
            f"tp={layout.tp} must divide the model's {adapter.num_heads} query and {adapter.num_kv_heads} KV heads. "
            f"Use tp in ({sizes})"
        )
    return adapter.num_heads // layout.tp, adapter.num_kv_heads // layout.tp
