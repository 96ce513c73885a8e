"""The memory and cost models of backend="megatron" against GPUs: one real call and optimizer step a layout, random weights, 2 GPUs.

    python benchmarks/stage_memory.py --out FOLDER          # about three minutes on two H200s
    python benchmarks/stage_memory.py --only tp2            # layouts whose name starts so

Qwen3-1.7B's shape, bf16 over fp32 masters, a 64k row or (pipelines) eight of 8k, moments there as in every step but the first. Of each
rank: the allocator's peak of a forward_backward and of an optim_step, what data/stage_memory.py says of it by cause, and the
planner's modelled seconds (H200's constants) beside measured ones, without the first call. Without GPUs (--smoke) the same code runs on
toy shapes over gloo and no number means anything.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Settings, settings
from shapes import batch, config_of

from longspan import AdamW, Engine, EngineConfig, Objective
from longspan.errors import LongspanError
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.models.loading import build_random

GIB = 2**30
MODEL = "qwen3-1.7b"


@dataclass(frozen=True)
class Cell:
    """One engine."""

    layout: str
    recompute: str
    lengths: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.layout}/{self.recompute}"


def cells(smoke: bool) -> tuple[Cell, ...]:
    """Two ranks each: one long row where a micro-step is one, many rows where a pipeline wants many."""
    unit = 8 if smoke else 8192
    row, rows = (8 * unit,), (unit,) * 8
    return (
        Cell("tp2", "selective", row),
        Cell("tp2-sp", "selective", row),
        Cell("tp2-sp", "full", row),
        Cell("tp2-sp", "none", (2 * unit,)),
        Cell("pp2", "selective", rows),
        Cell("pp2", "full", rows),
        Cell("pp2-vpp2", "full", rows),
        Cell("cp2-ulysses", "selective", row),
        Cell("dp2", "selective", (4 * unit,) * 2),
    )


def measure(cell: Cell, model: str, repeats: int) -> list[dict[str, Any]]:
    """Of every rank, rank 0 first."""
    layout, on_gpu = parse_layout(cell.layout), world().device.type == "cuda"
    budget = max(-(-max(cell.lengths) // layout.cp), 1)
    engine = Engine.build(
        EngineConfig(
            model=model,
            layout=layout,
            backend="megatron",
            dtype="bfloat16" if on_gpu else "float32",
            recompute=cell.recompute,  # type: ignore[arg-type]  # checked by EngineConfig
            max_tokens_per_rank=budget,
            machine="h200",
        )
    )
    rows, objective = batch(cell.lengths, engine.adapter.vocab_size), Objective("ppo", clip=0.2, entropy=0.001)
    engine.forward_backward(rows, objective)
    engine.optim_step(AdamW(lr=1e-6, clip_norm=1.0))
    peaks, calls = [], []
    for _ in range(repeats + 1):
        dist.barrier()
        metrics = engine.forward_backward(rows, objective)
        peaks.append(_peak())
        calls.append(metrics)
    _reset()
    engine.optim_step(AdamW(lr=1e-6, clip_norm=1.0))
    planner = engine.planner
    memory, stage = planner.memory_of(0.0), planner.stage
    static = sum(memory.static(stage).values())
    said = {
        name: (static + sum(parts.values())) / GIB
        for name, parts in memory.moments(budget, layout.cp, rank=stage).items()
    }
    mine = {
        "rank": world().rank,
        "stage": stage,
        "forward_backward_gib": max(peaks),
        "optim_step_gib": _peak(),
        "predicted_gib": max(value for name, value in said.items() if name != "step"),
        "predicted_step_gib": said["step"],
        "parts_gib": {name: value / GIB for name, value in memory.by_rank(budget, layout.cp)[stage].items()},
        "measured_s": statistics.median(call["plan/measured_s"] for call in calls[1:]),
        "modelled_s": planner.model and calls[0]["plan/predicted_s"],
        **{name: calls[-1].get(f"plan/{name}", 0.0) for name in ("idle_share", "bubble_share", "micro_steps")},
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0


def _reset() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def run(asked: Settings) -> Report:
    report = Report("stage_memory", asked, __doc__ or "")
    with TemporaryDirectory(prefix="longspan-stage-memory-") as folder:
        model = str(Path(folder) / "model")
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            build_random(config_of(MODEL, asked.smoke), torch.float32, 0).save_pretrained(model)
        for cell in (cell for cell in cells(asked.smoke) if asked.wants(cell.label)):
            start = time.perf_counter()
            try:
                found = launch(measure, cell, model, asked.repeats, ranks=2, timeout_s=240)[0]
            except LongspanError as error:
                report.skip(str(error).strip().splitlines()[-1], case=cell.label, **asdict(cell))
                continue
            for row in found:
                ratio = row["predicted_gib"] / row["forward_backward_gib"] if row["forward_backward_gib"] else 0.0
                report.add(
                    case=cell.label, ratio=round(ratio, 3), **asdict(cell), **row, took_s=time.perf_counter() - start
                )
    return report


if __name__ == "__main__":
    run(settings("megatron's memory and cost models against GPUs", repeats=2)).save(
        bars=lambda row: ("predicted / measured", f"{row['case']}, rank {row['rank']}", row["ratio"]), unit="ratio"
    )
