"""`longspan bench`: tokens a second and memory of one model under one layout, on this machine, with this engine. With --calibrate
it measures the constants of the cost model instead (calibrate.py).

Random targets, mask 1, importance sampling: the whole `forward_backward`, no optimizer. The first call is warm-up and is reported apart.
The tables of the README come from benchmarks/, which also times kernels, mixers and the head alone. Random weights are fine for speed.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from longspan.data import Sample
from longspan.data.machine import Machine
from longspan.engine.calibrate import Asked, Found, calibrate_rank
from longspan.engine.config import EngineConfig
from longspan.engine.engine import Engine
from longspan.engine.plan_command import parse_lengths
from longspan.errors import UserError
from longspan.launch import launch
from longspan.layout import parse_layout, parse_layouts
from longspan.objective import Objective
from longspan.observe import check_writable

__all__ = ["main"]


@dataclass(frozen=True)
class BenchOptions:
    """Measure tokens a second and peak memory; exit status 0, or 2 for a request that cannot be run."""

    model: str = "tiny:qwen3"
    """"tiny:<family>", a local Hugging Face folder, or a hub id."""
    layouts: str = "dp1"
    """Comma-separated layouts, for example dp1,cp2-ulysses,cp2-ring."""
    lengths: str = "64x8,512"
    """Tokens a sample: "2000x63,65536", or "mean/max"."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Compute dtype."""
    recompute: Literal["none", "selective", "full"] = "selective"
    """Activation checkpointing."""
    compile: bool = False
    """torch.compile each layer."""
    max_tokens_per_rank: int | None = None
    """Token budget of a rank; "auto" by default."""
    repeats: int = 3
    """Timed calls after the first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run."""
    timeout_s: float = 600.0
    """Seconds for one layout."""
    json: str | None = None
    """Write every repeat with hardware and versions to this file."""
    calibrate: str | None = None
    """Measure this machine's constants and write them to this .json file, for plan's --machine and EngineConfig(machine=);
    dtype, compile and recompute are those of the runs to come. Needs no model, layouts or lengths."""
    ranks: int | None = None
    """Ranks that --calibrate measures collectives with; by default the GPUs here, or 1."""
    base: str = "h200"
    """Machine whose constants stay where --calibrate cannot measure."""


def main(arguments: Sequence[str]) -> int:
    """Entry of the command."""
    options = tyro.cli(BenchOptions, args=list(arguments), prog="longspan bench")
    if options.repeats < 1:
        raise UserError(f"repeats={options.repeats} must be at least 1")
    for name, path in (("--json", options.json), ("--calibrate", options.calibrate)):
        if path is not None:
            check_writable(name, Path(path))
    if options.calibrate is not None:
        return calibrate(options, Path(options.calibrate))
    if options.ranks is not None:
        raise UserError(f"ranks={options.ranks} belongs to --calibrate; the layouts say how many ranks a bench runs on")
    lengths = parse_lengths(options.lengths)
    rows = []
    for name, layout in parse_layouts(options.layouts).items():
        ranks = layout.ranks
        found = launch(measure, options, name, lengths, ranks=ranks, timeout_s=options.timeout_s, device=options.device)
        rows.append({"layout": name, "ranks": ranks} | found[0])
    table = Table(title=f"{options.model}, {options.dtype}, {len(lengths)} samples, {sum(lengths):,} tokens")
    for column in ("layout", "first s", "median s", "tok/s", "peak GiB"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["layout"],
            f"{row['first_s']:.2f}",
            f"{row['median_s']:.3f}",
            f"{row['tok_per_s']:,.0f}",
            f"{row['peak_gib']:.2f}",
        )
    Console().print(table)
    if options.json is not None:
        machine = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
        )
        report = {"machine": machine, "torch": torch.__version__, "options": vars(options), "rows": rows}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def calibrate(options: BenchOptions, path: Path) -> int:
    """Measure on one rank, then on all; write the machine file and print it beside its base."""
    if path.suffix != ".json":
        raise UserError(f"calibrate={path} must be a .json file")
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    ranks = options.ranks or (torch.cuda.device_count() if on_gpu else 1)
    asked = Asked(options.dtype, options.compile, options.recompute, options.repeats)
    base = Machine.load(options.base)
    device = "cuda" if on_gpu else "cpu"

    def run(machine: Machine, ranks: int) -> Found:
        return launch(calibrate_rank, asked, machine, ranks=ranks, timeout_s=options.timeout_s, device=device)[0]

    found = run(base, 1)
    constants, checks = found.constants, found.checks
    if ranks > 1:
        shared = run(replace(base, **constants), ranks)
        constants, checks = constants | shared.constants, checks + shared.checks
    name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} cpu"
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else _host_bytes()
    machine = replace(base, name=name, memory_gib=memory / 2**30, **constants)
    machine.save(path)
    table = Table(title=f"{name}, {ranks} ranks, {options.dtype}{', compiled' * options.compile}: {path}")
    for column in ("constant", "here", base.name):
        table.add_column(column)
    for key, value in asdict(machine).items():
        if isinstance(value, float | int):
            kept = "" if key in constants or key == "memory_gib" else " (not measured)"
            table.add_row(key, f"{value:.4g}{kept}", f"{asdict(base)[key]:.4g}")
    console = Console()
    console.print(table)
    for what, predicted, measured in checks:
        console.print(
            f"check: {what}: predicted {predicted:.4g} s, measured {measured:.4g} s ({predicted / measured:.2f})"
        )
    return 0


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure(options: BenchOptions, layout: str, lengths: Sequence[int]) -> dict[str, object]:
    """One rank's work: build, one call to warm up, then the timed calls."""
    engine = Engine.build(
        EngineConfig(
            model=options.model,
            layout=parse_layout(layout),
            dtype=options.dtype,
            recompute=options.recompute,
            compile=options.compile,
            max_tokens_per_rank=options.max_tokens_per_rank or "auto",
        )
    )
    samples, objective = [], Objective("importance_sampling")
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        ids = torch.randint(0, min(90, engine.adapter.vocab_size), (length + 1,), generator=generator)
        fields = {"advantage": torch.ones(length), "old_logprob": torch.full((length,), -4.5)}
        samples.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields))
    seconds, peak = [], 0.0
    for _ in range(options.repeats + 1):
        metrics = engine.forward_backward(samples, objective)
        seconds.append(metrics["time/forward_backward_s"])
        peak = max(peak, metrics["mem/peak_gib"])
        engine.clear_gradients()
    median = statistics.median(seconds[1:])
    return {
        "first_s": seconds[0],
        "repeats_s": seconds[1:],
        "median_s": median,
        "tok_per_s": sum(lengths) / median,
        "peak_gib": peak,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
