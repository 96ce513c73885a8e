"""What `longspan plan` prints: the candidates in a table, and the chosen one in sentences.

The table fits the console by wrapping layouts' names, no number is ever cut: a console too narrow for the numbers (about 60
columns) wraps lines itself.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from longspan.engine.advice import Candidate, Request

__all__ = ["print_plan"]

SHOWN = 8  # candidates of a search in the table
INDENT = "  "  # of what follows a name's first line
LEAST = 13  # columns of a layout's name: the indent, its longest word, "contiguous", and a hyphen
GAP = 2  # columns between columns


def print_plan(request: Request, found: Sequence[Candidate], report: dict[str, Any]) -> None:
    """found: the best first. report: what --json has."""
    console, best = Console(), found[0]
    shown = [each for each in found[: SHOWN if not request.layouts else None] if each.plan is not None]
    title = f"{len(request.lengths)} samples, {sum(request.lengths):,} tokens, {request.gpus} GPUs of {request.memory_gib:g} GiB"
    print_table(console, title, [_name(each) for each in shown], _figures(shown, best))
    sizes = ", ".join(f"cp {size}: {count}" for size, count in report["cp_sizes"].items())
    console.print(f"chosen: {best.name}, {best.budget:,} tokens a rank. Samples by CP size: {sizes}.")
    console.print(
        f"predicted {best.makespan_s:.4g} s, lower bound {report['lower_bound_s']:.4g} s, idle {report['idle_share']:.1%}"
        f"{_of_which(report)}, peak {best.peak_gib:.1f} GiB. Next bottleneck: {report['bottleneck']}."
    )
    for number, stage in enumerate(report["stages"]):
        where = f"stage {number}, busy {stage['busy_share']:.0%}" if len(report["stages"]) > 1 else "memory of a rank"
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in stage["memory_gib"].items() if gib >= 0.05)
        console.print(f"{where}: {sum(stage['memory_gib'].values()):.1f} GiB ({parts})", highlight=False)
    for sentence in report["why"]:
        console.print(f"why: {sentence}", highlight=False)
    for candidate in _refused(request, found):
        console.print(f"cannot run: {candidate.name}: {candidate.reason}", highlight=False)


def print_table(console: Console, title: str, names: Sequence[str], figures: dict[str, list[str]]) -> None:
    """A row a name, and a column for each list of `figures`, as wide as it needs; names take what is left."""
    needed = sum(_width(header, cells) + GAP for header, cells in figures.items())
    room = max(LEAST, console.width - needed)
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column in ("layout", *figures):
        table.add_column(column, no_wrap=True)
    for name, *cells in zip(names, *figures.values(), strict=True):
        table.add_row(textwrap.fill(name, room, subsequent_indent=INDENT), *cells)
    Console(width=max(console.width, needed + LEAST)).print(table)


def _width(header: str, cells: Sequence[str]) -> int:
    return max(len(line) for text in (header, *cells) for line in text.split("\n"))


def _name(candidate: Candidate) -> str:
    backend = " megatron" if candidate.backend == "megatron" else ""
    return candidate.layout.name + (" dynamic" if candidate.dynamic else "") + backend


def _figures(shown: Sequence[Candidate], best: Candidate) -> dict[str, list[str]]:
    """Columns of the table, by their headers."""
    found = {
        "recompute": ["\n".join([each.recompute, *each.offload]) for each in shown],
        "budget": [f"{each.budget:,}" for each in shown],
        "micro-\nsteps": [str(each.micro_steps) for each in shown],
        "predicted\ns": [f"{each.makespan_s:.4g}" for each in shown],
        "against\nbest": [f"{each.makespan_s / best.makespan_s:.2f}x" for each in shown],
        "bubble": [f"{each.played.bubble_share:.0%}" if each.played and each.layout.pp > 1 else "" for each in shown],
        "peak\nGiB": [f"{each.peak_gib:.1f}" for each in shown],
    }
    return found if any(found["bubble"]) else {name: cells for name, cells in found.items() if name != "bubble"}


def _refused(request: Request, found: Sequence[Candidate]) -> list[Candidate]:
    """Of the layouts that were asked for those that no policy runs, once each; of a search the first candidate."""
    refused = [candidate for candidate in found if candidate.plan is None]
    if not request.layouts:
        return refused[:1]
    able = {(*c.layout.axes.values(), c.layout.sequence_parallel) for c in found if c.plan is not None}
    last = {(*c.layout.axes.values(), c.layout.sequence_parallel): c for c in refused}
    return [candidate for cut, candidate in last.items() if cut not in able]


def _of_which(report: dict[str, Any]) -> str:
    return f" ({report['bubble_share']:.1%} the pipeline's bubble)" if report["bubble_share"] else ""
