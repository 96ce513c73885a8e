"""What the benchmarks share: settings, timing, where a number came from, JSON and picture.

Every script runs as `python benchmarks/NAME.py [--smoke] [--out FOLDER] [--commit SHA]` and writes NAME.json (hardware,
versions, commit, command, every repeat) and NAME.png. --smoke runs the same code on tiny shapes, on CPU too: it tests
the script and its numbers mean nothing. Times are CUDA events around one call (wall clock on CPU), after warm-up;
a table shows the median of the repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from longspan.observe.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
CALLS = 3
PEAK_TFLOPS = 989.0  # dense bf16, data sheet of the H100/H200 SXM; a measured 8192^3 matmul reaches 784

# Packed rows of 64k tokens: one document, and the mix of 23 documents of GPU.md.
ONE = (65536,)
MIX = (16384, *[8192] * 2, *[4096] * 4, *[2048] * 4, *[1024] * 4, *[512] * 8)
ROWS = {"64k row": ONE, "64k mix": MIX}
SMOKE_ROWS = {"64k row": (64,), "64k mix": (24, 16, 8, 8, 8)}


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of a script."""

    smoke: bool
    out: Path
    commit: str
    repeats: int
    only: tuple[str, ...]  # parts of the script to run; empty: all

    @property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """Name -> document lengths of each packed row."""
        return SMOKE_ROWS if self.smoke else ROWS

    def wants(self, part: str) -> bool:
        """Whether to run a part: all, or those whose name starts with one that was asked for."""
        return not self.only or any(part.startswith(name) for name in self.only)


def settings(description: str, *, repeats: int = 5) -> Settings:
    """The command line of every script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to test the script")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the JSON and PNG")
    parser.add_argument("--commit", default="", help="commit of this tree where it is no git checkout")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed calls of each case")
    parser.add_argument("--only", nargs="*", default=(), help="parts to run")
    asked = parser.parse_args()
    return Settings(asked.smoke, asked.out, asked.commit, 1 if asked.smoke else asked.repeats, tuple(asked.only))


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def exact_convolutions() -> None:
    """No TF32 in convolutions, torch's default: a vision tower's patch embedding is one. Process-wide."""
    torch.backends.cudnn.allow_tf32 = False


def times_ms(call: Callable[[], Any], *, repeats: int, warmup: int = 2) -> list[float]:
    """Milliseconds of each of `repeats` calls."""
    on_gpu = torch.cuda.is_available()
    for _ in range(warmup):
        call()
    if not on_gpu:
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e3)
        return found
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, stop in marks:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


def slowest_ms(call: Callable[[], Any], repeats: int) -> list[float]:
    """Milliseconds of a call, of the slower rank; ranks start together. A repeat is the mean of CALLS calls, as layers come."""

    def several() -> None:
        for _ in range(CALLS):
            call()

    call()
    found = []
    for repeat in range(repeats + 1):
        dist.barrier()
        ms = times_ms(several, repeats=1, warmup=0)[0] / CALLS
        found += [ms] if repeat else []  # the first one warms up
    slowest: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(slowest, found)
    return [max(values) for values in zip(*slowest, strict=True)]


def wall_ms(call: Callable[[], Any]) -> tuple[float, float]:
    """(milliseconds of wall clock, allocator's peak in GiB) of one call on this rank: ranks start together, the device is
    synchronised on both sides. Collective."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    start = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def causal_flops(lengths: Sequence[int], heads: int, head_dim: int, *, causal: bool = True) -> float:
    """Forward attention: 2 * L^2 * H * D a causal document (4 for full). Backward counts 2.5 times that."""
    return sum((2 if causal else 4) * length * length * heads * head_dim for length in lengths)


def cu_seqlens(lengths: Sequence[int], where: torch.device) -> torch.Tensor:
    """[S+1] int32."""
    return torch.tensor([0, *lengths]).cumsum(0).to(where, torch.int32)


@dataclass
class Report:
    """Rows of one table; printed as they come, written at the end."""

    name: str
    settings: Settings
    about: str  # one paragraph: what is timed, how FLOPs are counted
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> dict[str, Any]:
        """Adds a row. `ms` lists every repeat; `median_ms` is added."""
        for key in [key for key in row if key.endswith("ms") and isinstance(row[key], list)]:
            row["median_" + key] = round(statistics.median(row[key]), 4)
            row[key] = [round(value, 4) for value in row[key]]
        self.rows.append(row)
        print(" ".join(f"{k}={_short(v)}" for k, v in row.items() if not isinstance(v, list)), flush=True)
        return row

    def skip(self, reason: str, **row: Any) -> None:
        """A case that cannot run here, with the reason."""
        self.add(**row, skipped=reason.splitlines()[0][:200])

    def save(self, *, bars: Callable[[Mapping[str, Any]], tuple[str, str, float] | None], unit: str) -> None:
        """JSON and a bar picture; bars: row -> (panel, label, value), or None to leave it out."""
        self.settings.out.mkdir(parents=True, exist_ok=True)
        path = self.settings.out / f"{self.name}.json"
        document = {"name": self.name, "about": self.about, "smoke": self.settings.smoke, **origin(self.settings)}
        path.write_text(json.dumps({**document, "rows": self.rows}, indent=1, default=str) + "\n", encoding="utf-8")
        found = [bar for row in self.rows if "skipped" not in row and (bar := bars(row))]
        path.with_suffix(".png").write_bytes(_picture(found, f"{self.name} ({document['hardware']['device']})", unit))
        print(f"wrote {path} and {path.with_suffix('.png').name}", flush=True)


def origin(asked: Settings) -> dict[str, Any]:
    """Hardware, versions, commit and command."""
    known = provenance(ROOT)
    if asked.commit:
        known["commit"], known["dirty"] = asked.commit, False
    return {"hardware": hardware(), "command": " ".join(["python", *sys.argv]), **known}


def hardware() -> dict[str, Any]:
    """The device as the driver names it."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "threads": torch.get_num_threads()}
    seen = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "device": seen.name,
        "devices": torch.cuda.device_count(),
        "memory_gib": round(seen.total_memory / 2**30, 1),
        "sms": seen.multi_processor_count,
        "driver": driver,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _picture(bars: Sequence[tuple[str, str, float]], title: str, unit: str) -> bytes:
    """One panel a name, one bar a label."""
    panels = list(dict.fromkeys(panel for panel, _, _ in bars)) or ["nothing ran"]
    tallest = max([sum(1 for bar in bars if bar[0] == panel) for panel in panels])
    figure = Figure(figsize=(4.6 * len(panels), 1.2 + 0.32 * max(tallest, 2)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for column, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), column + 1)
        mine = [(label, value) for name, label, value in bars if name == panel]
        drawn = axes.barh([label for label, _ in mine], [value for _, value in mine], color="#4c78a8")
        axes.bar_label(drawn, fmt="%.4g", fontsize=7, padding=2)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(panel, fontsize=9)
        axes.set_xlabel(unit, fontsize=8)
        axes.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=9)
    figure.set_dpi(110)
    canvas.draw()
    return _png(canvas)


def _png(canvas: FigureCanvasAgg) -> bytes:
    import io

    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()
