"""Makespan of Longspan's plans under one cost model, against static CP, megatron-core's hybrid-CP scheduler and the
bound.

    python benchmarks/planner.py --json benchmarks/results/planner.json --megatron FOLDER

Pure CPU, a few minutes. Cost: data/cost.py with H200 constants and Qwen3-1.7B. A makespan is the sum over micro-steps
of the slowest rank; no fixed time per micro-step is counted. Bound: max(sum over samples of min over c of c * t(c) /
ranks, max over samples of min over c of t(c)). FOLDER is where `pip install --no-deps --ignore-requires-python
--target FOLDER megatron-core==0.19.2 triton==3.7.1 packaging psutil` put its files; its `BalancedCPScheduler` is
called as it ships, given the same token budget, and the CP size of each of its samples is read off its result. It does
not see the cost model: it balances L^2 / cp. It has no micro-steps within a group (one forward a sample, no packing,
DDP), so that its makespan is the sum over groups
of the slowest GPU: fewer barriers than FSDP can have, which flatters it here where samples are few.
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.plan import Limits, Plan, lower_bound, makespan
from longspan.data.planner import make_plan
from longspan.data.shape import ModelShape

QWEN3_1_7B = ModelShape(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=6144, vocab=151936, tied=True)
SIZES = (1, 2, 4, 8, 16)  # 16 query heads
# Documents of a public continued-pretraining corpus by Qwen3 tokens (GitHub elsayedhazemm/gemma3-pt,
# dataset_stats_qwen.md).
PUBLIC_HISTOGRAM = (
    (36, 1024, 2439),
    (1024, 2048, 1711),
    (2048, 4096, 3280),
    (4096, 8192, 3093),
    (8192, 16384, 630),
    (16384, 23095, 14),
)


def uniform(count: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(64, 32769, count).tolist()


def agents(count: int, rng: np.random.Generator) -> list[int]:
    """27k to 65k, a tenth of them in a Pareto tail to 256k."""
    body = rng.uniform(27_000, 65_000, count)
    tail = np.minimum(65_000 * (1 + rng.pareto(1.5, count)), 262_144)
    return np.where(rng.random(count) < 0.1, tail, body).astype(int).tolist()


def one_long(count: int, rng: np.random.Generator) -> list[int]:
    """63 short rows and one of 64k, repeated."""
    return [65536 if i % 64 == 63 else int(rng.integers(500, 4001)) for i in range(count)]


def short(count: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(1000, 2001, count).tolist()


def bimodal(count: int, rng: np.random.Generator) -> list[int]:
    low, high = rng.integers(1000, 3001, count), rng.integers(40_000, 80_001, count)
    return np.where(rng.random(count) < 0.8, low, high).tolist()


def public(count: int, rng: np.random.Generator) -> list[int]:
    weights = np.array([row[2] for row in PUBLIC_HISTOGRAM], dtype=float)
    bins = rng.choice(len(weights), size=count, p=weights / weights.sum())
    return [int(rng.integers(PUBLIC_HISTOGRAM[b][0], PUBLIC_HISTOGRAM[b][1])) for b in bins]


def million(count: int, rng: np.random.Generator) -> list[int]:
    """Agents, and one row of 1M tokens in 64."""
    lengths = agents(count, rng)
    lengths[::64] = [1_000_000] * len(lengths[::64])
    return lengths


DISTRIBUTIONS: dict[str, Callable[[int, np.random.Generator], list[int]]] = {
    "uniform": uniform, "agents": agents, "one_long": one_long, "short": short, "bimodal": bimodal, "public": public,
}  # fmt: skip
MIXED = ("uniform", "agents", "one_long", "bimodal", "public")


@dataclass(frozen=True, slots=True)
class Cell:
    distribution: str
    ranks: int
    samples: int
    budget: int
    longest: int
    micro_steps: int
    plan_s: float  # time to make the plan
    makespan_s: float
    lower_bound_s: float
    over_bound: float
    static_cp: int
    over_static: float
    megatron_s: float | None
    over_megatron: float | None
    megatron_over_bound: float | None
    idle_share: float
    rows_above_smallest: int  # rows at a CP size above what their tokens need


def megatron_makespan(lengths: list[int], ranks: int, budget: int, cost: CostModel, scheduler: type) -> float:
    """Sum over its groups of the slowest GPU, each sample at the number of GPUs that hold it."""

    class Group:
        def size(self) -> int:
            return ranks

    made = scheduler(budget, Group())
    _, groups = made.get_groups_and_subsamples(list(enumerate(lengths)), None)
    total, seen = 0.0, 0
    for group in groups:
        holders: dict[int, int] = {}
        for ids in group:
            for i in ids:
                holders[i] = holders.get(i, 0) + 1
        seen += len(holders)
        times = {i: cost(lengths[i], holders[i]) for i in holders}
        total += max(sum(times[i] for i in ids) for ids in group)
    assert seen == len(lengths), f"megatron-core planned {seen} of {len(lengths)} samples"
    return total


def idle_share(plan: Plan, lengths: list[int], cost: CostModel) -> float:
    busy = sum(r.size * cost(lengths[i], r.size) for rows in plan.micro_steps for r in rows for i in r.samples)
    return 1.0 - busy / (plan.num_ranks * makespan(plan, lengths, cost))


def above_smallest(plan: Plan, lengths: list[int], limits: Limits) -> int:
    count = 0
    for rows in plan.micro_steps:
        for row in rows:
            tokens = sum(lengths[i] for i in row.samples)
            count += bool(row.samples) and row.size > next(c for c in limits.all_sizes if tokens <= limits.capacity(c))
    return count


def measure(name: str, ranks: int, samples: int, budget: int, scheduler: type | None, *, seed: int = 0) -> Cell:
    lengths = (DISTRIBUTIONS | {"million": million})[name](samples, np.random.default_rng(seed))
    sizes = tuple(size for size in SIZES if size <= ranks)
    cost = CostModel(QWEN3_1_7B, Machine.load("h200"), num_ranks=ranks)
    limits = Limits(num_ranks=ranks, cp=1, budget=budget, sizes=sizes)
    start = time.process_time()
    plan = make_plan(lengths, limits, cost, step_cost=0.0)
    plan_s = time.process_time() - start
    ours, bound = makespan(plan, lengths, cost), lower_bound(lengths, limits, cost)
    cp = next(size for size in sizes if size * budget >= max(lengths))
    fixed = make_plan(lengths, Limits(num_ranks=ranks, cp=cp, budget=budget), cost, step_cost=0.0)
    static = makespan(fixed, lengths, cost)
    megatron = None if scheduler is None else megatron_makespan(lengths, ranks, budget, cost, scheduler)
    return Cell(
        distribution=name, ranks=ranks, samples=samples, budget=budget, longest=max(lengths),
        micro_steps=len(plan.micro_steps), plan_s=round(plan_s, 3), makespan_s=ours, lower_bound_s=bound,
        over_bound=ours / bound, static_cp=cp, over_static=ours / static, megatron_s=megatron,
        over_megatron=None if megatron is None else ours / megatron,
        megatron_over_bound=None if megatron is None else megatron / bound,
        idle_share=idle_share(plan, lengths, cost),
        rows_above_smallest=above_smallest(plan, lengths, limits),
    )  # fmt: skip


def show(cell: Cell) -> None:
    versus = "-" if cell.over_megatron is None else f"{cell.over_megatron:5.3f}"
    print(
        f"{cell.distribution:9} ranks {cell.ranks:5} samples {cell.samples:6} steps {cell.micro_steps:4} "
        f"plan {cell.plan_s:6.3f} s  /bound {cell.over_bound:6.4f}  /static(cp{cell.static_cp}) "
        f"{cell.over_static:5.3f}  "
        f"/megatron {versus}  idle {cell.idle_share:6.2%}  wider {cell.rows_above_smallest}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megatron", type=Path, help="folder that holds megatron-core 0.19.2")
    parser.add_argument("--budget", type=int, default=32768)
    parser.add_argument("--ranks", default="8,64")
    parser.add_argument("--samples-per-rank", default="2,8,32,128")
    parser.add_argument("--large", action="store_true", help="also 1,024 ranks and rows of 1M tokens")
    args = parser.parse_args()
    scheduler = None
    if args.megatron:
        sys.path.insert(0, str(args.megatron))
        warnings.simplefilter("ignore")
        scheduler = importlib.import_module("megatron.core.pipeline_parallel.hybrid_cp_schedule").BalancedCPScheduler
    cells = []
    for ranks in map(int, args.ranks.split(",")):
        for each in map(int, args.samples_per_rank.split(",")):
            for name in DISTRIBUTIONS:
                cells.append(measure(name, ranks, ranks * each, args.budget, scheduler))
                show(cells[-1])
    if args.large:
        for name, ranks, samples, budget in (
            ("agents", 1024, 8192, 32768), ("agents", 1024, 32768, 32768), ("public", 1024, 32768, 32768),
            ("million", 64, 512, 65536), ("million", 1024, 4096, 65536),
        ):  # fmt: skip
            cells.append(measure(name, ranks, samples, budget, None))
            show(cells[-1])
    if args.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        record = {
            "command": " ".join(sys.argv), "commit": commit,
            "python": platform.python_version(), "numpy": np.__version__,
            "machine": platform.processor() or platform.machine(), "model": asdict(QWEN3_1_7B), "cost": "h200",
            "cells": [asdict(cell) for cell in cells],
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
