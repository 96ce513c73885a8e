"""Where a step's GPU stands idle: the gaps between kernels of one profiled call, grouped by what ran before and after.

    python benchmarks/gaps.py                     # 64k row: one GPU, then CP=2; short rows: DP=2
    python benchmarks/gaps.py --only cp2

Qwen3-1.7B's shape, random weights, bf16, compiled layers, PPO (benchmarks/step.py). `wall_ms`: the call without the
profiler, the device synchronised on both sides. `busy_ms`: union of all kernels and copies of rank 0's GPU in a profiled
call; `idle_ms`: from its first to its last kernel less that. Each gap of 20 us or more counts for the pair (name of the
last kernel to end before it, name of the first to start after it). No GPU: the same code runs and finds no kernels.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import Report, settings
from step import SHORT, Case, batch, build
from torch.profiler import ProfilerActivity, profile

from longspan import Layout, Objective
from longspan.launch import launch, world

SHORTEST_US = 20.0
LISTED = 12


@dataclass(frozen=True)
class Span:
    """One kernel or copy, microseconds."""

    start: float
    end: float
    name: str


def gaps(spans: Sequence[Span]) -> tuple[float, list[tuple[float, int, str, str]]]:
    """(busy us, [(idle us, count, before, after)] largest first)."""
    ordered = sorted(spans, key=lambda span: span.start)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    busy, reached, last = 0.0, float("-inf"), ""
    for span in ordered:
        if last and span.start - reached >= SHORTEST_US:
            found[last, span.name].append(span.start - reached)
        busy += max(0.0, span.end - max(span.start, reached))
        if span.end > reached:
            reached, last = span.end, span.name
    listed = [(sum(each), len(each), before[:60], after[:60]) for (before, after), each in found.items()]
    return busy, sorted(listed, reverse=True)


def measure(case: Case, smoke: bool) -> dict[str, Any]:
    """Rank 0's picture of one call."""
    where, ranks = world().device, dist.get_world_size()
    engine = build(case, smoke, -(-sum(case.lengths) // ranks // 8) * 8 + 64 * len(case.lengths))
    samples, objective = batch(case.lengths, engine.adapter.vocab_size), Objective("ppo", clip=0.2, entropy=0.001)
    on_gpu = where.type == "cuda"
    wall = 0.0
    for _ in range(4):
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        engine.forward_backward(samples, objective)
        if on_gpu:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - start) * 1e3
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        engine.forward_backward(samples, objective)
        if on_gpu:
            torch.cuda.synchronize()
    spans = [
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy, listed = gaps(spans)
    total = max((span.end for span in spans), default=0.0) - min((span.start for span in spans), default=0.0)
    return {
        "layout": engine.mesh.layout.name,
        "wall_ms": [wall],
        "busy_ms": round(busy / 1e3, 1),
        "idle_ms": round((total - busy) / 1e3, 1),
        "largest": [
            {"idle_ms": round(us / 1e3, 2), "count": count, "before": before, "after": after}
            for us, count, before, after in listed[:LISTED]
        ],
    }


def run() -> Report:
    asked = settings("idle gaps of a step")
    row, short = ((64,), (8, 12, 16, 12)) if asked.smoke else ((65536,), SHORT)
    cases = {
        "one": Case("gaps", "64k row", row, Layout()),
        "cp2": Case("gaps", "64k row", row, Layout(cp=2)),
        "dp2": Case("gaps", "rows of 1-2k", short, Layout(dp=2)),
    }
    report = Report("gaps", asked, __doc__ or "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2
    for name, case in cases.items():
        if asked.wants(name) and case.layout.ranks <= gpus:
            found = launch(measure, case, asked.smoke, ranks=case.layout.ranks, timeout_s=240)[0]
            report.add(case=name, **found)
            for gap in found["largest"]:
                print("   ", gap, flush=True)
    return report


if __name__ == "__main__":
    run().save(bars=lambda row: ("idle", str(row["case"]), row["idle_ms"]), unit="ms")
