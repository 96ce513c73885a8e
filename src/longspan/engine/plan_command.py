"""`longspan plan`: which layout to use for a model, GPUs and lengths, what it costs, and what the others would cost."""

import base64
import html
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from longspan.data import row_times
from longspan.data.cost import CostModel
from longspan.data.jsonl import read_jsonl
from longspan.data.machine import Machine
from longspan.data.shape import ModelShape
from longspan.data.stage_memory import StageMemory, Trained
from longspan.engine.advice import MOST_GPUS, Candidate, Request, advise, bound_s, cost_of, explain, memory_of
from longspan.engine.cuts import check_family
from longspan.engine.pipelines import slowest_stage
from longspan.engine.plan_text import print_plan
from longspan.errors import UserError
from longspan.layout import Layout, parse_layouts
from longspan.models.loading import read_config
from longspan.observe import check_writable

__all__ = ["PlanOptions", "main", "parse_lengths"]

SPREAD = 64  # samples drawn for a "mean/max" request
MOST_SAMPLES = 2**17  # of one plan
DIGITS = 12  # of a length or a count
DRAWN = (4096, 1024)  # samples and GPUs of a picture at most: some seconds, and as many pixels as an image has
FREEZE = ("vision", "embeddings", "layers")


@dataclass(frozen=True)
class PlanOptions:
    """Choose a layout, a token budget and a recomputation policy; exit status 0, or 2 where nothing fits."""

    model: str
    """"tiny:<family>", a local Hugging Face folder (a config.json is enough), or a hub id."""
    lengths: str | None = None
    """Tokens a sample: "2000x63,65536" (63 of 2,000 and one of 65,536), or "mean/max" such as "4000/64000"."""
    samples: str | None = None
    """JSONL file of samples; their lengths are used."""
    histogram: str | None = None
    """JSON file {length: count}."""
    gpus: int | None = None
    """Number of GPUs; by default this machine's."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU; by default that of this machine's GPU, or where there is none of --machine."""
    layouts: str | None = None
    """Rank only these: comma-separated layouts such as tp2-sp,pp2,tp2-cp2, as `longspan parity` takes them. All have as many ranks;
    that many is --gpus' default. tp and pp go to the megatron backend."""
    backend: Literal["fsdp", "megatron", "any"] | None = None
    """Whose layouts are searched, by default fsdp's; with --layouts, whose those without tp and pp are. An explicit fsdp refuses tp
    and pp."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Only this policy."""
    max_tokens_per_rank: int | None = None
    """At most so many tokens a rank, where the memory holds more."""
    freeze: str = ""
    """Parts without gradients, comma-separated: vision, embeddings, layers."""
    machine: str = "h200"
    """Machine constants: a shipped name, or a JSON file from `longspan bench --calibrate`."""
    trained_share: float = 1.0
    """Tokens that are trained on, of all: the output layer runs on these."""
    visual_share: float = 0.0
    """Visual tokens, of all."""
    compile: bool = False
    """Plan for EngineConfig(compile=True), which keeps other tensors."""
    picture: str | None = None
    """Write the schedule (ranks x time, one colour a sample) to this .png or .html file."""
    json: str | None = None
    """Write makespan_s, lower_bound_s, peak_memory_gib, layout, micro_steps and the alternatives to this file."""


def main(arguments: Sequence[str]) -> int:
    """Entry of the command."""
    options = tyro.cli(PlanOptions, args=list(arguments), prog="longspan plan")
    if options.json is not None:
        check_writable("--json", Path(options.json))
    if options.picture is not None:
        if Path(options.picture).suffix not in (".png", ".html"):
            raise UserError(f"--picture {options.picture} must end in .png or .html")
        check_writable("--picture", Path(options.picture))
        if options.json is not None and Path(options.json).resolve() == Path(options.picture).resolve():
            raise UserError(f"--json and --picture both name {options.json}. Name two files")
    request = _request(options)
    if options.picture is not None and (len(request.lengths) > DRAWN[0] or request.gpus > DRAWN[1]):
        raise UserError(
            f"--picture draws at most {DRAWN[0]} samples on {DRAWN[1]} GPUs, and these are {len(request.lengths)} on "
            f"{request.gpus}. Leave it out, or plan fewer"
        )
    found = advise(request)
    report = _report(request, found)
    print_plan(request, found, report)
    if options.json is not None:
        _write("--json", Path(options.json), _written(report).encode())
    if options.picture is not None:
        path = Path(options.picture)
        _write("--picture", path, _picture(request, found[0], report, html_page=path.suffix == ".html"))
    return 0


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror}. Name another file") from error


