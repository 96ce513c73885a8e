"""From a batch to its plan: the limits that a model, a layout and a budget set, and the cost that ranks plans.

The same inputs on every rank give the same plan (law 2). Does not know tensors or process groups.
"""

import logging
import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from longspan.data import Limits, Plan, lower_bound, make_plan, makespan
from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.memory import MemoryModel
from longspan.data.plan import Cost, default_cost
from longspan.data.shape import ModelShape
from longspan.engine.batch import Batch
from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.mixer_choice import MixerChoice, choose_mixer
from longspan.engine.watch import Call, Watch, signals
from longspan.errors import UserError
from longspan.layout import Layout, Mesh
from longspan.layout.resolve import ulysses_refusal
from longspan.mixers.deltanet_choose import choose_delta_kernel
from longspan.models.adapter import Adapter

__all__ = ["Planner", "cp_sizes", "heads_per_rank", "mixer_choice"]

log = logging.getLogger("longspan.plan")

CPU_BUDGET = 8192  # tokens a rank under max_tokens_per_rank="auto" without a GPU: small models, host memory
SHARES = 64  # steps in which the share of visual tokens is rounded up: a budget is searched once for each
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2}
MACHINE = "h200"  # whose constants rank mixers and plans where none are named: only their ratios matter then


class Planner:
    """Makes plans for one engine."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh) -> None:
        self.layout = mesh.layout
        self.ranks = mesh.data_ranks
        self.budget = config.max_tokens_per_rank
        self.sizes = cp_sizes(mesh.layout, adapter, mesh.data_ranks) if config.dynamic_cp else None
        self.lead = mesh.rank == 0
        self.why = mixer_choice(config, adapter).why
        if self.lead and self.why:
            log.info(self.why)

        self.shape = ModelShape.from_config(adapter.model.config.to_dict())
        on_gpu = mesh.device.type == "cuda"
        named = MACHINE if config.machine == "auto" and on_gpu else config.machine
        self.model = None if named == "auto" else _cost_model(self.shape, config, self.layout, self.ranks, named)
        self.memory_of = partial(memory_model, self.shape, config, adapter, self.ranks, mesh.device)
        self.room_gib = torch.cuda.get_device_properties(mesh.device).total_memory / 2**30 if on_gpu else None
        self._budgets: dict[float, int] = {}  # tokens a rank under "auto", by the share of visual tokens
        if self.budget == "auto":
            self.limits([1])  # a model that the GPU cannot hold is refused here, not in the first call
        self.watch = Watch(None if self.model is None else self.model.machine.name, mesh.device.type)
        self._before = signals()

    def limits(self, lengths: list[int], visual_share: float = 0.0) -> Limits:
        """ "auto" is what the memory model says of the GPU; on a CPU it grows with the longest sample, so that it always runs.
        An explicit budget is hard."""
        budget = self.budget
        if budget == "auto" and self.room_gib is not None:
            share = math.ceil(visual_share * SHARES) / SHARES
            if share not in self._budgets:
                self._budgets[share] = self.memory_of(share).budget(self.room_gib, size=self.layout.cp)
            budget = self._budgets[share]
        elif budget == "auto":
            size = self.layout.cp if self.sizes is None else max(self.sizes)
            budget = max(CPU_BUDGET, -(-max(lengths) // (2 * size)) * 2)
        return Limits(self.ranks, self.layout.cp, budget, self.layout.index, self.sizes)

    def plan(self, batch: Batch) -> Plan:
        self._before = signals()
        cost, step_cost = self._cost(batch)
        return make_plan(batch.lengths, self._limits(batch), cost, step_cost=step_cost)

    def observe(self, batch: Batch, plan: Plan, seconds: float) -> dict[str, float]:
        """plan/* metrics: what was predicted beside what was measured, and how long ranks waited for each other.

        Rank 0 logs a warning with the likeliest reason where they part (watch.py).
        """
        lengths = batch.lengths
        cost, step_cost = self._cost(batch)
        units = makespan(plan, lengths, cost, step_cost=step_cost)
        rows = [row for rows in plan.micro_steps for row in rows]
        work = sum(row.size * cost(lengths[i], row.size) for row in rows for i in row.samples)
        busy = work + self.ranks * step_cost * len(plan.micro_steps)
        report = {
            "plan/micro_steps": float(len(plan.micro_steps)),
            "plan/predicted_s": self.watch.predicted_s(units),
            "plan/measured_s": seconds,
            "plan/idle_share": max(0.0, 1.0 - busy / (self.ranks * units)),
            "plan/over_bound": units / max(lower_bound(lengths, self._limits(batch), cost), 1e-30),
        }
        said = self.watch.see(self._call(batch, plan, cost, units=units, seconds=seconds))
        if said and self.lead:
            log.warning(said)
        return report

    def _call(self, batch: Batch, plan: Plan, cost: Cost, *, units: float, seconds: float) -> Call:
        steps = len(plan.micro_steps)
        return Call(
            modelled_s=units,
            measured_s=seconds,
            parts=_parts(batch, plan, cost) if isinstance(cost, CostModel) else {},
            layer_s=units / (steps * self.shape.layers),
            traffic_s=0.0 if self.model is None else steps * self.model.traffic_s,
            before=self._before,
            after=signals(),
        )

    def _limits(self, batch: Batch) -> Limits:
        shares = [sum(media) / length for media, length in zip(batch.media_tokens, batch.lengths, strict=True)]
        return self.limits(batch.lengths, max(shares))  # any micro-step may consist of the samples that see most

    def _cost(self, batch: Batch) -> tuple[Cost, float]:
        """Time of a sample at a CP size, and of a micro-step as such."""
        if self.model is None:
            return default_cost, 1024.0  # of default_cost's unit, tokens
        total = sum(batch.lengths)
        trained = sum(int(row["needed"].sum()) for row in batch.tensors) / total
        visual = sum(map(sum, batch.media_tokens)) / total
        model = replace(self.model, trained_share=trained, visual_share=visual)
        return model, model.step_s


def _parts(batch: Batch, plan: Plan, model: CostModel) -> dict[str, float]:
    """Modelled rank-seconds by cause."""
    found = {"micro-steps": model.num_ranks * model.step_s * len(plan.micro_steps)}
    for size in sorted({row.size for rows in plan.micro_steps for row in rows}):
        rows = [row for rows in plan.micro_steps for row in rows if row.size == size]
        lengths = np.array([batch.lengths[i] for row in rows for i in row.samples], dtype=np.float64)
        for name, values in model.parts(lengths, size).items():
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


def memory_model(
    shape: ModelShape,
    config: EngineConfig,
    adapter: Adapter,
    ranks: int,
    device: torch.device,
    visual_share: float = 0.0,
) -> MemoryModel:
    """What this engine keeps: what is frozen has no gradient and no moments."""
    parameters = list(adapter.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return MemoryModel(
        shape,
        ranks,
        config.recompute,
        config.offload,
        bytes_per_value=WIDTHS[config.dtype],
        trainable_share=trained / max(shape.weights, trained),
        head_trained=adapter.head()[0].requires_grad,
        visual_share=visual_share,
        lora_width=lora_width(adapter.units()[0]),
        compile=config.compile,
        ep=config.layout.ep,
        mlp_tile=config.mlp_tile,
        plain_delta=choose_delta_kernel(device, DTYPES[config.dtype]).name != "fla",
    )


def lora_width(layer: nn.Module) -> int:
    """Inputs and ranks of the linear layers of `layer` that carry LoRA factors, summed; 0 without."""
    factors = [module for name, module in layer.named_modules() if ".lora_A." in name and isinstance(module, nn.Linear)]
    return sum(factor.in_features + factor.out_features for factor in factors)


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
