"""From a batch to its plan: the limits that a model, a layout and a budget set, and the cost that ranks plans.

The same inputs on every rank give the same plan (law 2). Does not know tensors or process groups.
"""

from collections.abc import Callable

import torch

from longspan.data import Limits, Plan, lower_bound, make_plan, makespan
from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.memory import MemoryModel
from longspan.data.plan import default_cost
from longspan.data.shape import ModelShape
from longspan.engine.batch import Batch
from longspan.engine.config import EngineConfig
from longspan.errors import UserError
from longspan.layout import Layout, Mesh
from longspan.layout.resolve import ulysses_refusal
from longspan.models.adapter import Adapter

__all__ = ["Planner", "cp_sizes", "heads_per_rank"]

CPU_BUDGET = 8192  # tokens a rank under max_tokens_per_rank="auto" without a GPU: small models, host memory
ROOM = 0.94  # share of a GPU's memory that "auto" fills: the rest is fragments and what the model does not see


class Planner:
    """Makes plans for one engine."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh) -> None:
        self.layout = mesh.layout
        self.ranks = mesh.data_ranks
        self.budget = config.max_tokens_per_rank
        self.sizes = cp_sizes(mesh.layout, adapter, mesh.data_ranks) if config.dynamic_cp else None

        shape = ModelShape.from_config(adapter.model.config.to_dict())
        self.cost: Callable[[int, int], float] = default_cost
        self.step_cost = 1024.0  # of default_cost's unit, tokens
        self.fits: int | None = None
        if mesh.device.type == "cuda":
            width = 8 if config.dtype == "float64" else 2 if config.dtype == "bfloat16" else 4
            model = _cost_model(shape, config, self.layout, self.ranks, width)
            self.cost, self.step_cost = model, model.step_s
            memory = MemoryModel(shape, self.ranks, config.recompute, config.offload, bytes_per_value=width)
            if config.max_tokens_per_rank == "auto":
                room = torch.cuda.get_device_properties(mesh.device).total_memory / 2**30
                self.fits = memory.budget(ROOM * room, size=self.layout.cp)
        self.seconds_a_unit = 0.0  # measured over modelled, of the call before

    def limits(self, lengths: list[int]) -> Limits:
        """ "auto" grows with the longest sample, so that it always runs; an explicit budget is hard."""
        budget = self.budget
        if budget == "auto":
            size = self.layout.cp if self.sizes is None else max(self.sizes)
            budget = self.fits or max(CPU_BUDGET, -(-max(lengths) // (2 * size)) * 2)
        return Limits(self.ranks, self.layout.cp, budget, self.layout.index, self.sizes)

    def plan(self, batch: Batch) -> Plan:
        return make_plan(batch.lengths, self.limits(batch.lengths), self.cost, step_cost=self.step_cost)

    def observe(self, batch: Batch, plan: Plan, seconds: float) -> dict[str, float]:
        """plan/* metrics: what the cost model said beside what was measured, and how long ranks waited for each other.

        plan/predicted_s scales the model by the call before, so it is 0 in the first one.
        """
        lengths = batch.lengths
        units = makespan(plan, lengths, self.cost, step_cost=self.step_cost)
        work = sum(
            row.size * self.cost(lengths[i], row.size) for rows in plan.micro_steps for row in rows for i in row.samples
        )
        busy = work + self.ranks * self.step_cost * len(plan.micro_steps)
        report = {
            "plan/micro_steps": float(len(plan.micro_steps)),
            "plan/predicted_s": units * self.seconds_a_unit,
            "plan/measured_s": seconds,
            "plan/idle_share": max(0.0, 1.0 - busy / (self.ranks * units)),
            "plan/over_bound": units / max(lower_bound(lengths, self.limits(lengths), self.cost), 1e-30),
        }
        self.seconds_a_unit = seconds / units
        return report


def _cost_model(shape: ModelShape, config: EngineConfig, layout: Layout, ranks: int, width: int) -> CostModel:
    """The H200's constants; only ratios matter to a plan."""
    return CostModel(
        shape,
        Machine.load("h200"),
        ranks,
        mixer=layout.mixer,
        index=layout.index,
        linear=layout.linear,
        ulysses=layout.ulysses,
        recompute=config.recompute,
        ep=layout.ep,
        bytes_per_value=width,
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