def _request(options: PlanOptions) -> Request:
    machine = Machine.load(options.machine)
    config = read_config(options.model).to_dict()
    shape = ModelShape.from_config(config)
    layouts = tuple(parse_layouts(options.layouts).values()) if options.layouts is not None else ()
    backend, left_out = _backend(options, config, layouts)
    if 0 < options.visual_share <= 1 and shape.vision is None:
        raise UserError(
            f"visual_share={options.visual_share:g} needs a vision tower, and {options.model} has none. Leave it out"
        )
    most = options.max_tokens_per_rank
    if most is not None and most < 1:
        raise UserError(f"max_tokens_per_rank={most} must be a positive number of tokens")
    request = Request(
        shape,
        _lengths(options),
        _gpus(options, layouts),
        options.gpu_memory_gib if options.gpu_memory_gib is not None else _memory_gib(machine),
        machine,
        recurrent=shape.linear_layers > 0,
        windowed=shape.window is not None,
        trained_share=options.trained_share,
        visual_share=options.visual_share,
        compile=options.compile,
        backend=backend,
        left_out=left_out,
        layouts=layouts,
        recompute=options.recompute,
        most_tokens=most,
        trained=_trained(options.freeze, shape),
    )
    if request.gpus < 1 or not 0 < request.memory_gib < float("inf"):
        raise UserError(f"gpus={request.gpus} and gpu_memory_gib={request.memory_gib:g} must be above 0 and finite")
    if request.gpus > MOST_GPUS:
        raise UserError(f"gpus={request.gpus} is above {MOST_GPUS}, the most that are planned. Use fewer")
    return request


def _backend(
    options: PlanOptions, config: dict[str, Any], layouts: Sequence[Layout]
) -> tuple[Literal["fsdp", "megatron", "any"], str]:
    """Whose layouts are searched, and why megatron's are not where "any" asked for them."""
    cut = next((layout for layout in layouts if layout.tp * layout.pp > 1), None)
    if options.backend == "fsdp" and cut is not None:
        raise UserError(
            f"--layouts {cut.name} has tp or pp, which need backend='megatron'; the fsdp backend runs dp, cp and ep. "
            f"Leave --backend out, or give megatron or any"
        )
    if options.backend in (None, "fsdp") and cut is None:
        return "fsdp", ""
    try:
        check_family(config.get("architectures"))
        if options.compile:
            raise UserError(
                "compile=True is not built for backend='megatron'. Leave --compile out, or use backend='fsdp'"
            )
    except UserError as error:
        if options.backend == "megatron" or cut is not None:
            raise
        return "fsdp", f"megatron's layouts are left out: {error}"
    return options.backend or "fsdp", ""


def _gpus(options: PlanOptions, layouts: Sequence[Layout]) -> int:
    """GPUs to plan for: layouts are only ranked on equally many."""
    ranks = sorted({layout.ranks for layout in layouts})
    if len(ranks) > 1:
        raise UserError(
            f"--layouts {options.layouts} need {', '.join(map(str, ranks))} ranks. Rank layouts of equally many: add dp to the smaller ones"
        )
    if options.gpus is not None:
        return options.gpus
    return ranks[0] if ranks else max(1, torch.cuda.device_count())


def _trained(freeze: str, shape: ModelShape) -> Trained:
    known = [part for part in FREEZE if part != "vision" or shape.vision is not None]
    parts = [part.strip() for part in freeze.split(",") if part.strip()]
    if not set(parts) < set(known):
        wrong = "leaves nothing to train" if set(parts) == set(known) else "names what this model has not"
        raise UserError(f"freeze={freeze!r} {wrong}: name some of {', '.join(known)}, and leave one to train")
    return Trained(float("layers" not in parts), "embeddings" not in parts, float("vision" not in parts))


