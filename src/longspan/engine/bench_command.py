"""`longspan bench`: tokens a second and memory of one model under one layout, on this machine, with this engine.

Random targets, mask 1, importance sampling: the whole `forward_backward`, no optimizer. The first call is warm-up and is reported apart.
The tables of the README come from benchmarks/, which also times kernels, mixers and the head alone. Random weights are fine for speed.
"""

import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from longspan.data import Sample
from longspan.engine.config import EngineConfig
from longspan.engine.engine import Engine
from longspan.engine.plan_command import parse_lengths
from longspan.errors import UserError
from longspan.launch import launch
from longspan.layout import parse_layout
from longspan.objective import Objective

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


def main(arguments: Sequence[str]) -> int:
    """Entry of the command."""
    options = tyro.cli(BenchOptions, args=list(arguments), prog="longspan bench")
    if options.repeats < 1:
        raise UserError(f"repeats={options.repeats} must be at least 1")
    lengths = parse_lengths(options.lengths)
    rows = []
    for name in options.layouts.split(","):
        ranks = parse_layout(name).ranks
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
