"""Peak memory of the whole train step by row length, policy and CP: Qwen3-1.7B's shape, random weights, bf16, one row.

    python benchmarks/memory.py                        # the table: 16k to 128k
    python benchmarks/memory.py --only longest/393216  # one measured step of a very long row, full fine-tune with AdamW

`activations`: the allocator's peak during one forward_backward of a batch after the first (compiled, gradients there) minus what
is allocated before it. Points of one layout and policy run on one engine. `peak`: the whole, with fp32 masters and gradients; in
`longest` with Adam's moments and the optimizer step too. Buffers in symmetric memory (three of the largest travel) are outside the
allocator. A very long row needs minutes: attention grows with L^2 (64k: 2.8 s of it on an H200).
"""

import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Settings, settings
from step import Case, batch, build

from longspan import AdamW, Layout, Objective
from longspan.launch import launch, world

LENGTHS = (16384, 32768, 65536, 131072)
LONGEST = (393216, 524288, 786432, 1048576)
POLICIES = ("selective", "full")


@dataclass(frozen=True)
class Point:
    """One row of the table."""

    label: str
    length: int
    layout: Layout
    recompute: str
    optimizer: bool = False


def points(asked: Settings, gpus: int) -> list[Point]:
    lengths = (16, 32) if asked.smoke else LENGTHS
    layouts = [Layout()] + ([Layout(cp=2)] if gpus > 1 else [])
    found = [
        Point(f"table/cp{layout.cp}/{policy}/{length}", length, layout, policy)
        for layout in layouts
        for policy in POLICIES
        for length in lengths
    ]
    wanted = [point for point in found if asked.wants(point.label)]
    if asked.only:  # never by default: they run for minutes
        longest = (48,) if asked.smoke else LONGEST
        for length in longest:
            point = Point(f"longest/{length}", length, layouts[-1], "full", optimizer=True)
            wanted += [point] if asked.wants(point.label) else []
    return wanted


def measure(group: list[Point], smoke: bool) -> list[dict[str, Any]]:
    """Peaks in GiB, the larger rank's, of the points of one engine."""
    ranks, on_gpu = dist.get_world_size(), world().device.type == "cuda"
    first, longest = group[0], max(point.length for point in group)
    case = Case("memory", str(longest), (longest,), first.layout, compile=on_gpu, recompute=first.recompute)
    engine = build(case, smoke, -(-longest // ranks // 8) * 8 + 64)
    objective = Objective("ppo", clip=0.2, entropy=0.001)
    warm = batch((16 if smoke else 4096,), engine.adapter.vocab_size)
    engine.forward_backward(warm, objective)  # gradients and compiled kernels are there before the measurement
    if first.optimizer:
        engine.optim_step(AdamW(lr=1e-5))  # and Adam's moments
    found = []
    for point in group:
        samples = batch((point.length,), engine.adapter.vocab_size)
        before = _reset(on_gpu)
        start = time.perf_counter()
        engine.forward_backward(samples, objective)
        during = _peak(on_gpu)
        if point.optimizer:
            engine.optim_step(AdamW(lr=1e-5))
        mine = (during - before, max(during, _peak(on_gpu)), time.perf_counter() - start)
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, mine)
        activations, peak, seconds = (max(values) for values in zip(*every, strict=True))
        found.append({"activations_gib": activations, "peak_gib": peak, "seconds": seconds})
        found[-1]["kernel"] = engine.builder.kernel.name
    return found


def _reset(on_gpu: bool) -> float:
    if not on_gpu:
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def _peak(on_gpu: bool) -> float:
    if not on_gpu:
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def run() -> Report:
    asked = settings("memory by row length")
    report = Report("memory", asked, __doc__ or "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2
    for _, group in groupby(points(asked, gpus), key=lambda point: (point.layout, point.recompute, point.optimizer)):
        group = list(group)
        ranks = group[0].layout.ranks
        for point, found in zip(group, launch(measure, group, asked.smoke, ranks=ranks, timeout_s=560)[0], strict=True):
            report.add(case=point.label, length=point.length, cp=point.layout.cp, recompute=point.recompute, **found)
    return report


if __name__ == "__main__":
    run().save(
        bars=lambda row: (f"cp{row['cp']}, {row['recompute']}", str(row["length"]), row["peak_gib"]), unit="peak GiB"
    )