def _memory_gib(machine: Machine) -> float:
    if not torch.cuda.is_available():
        return machine.memory_gib
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def _lengths(options: PlanOptions) -> tuple[int, ...]:
    given = [name for name in ("lengths", "samples", "histogram") if vars(options)[name] is not None]
    if len(given) != 1:
        raise UserError(f"give exactly one of --lengths, --samples, --histogram; got {given or 'none'}")
    if options.samples is not None:
        return tuple(len(sample.input_ids) for sample in read_jsonl(options.samples))
    if options.histogram is not None:
        return read_histogram(Path(options.histogram))
    return parse_lengths(options.lengths or "")


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "2000x63,65536" -> 63 times 2000 and one 65536. "mean/max" -> 64 lengths of a long-tailed (exponential) spread."""
    if "/" in text:
        mean, largest = (_positive(part, text) for part in text.split("/", 1))
        if mean > largest:
            raise UserError(f"lengths {text!r}: the mean {mean} is above the maximum {largest}")
        drawn = [min(largest, max(1, round(-mean * math.log(1 - (i + 0.5) / SPREAD)))) for i in range(SPREAD - 1)]
        return (*drawn, largest)
    found: list[int] = []
    for part in text.split(","):
        length, times, count = part.partition("x")
        many = _positive(count, text) if times else 1
        _check_count(len(found) + many, text)
        found += [_positive(length, text)] * many
    return tuple(found)


def read_histogram(path: Path) -> tuple[int, ...]:
    """A JSON object {length: count}, as lengths."""
    try:
        counts = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--histogram {path} cannot be read: {error}") from error
    if not isinstance(counts, dict) or not counts:
        raise UserError(f'--histogram {path} must be a JSON object of lengths and counts, such as {{"2000": 63}}')
    lengths: list[int] = []
    for length, count in counts.items():
        many = _positive(str(count), str(path))
        _check_count(len(lengths) + many, str(path))
        lengths += [_positive(str(length), str(path))] * many
    return tuple(lengths)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a length stands in it twice, and only the last would count")
    return found


def _check_count(many: int, text: str) -> None:
    if many > MOST_SAMPLES:
        raise UserError(
            f"lengths {text!r} are {many} samples or more, above the {MOST_SAMPLES} that are planned at once. "
            f"Give the samples of one optimizer step"
        )


def _positive(word: str, text: str) -> int:
    if not word.strip().isdecimal() or len(word) > DIGITS or int(word) < 1:
        raise UserError(
            f"lengths {text!r}: {word!r} is not a positive number of at most {DIGITS} digits. "
            f"Write for example 2000x63,65536 or 4000/64000"
        )
    return int(word)


def _report(request: Request, found: Sequence[Candidate]) -> dict[str, Any]:
    best = found[0]
    cost = slowest_stage(cost_of(request, best), request.lengths, best.layout.cp)
    times = iter(row_times([row for rows in best.placed.micro_steps for row in rows], request.lengths, cost).tolist())
    steps = [
        [{"samples": list(row.samples), "start": row.start, "size": row.size, "seconds": next(times)} for row in rows]
        for rows in best.placed.micro_steps
    ]
    busy = sum(row["seconds"] * row["size"] for rows in steps for row in rows)
    busy_s = (busy,) if best.played is None else best.played.busy_s
    stages = _stages(request, best)
    return {
        "makespan_s": best.makespan_s,
        "lower_bound_s": bound_s(request, best),
        "peak_memory_gib": best.peak_gib,
        "idle_share": 1.0 - sum(busy_s) / (best.makespan_s * best.data_ranks * len(busy_s)),
        "bubble_share": 0.0 if best.played is None else best.played.bubble_share,
        "backend": best.backend,
        "layout": best.layout.name,
        "dynamic_cp": best.dynamic,
        "max_tokens_per_rank": best.budget,
        "room_tokens_per_rank": best.room,
        "recompute": best.recompute,
        "offload": list(best.offload),
        "cp_sizes": {str(size): count for size, count in sorted(_sizes(best).items())},
        "bottleneck": _bottleneck(cost, request, best, stages),
        "stages": [
            {
                "busy_share": busy / (best.makespan_s * best.data_ranks),
                "memory_gib": {n: v / 2**30 for n, v in parts.items()},
            }
            for busy, parts in zip(busy_s, stages, strict=True)
        ],
        "why": explain(request, found),
        "micro_steps": steps,
        "alternatives": [
            {
                "name": c.name,
                "makespan_s": None if c.plan is None else c.makespan_s,
                "peak_memory_gib": c.peak_gib,
                "bubble_share": 0.0 if c.played is None else c.played.bubble_share,
                "reason": c.reason,
            }
            for c in found[1:]
        ],
    }


def _written(report: dict[str, Any]) -> str:
    """JSON, a micro-step a line."""
    rest = json.dumps({name: value for name, value in report.items() if name != "micro_steps"}, indent=2)
    steps = ",\n".join(f"    {json.dumps(rows)}" for rows in report["micro_steps"])
    return f'{rest[:-2]},\n  "micro_steps": [\n{steps}\n  ]\n}}\n'


def _stages(request: Request, candidate: Candidate) -> list[dict[str, float]]:
    """Bytes by cause at the peak, of a rank of each pipeline stage."""
    memory = memory_of(request, candidate)
    return (
        memory.by_rank(*candidate.peak_row) if isinstance(memory, StageMemory) else [memory.parts(*candidate.peak_row)]
    )


def _sizes(candidate: Candidate) -> dict[int, int]:
    """CP size -> number of samples that run at it."""
    sizes: dict[int, int] = {}
    for rows in candidate.placed.micro_steps:
        for row in rows:
            if row.samples:
                sizes[row.size] = sizes.get(row.size, 0) + len(row.samples)
    return sizes


def _bottleneck(cost: CostModel, request: Request, candidate: Candidate, stages: Sequence[dict[str, float]]) -> str:
    """The largest part of the slowest stage's time and of the fullest one's memory: what to look at next."""
    samples: dict[int, list[int]] = {}
    for row in (row for rows in candidate.placed.micro_steps for row in rows):
        samples.setdefault(row.size, []).extend(row.samples)
    totals: dict[str, float] = {}
    for size, mine in samples.items():
        lengths = np.array([request.lengths[i] for i in mine], dtype=np.float64)
        for name, seconds in cost.parts(lengths, size).items():
            totals[name] = totals.get(name, 0.0) + float(seconds.sum())
    memory = max(stages, key=lambda parts: sum(parts.values()))
    return f"time: {max(totals, key=totals.__getitem__)}; memory: {max(memory, key=memory.__getitem__)}"


def _picture(request: Request, best: Candidate, report: dict[str, Any], *, html_page: bool) -> bytes:
    """Rows on data ranks over time, as PNG or in a page; of a pipeline those of its slowest stage."""
    steps = report["micro_steps"]
    figure = Figure(figsize=(10, 1 + 0.4 * best.data_ranks))
    FigureCanvasAgg(figure)
    axes, start = figure.subplots(), 0.0
    cost = slowest_stage(cost_of(request, best), request.lengths, best.layout.cp)
    for rows in steps:
        for row in rows:
            left = start
            for i in row["samples"]:
                width = cost(request.lengths[i], row["size"])
                axes.barh(
                    row["start"] + row["size"] / 2 - 0.5,
                    width,
                    height=row["size"] * 0.95,
                    left=left,
                    color=f"C{i % 10}",
                    edgecolor="white",
                )
                left += width
        start += max(row["seconds"] for row in rows)
        axes.axvline(start, color="black", linewidth=0.5)
    label = "rank" if best.data_ranks == request.gpus else "data rank"
    axes.set(xlabel="seconds (predicted)", ylabel=label, yticks=range(best.data_ranks), title=best.name)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=120, bbox_inches="tight")
    if not html_page:
        return image.getvalue()
    body = html.escape(json.dumps(report, indent=2)[:20000])
    picture = base64.b64encode(image.getvalue()).decode()
    return f"<h1>{html.escape(best.name)}</h1><img src='data:image/png;base64,{picture}'><pre>{body}</pre>".encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
