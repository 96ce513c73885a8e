"""What `longspan plan` prints in 80 columns: every number whole, whatever the layouts are called.

Control: a table that rich fits by itself, which cuts numbers and leaves the last column out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from longspan.cli import main
from longspan.engine import plan_text
from longspan.models.tiny import tiny

COMMANDS = {
    "dynamic": ["--gpus", "4", "--lengths", "2000x63,65536"],
    "pipelines": ["--gpus", "16", "--lengths", "2000x63,65536", "--backend", "any"],
    "many": ["--gpus", "64", "--lengths", "2000x63,65536", "--backend", "any"],
    "on the host": ["--gpus", "4", "--gpu-memory-gib", "10", "--lengths", "2000x9,65536"],
    "named": ["--layouts", "tp2-sp-cp2-pp2-vpp2,tp2-pp4-sp,dp2-cp2-pp2", "--lengths", "2000x63,65536"],
}
LONG = {
    "recompute": ["selective\ncheckpoints\nparameters"],
    "budget": ["131,072,000"],
    "micro-\nsteps": ["131072"],
    "predicted\ns": ["1.234e+05"],
    "against\nbest": ["1234.56x"],
    "peak\nGiB": ["1234.5"],
}


def fitted_by_rich(console: Console, title: str, names: Sequence[str], figures: dict[str, list[str]]) -> None:
    """The fault."""
    table = Table(title=title)
    table.add_column("layout", overflow="fold", min_width=20)
    for header in figures:
        table.add_column(header.replace("\n", " "))
    for cells in zip(names, *figures.values(), strict=True):
        table.add_row(*(cell.replace("\n", " ") for cell in cells))
    console.print(table)


def figures_of(report: dict) -> list[str]:
    """What the table must show."""
    shown = [report, *[each for each in report["alternatives"] if each["makespan_s"] is not None][:7]]
    found = [f"{report['max_tokens_per_rank']:,}", str(len(report["micro_steps"]))]
    for each in shown:
        against = f"{each['makespan_s'] / report['makespan_s']:.2f}x"
        found += [f"{each['makespan_s']:.4g}", against, f"{each['peak_memory_gib']:.1f}"]
    found += [f"{each['bubble_share']:.0%}" for each in shown[1:] if each["bubble_share"]]
    return found


def printed(folder: Path, capsys: pytest.CaptureFixture, command: list[str]) -> tuple[str, list[str]]:
    """All of it, and the figures that its table lacks."""
    model, out = str(folder / "model"), folder / "plan.json"
    tiny("qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
         num_attention_heads=16, num_key_value_heads=8, head_dim=128).save_pretrained(model)  # fmt: skip
    assert main(["plan", "--model", model, "--json", str(out), *command]) == 0
    said = capsys.readouterr().out
    table = said.partition("chosen: ")[0]
    report = json.loads(out.read_text())
    assert f"lower bound {report['lower_bound_s']:.4g} s" in " ".join(said.split())
    return said, [figure for figure in figures_of(report) if figure not in table.split()]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_number_is_cut_in_80_columns(tmp_path, capsys, monkeypatch, command) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said, missing = printed(tmp_path, capsys, command)
    assert not missing and "\u2026" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_a_table_that_rich_fits_is_caught(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(plan_text, "print_table", fitted_by_rich)
    said, missing = printed(tmp_path, capsys, COMMANDS["pipelines"])
    assert missing and "\u2026" in said


@pytest.mark.parametrize("width", [30, 80, 200])
def test_the_longest_figures_stay_whole(capsys, width) -> None:
    """Wider than a narrow console rather than cut; a name is there in pieces."""
    name = "dp128-cp8-tp8-pp16-vpp2-ep128-sp-ulysses-contiguous dynamic"
    plan_text.print_table(Console(width=width), "title", [name], LONG)
    said = capsys.readouterr().out
    words = said.split()
    assert all(word in words for cells in LONG.values() for cell in cells for word in cell.split())
    assert all(part in said for part in name.replace(" ", "-").split("-"))


@pytest.mark.parametrize("width", [30, 80])
def test_a_wrapped_name_does_not_look_like_the_next_row(capsys, width) -> None:
    """Only a row's first line begins at the left. Its pieces, indented, are the name."""
    names = ["dp128-cp8-tp8-pp16-vpp2-ep128-sp-ulysses-contiguous dynamic", "dp2"] * 2
    figures = {header: cells * len(names) for header, cells in LONG.items()}
    plan_text.print_table(Console(width=width), "title", names, figures)
    rows = capsys.readouterr().out.splitlines()
    rows = rows[max(number for number, line in enumerate(rows) if "\u2500" in line or "---" in line) + 1 :]
    left = [line for line in rows if line and not line.startswith(" ")]
    assert len(left) == len(names) and all(line.split()[0] in name for line, name in zip(left, names, strict=True))
    wrapped = [line for line in rows if line.startswith("  ") and line[2:3].strip()]
    assert wrapped and "".join(line.split()[0] for line in (left[0], *wrapped[: len(wrapped) // 2])) == names[
        0
    ].replace(" ", "")
