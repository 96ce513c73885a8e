"""`longspan plan`: numbers in its JSON, a picture, and errors that say the smallest change that would work."""

import json

import pytest

from longspan.cli import main
from longspan.engine.plan_command import parse_lengths
from longspan.errors import UserError


def test_lengths_are_read():
    assert parse_lengths("2000x3,65536") == (2000, 2000, 2000, 65536)
    drawn = parse_lengths("4000/64000")
    assert max(drawn) == 64000 and 2000 < sum(drawn) / len(drawn) < 6000
    for text in ("", "12,", "0", "-3", "3x0", "9/4"):
        with pytest.raises(UserError, match="lengths"):
            parse_lengths(text)


def test_plan_reports_a_schedule_and_its_bound(tmp_path):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.html"
    command = ["plan", "--model", "tiny:qwen3", "--gpus", "4", "--gpu-memory-gib", "139", "--lengths", "2000x63,65536"]
    assert main([*command, "--json", str(out), "--picture", str(picture)]) == 0
    report = json.loads(out.read_text())
    assert 0 < report["lower_bound_s"] <= report["makespan_s"]
    assert 0 < report["peak_memory_gib"] <= 139
    placed = sorted(sample for rows in report["micro_steps"] for row in rows for sample in row["samples"])
    assert placed == list(range(64))
    for rows in report["micro_steps"]:
        assert sum(row["size"] for row in rows) == 4
    assert all(a["makespan_s"] is None or a["makespan_s"] >= report["makespan_s"] for a in report["alternatives"])
    assert picture.read_text().startswith("<h1>")


def test_a_row_that_fits_nowhere_names_the_smallest_change(capsys):
    command = ["plan", "--model", "tiny:qwen3", "--gpus", "2", "--gpu-memory-gib", "1", "--lengths", "90000000"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "90000000 tokens" in message and "GiB a GPU" in message


def test_contradictory_settings_are_refused(capsys):
    assert main(["plan", "--model", "tiny:qwen3", "--gpus", "2"]) == 2
    assert "exactly one of" in capsys.readouterr().err
