"""The longest row on one GPU: Qwen3-1.7B's shape, full fine-tune with AdamW, one measured step.

    python benchmarks/longest.py                                  # lists the cases with the memory that the model predicts
    python benchmarks/longest.py --only 524288/tiled              # one step of 512k tokens, MLPs in tiles, nothing on the host
    python benchmarks/longest.py --only 65536                     # what each of tiles and offload saves, at a length that takes seconds

Policy full, layers compiled. A case is one engine: a step of 4,096 tokens first (kernels and moments exist then), then one forward_backward
and one optim_step of one row. `activations`: the allocator's peak during forward_backward minus what was allocated before it; `peak`: the
whole. `predicted`: data/memory.py without the gradients, which the planner counts since later micro-steps have them. `host`: growth of the
process's resident memory. A very long row needs minutes: attention grows with L^2 (a layer of 64k: 98 ms, 26 of them run twice).
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from common import Report, settings
from shapes import batch, config_of

from longspan import AdamW, Engine, EngineConfig, Layout, Objective
from longspan.data.memory import GIB, MemoryModel
from longspan.data.shape import ModelShape
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.errors import LongspanError
from longspan.launch import launch, world
from longspan.layout import Mesh, resolve
from longspan.models.loading import adapt, build_random

TILE = 16384
LENGTHS = (65536, 393216, 524288, 655360)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tiled": {"mlp_tile": TILE},
    "checkpoints": {"mlp_tile": TILE, "offload": ("checkpoints",)},
    "checkpoints+optimizer": {"mlp_tile": TILE, "offload": ("checkpoints", "optimizer")},
    "selective, checkpoints": {"mlp_tile": TILE, "offload": ("checkpoints",), "recompute": "selective"},
    "parameters": {"mlp_tile": TILE, "offload": ("checkpoints", "parameters")},
}


@dataclass(frozen=True)
class Case:
    """One row, one way."""

    length: int
    way: str

    @property
    def label(self) -> str:
        return f"{self.length}/{self.way}"


def settings_of(case: Case, smoke: bool) -> EngineConfig:
    gpu = torch.cuda.is_available()
    own = dict(WAYS[case.way])
    if smoke and "mlp_tile" in own:
        own["mlp_tile"] = 16
    return EngineConfig(
        model="qwen3-1.7b-random",
        layout=Layout(),
        dtype="bfloat16" if gpu else "float32",
        max_tokens_per_rank=case.length,
        compile=gpu,
        **{"recompute": "full", **own},
    )


def predicted_gib(case: Case) -> float:
    """The memory model's peak for the real shape, less the gradients: a step of one micro-step has none when activations peak."""
    config = settings_of(case, False)
    shape = ModelShape.from_config(config_of("qwen3-1.7b", False).to_dict())
    model = MemoryModel(shape, 1, config.recompute, config.offload, compile=True, mlp_tile=config.mlp_tile)
    parts = model.parts(case.length)
    return (sum(parts.values()) - parts["gradients"]) / GIB


def build(config: EngineConfig, smoke: bool) -> Engine:
    """Engine.build, for a config that is no folder: weights are drawn on the device."""
    here = world()
    with here.device:
        adapter = adapt(build_random(config_of("qwen3-1.7b", smoke), torch.float32, 0), None)
    layout = resolve(config.layout, heads=16, kv_heads=8, recurrent=False, windowed=False)
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    return Engine(config, adapter, mesh, FSDPBackend(config, adapter, mesh))


def measure(case: Case, smoke: bool) -> dict[str, Any]:
    """One step."""
    engine = build(settings_of(case, smoke), smoke)
    objective, adam = Objective("ppo", clip=0.2, entropy=0.001), AdamW(lr=1e-5)
    for length in (16 if smoke else 4096, *([case.length] if case.length <= LENGTHS[0] else [])):
        engine.forward_backward(batch((length,), engine.adapter.vocab_size), objective)
        engine.optim_step(adam)
    samples = batch((case.length,), engine.adapter.vocab_size)
    resident, before = _resident_gib(), _reset()
    marks = [time.perf_counter()]
    metrics = engine.forward_backward(samples, objective)
    during = _peak()
    marks.append(time.perf_counter())
    engine.optim_step(adam)
    whole = max(during, _peak())
    marks.append(time.perf_counter())
    return {
        "activations_gib": round(during - before, 2),
        "peak_gib": round(whole, 2),
        "host_gib": round(_resident_gib() - resident, 2),
        "seconds": round(marks[2] - marks[0], 2),
        "optim_step_s": round(marks[2] - marks[1], 2),
        "tok_per_s": round(case.length / (marks[1] - marks[0])),
        "loss": metrics["loss/total"],
        "kernel": engine.builder.kernel.name,
    }


def _reset() -> float:
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / GIB


def _peak() -> float:
    """Since the last time; each call of the engine starts a new one."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def _resident_gib() -> float:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 2**20


def run() -> Report:
    asked = settings("the longest row")
    report = Report("longest", asked, (__doc__ or "").replace("\n", " "))
    lengths = (48,) if asked.smoke else LENGTHS
    for case in [Case(length, way) for length in lengths for way in WAYS]:
        known = {"case": case.label, "length": case.length, "way": case.way}
        known["predicted_gib"] = round(predicted_gib(case), 1)
        if not asked.smoke and not (asked.only and asked.wants(case.label)):  # never by default: they run for minutes
            print(" ".join(f"{name}={value}" for name, value in known.items()), flush=True)
            continue
        try:
            report.add(**known, **launch(measure, case, asked.smoke, ranks=1, timeout_s=570)[0])
        except LongspanError as error:
            print(error, flush=True)
            report.skip(" ".join(str(error).split("\n")[-3:]), **known)
    return report


if __name__ == "__main__":
    run().save(bars=lambda row: (f"{row['length']} tokens", row["way"], row["peak_gib"]), unit="peak GiB")
