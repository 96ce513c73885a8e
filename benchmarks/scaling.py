"""The whole train step on 1, 2, 4 and 8 GPUs through Engine: scaling, dynamic CP, memory a GPU. Qwen3-1.7B's shape, random weights.

    python benchmarks/scaling.py                  # every size that the machine's GPUs allow
    python benchmarks/scaling.py --only scale     # one 64k and one 256k row, CP = number of GPUs
    python benchmarks/scaling.py --only dynamic   # 63 short rows and one of 64k, and a long tail: CP 2, CP 4, dynamic CP

One `forward_backward`, PPO with entropy, bf16 over fp32 masters, compiled layers, no optimizer; wall clock of the slowest
rank with the device synchronised on both sides. `efficiency`: time on one GPU over (GPUs * time). `device_ms`: one more call
under torch's profiler on rank 0, with the time that no kernel ran (timeline.py). `idle_share`, `predicted_s`: the planner's own figures
for the call (docs/planning.md). `peak`: allocator's, with fp32 masters and gradients, no Adam moments; the largest rank's.
Without a GPU (--smoke) the same code runs on toy shapes over gloo, and its numbers mean nothing.
"""

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Settings, settings
from shapes import batch, config_of
from timeline import device_time

from longspan import Engine, EngineConfig, Layout, Objective
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.launch import launch, world
from longspan.layout import Mesh, resolve
from longspan.models.loading import adapt, build_random


@dataclass(frozen=True)
class Case:
    """One engine and one batch."""

    part: str
    lengths: tuple[int, ...]
    layout: Layout
    dynamic: bool
    budget: int  # tokens a rank


def cases(asked: Settings, gpus: int) -> list[Case]:
    """What this machine can run: sizes 1, 2, 4, 8 up to its GPUs."""
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    unit = 16 if asked.smoke else 65536
    found = []
    for name, length in (("scale/64k row", unit), ("scale/256k row", 4 * unit)):
        found += [Case(name, (length,), Layout(cp=size), False, -(-length // size // 8) * 8 + 64) for size in sizes]
    for name, lengths in (("dynamic/63 short + 64k", _short_and_long(unit)), ("dynamic/long tail", _long_tail(unit))):
        static = [size for size in (2, 4) if size <= gpus]
        found += [Case(name, lengths, Layout(dp=gpus // size, cp=size), False, unit) for size in static]
        found += [Case(name, lengths, Layout(dp=gpus), True, unit)] if gpus > 1 else []
    return [case for case in found if asked.wants(case.part)]


def _short_and_long(unit: int) -> tuple[int, ...]:
    return (*[max(unit // 32, 1)] * 63, unit)


def _long_tail(unit: int) -> tuple[int, ...]:
    """64 rows between 1/64 and 1 unit, log-normal: most are short."""
    draw = random.Random(0)
    return tuple(max(unit // 64, 1, min(unit, int(unit / 24 * draw.lognormvariate(0, 1.1)))) for _ in range(64))


def build(case: Case, smoke: bool) -> Engine:
    """Engine.build, for a config that is no folder: weights are drawn on the device."""
    here = world()
    known = config_of("qwen3-1.7b", smoke)
    layout = resolve(
        case.layout,
        heads=known.num_attention_heads,
        kv_heads=known.num_key_value_heads,
        recurrent=False,
        windowed=False,
    )
    on_gpu = here.device.type == "cuda"
    config = EngineConfig(
        model="qwen3-1.7b-random",
        layout=layout,
        dtype="bfloat16" if on_gpu else "float32",
        max_tokens_per_rank=case.budget,
        dynamic_cp=case.dynamic,
        compile=on_gpu,
    )
    with here.device:
        adapter = adapt(build_random(known, torch.float32, 0), None)
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    return Engine(config, adapter, mesh, FSDPBackend(config, adapter, mesh))


def measure(case: Case, smoke: bool, repeats: int) -> dict[str, Any]:
    """One case on this rank; every figure is the worst rank's."""
    engine, where = build(case, smoke), world().device
    samples, objective = batch(case.lengths, engine.adapter.vocab_size), Objective("ppo", clip=0.2, entropy=0.001)
    seconds, metrics = [], {}
    for _ in range(repeats + 2):
        _synchronise(where)
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start = time.perf_counter()
        metrics = engine.forward_backward(samples, objective)
        _synchronise(where)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if where.type == "cuda" else 0.0
    on_gpu = where.type == "cuda"
    profiled = {"device_ms": device_time(lambda: engine.forward_backward(samples, objective))} if on_gpu else {}
    mine = (seconds[2:], peak)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    ms = [max(values) * 1e3 for values in zip(*(found[0] for found in every), strict=True)]
    return {
        "layout": "dynamic" if case.dynamic else engine.mesh.layout.name,
        "ranks": len(every),
        "kernel": engine.builder.kernel.name,
        "ms": ms,
        "tok_per_s": round(sum(case.lengths) / statistics.median(ms) * 1e3),
        "peak_gib": round(max(found[1] for found in every), 2),
        **profiled,
        **{name: metrics[f"plan/{name}"] for name in ("predicted_s", "measured_s", "idle_share", "micro_steps")},
    }


def _synchronise(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def run() -> Report:
    asked = settings("scaling of the whole step", repeats=3)
    report = Report("scaling", asked, __doc__ or "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 4
    alone: dict[str, float] = {}
    for case in cases(asked, gpus):
        ranks = case.layout.ranks
        try:
            row = launch(measure, case, asked.smoke, asked.repeats, ranks=ranks, timeout_s=300)[0]
        except Exception as error:  # one case that does not fit must not lose the table
            said = str(error).strip().splitlines()
            report.skip(f"{said[0]} {said[-1]}", part=case.part, layout=case.layout.name, ranks=ranks)
            continue
        median = statistics.median(row["ms"])
        if ranks == 1:
            alone[case.part] = median
        efficiency = alone[case.part] / ranks / median if case.part in alone else None
        report.add(part=case.part, rows=len(case.lengths), efficiency=efficiency, **row)
    return report


if __name__ == "__main__":
    run().save(
        bars=lambda row: (row["part"], f"{row['ranks']} GPUs, {row['layout']}", row["tok_per_s"]), unit="tokens/s"
    )
