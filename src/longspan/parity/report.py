"""What `longspan parity` shows: a table with a row a layout, the worst token and the worst parameter, and JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from longspan.parity.cells import Cell, worst

COLUMNS = ("logprob", "gradient", "metrics", "calls", "leak", "weights", "ranks")
WIDTH = 110  # columns of a log file
NAMED = ("logprob", "gradient")  # what the lines under the table name


def render(
    cells: Sequence[Cell], title: str, *, plant: str | None = None, lost: Mapping[str, str] | None = None
) -> None:
    """Print the table and, below it, where the worst figures stand. lost: layouts of which nothing is known, and why."""
    lost = lost or {}
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("layout", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    for layout in layouts:
        own = [cell for cell in cells if cell.layout == layout]
        table.add_row(layout, *(_figure(worst(own, column)) for column in COLUMNS), _verdict(own))
    for layout in lost:
        table.add_row(layout, *("-" for _ in COLUMNS), "[yellow]not known[/yellow]")
    console.print(table)
    for check in NAMED:
        cell = worst(list(cells), check)
        if cell is not None:
            where = f"{cell.where} ({cell.layout}, {cell.case})" if cell.where else "every bit equal"
            console.print(f"worst {check}: {cell.figure:.2e} at {where}", highlight=False, soft_wrap=True)
    for cell in [cell for cell in cells if not cell.passed][:10]:
        line = f"miss: {cell.layout} {cell.check} [{cell.case}] {cell.figure:.3g} > {cell.limit:.3g} {cell.where}"
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    for line in _lost_lines(lost):
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if plant is not None:
        found = sorted({cell.check for cell in cells if not cell.passed})
        missing = "not known: ranks were lost" if lost else "NOT caught by any check"
        said = f"caught by {', '.join(found)}" if found else missing
        console.print(f"planted fault {plant!r}: {said}", style="bold", highlight=False)


def _lost_lines(lost: Mapping[str, str]) -> list[str]:
    """Which layouts of one launch were lost and what its ranks left; then the way out."""
    lines = []
    for said in dict.fromkeys(lost.values()):
        names = ", ".join(layout for layout, other in lost.items() if other == said)
        lines.append(f"not known: {names}: {said.splitlines()[0].rstrip(':')}")
    if lost:
        lines.append(
            f"Their numbers were neither right nor wrong. Run them by themselves (--layouts {next(iter(lost))}), with more time "
            "(--timeout-s) or on an idle machine; --json FILE keeps the ranks' stacks."
        )
    return lines


def _figure(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    text = "0" if cell.figure == 0 else f"{cell.figure:.1e}"
    return text if cell.passed else f"[red]{text}[/red]"


def _verdict(cells: Sequence[Cell]) -> str:
    missed = [cell for cell in cells if not cell.passed]
    return "[green]yes[/green]" if not missed else f"[red]no ({len(missed)} cells)[/red]"


def summary(cells: Sequence[Cell]) -> dict[str, object]:
    """The JSON: the three worst figures, whether all cells pass, and every cell."""
    return {
        "worst_logprob": _worst_figure(cells, "logprob"),
        "worst_gradient": _worst_figure(cells, "gradient"),
        "worst_calls": _worst_figure(cells, "calls"),
        "passed": bool(cells) and all(cell.passed for cell in cells),
        "cells": [cell.as_json() for cell in cells],
    }


def _worst_figure(cells: Sequence[Cell], check: str) -> float | str | None:
    """The largest figure of a check; "inf" as text, since JSON has no infinity; null where the check did not run."""
    found = [cell for cell in cells if cell.check == check]
    return (
        max(found, key=lambda cell: cell.figure if cell.figure == cell.figure else float("inf")).as_json()["figure"]
        if found
        else None
    )


def write_json(path: str, data: dict[str, object]) -> None:
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
