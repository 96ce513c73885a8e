"""observe: the record, its copies, the progress line, phases, provenance, the token budget in three units (O2), the
report.
"""

import io
import json
import math
import re
import time

import pytest
import torch
from rich.console import Console

from longspan.errors import UserError
from longspan.observe import (
    MetricsWriter,
    Phases,
    Progress,
    budget_lines,
    check_makeable,
    check_writable,
    keep_until,
    provenance,
    read_jsonl,
    write_report,
)
from longspan.observe.copies import open_copies
from longspan.observe.metrics import append_jsonl
from longspan.observe.progress import headline


def test_o2_start_log_states_all_three_units():
    lines = budget_lines(4096, dp=3, cp=2, mixer="ring")
    found = {
        unit: int(number) for line in lines for unit, number in re.findall(r"^tokens/micro_step/(\w+) = (\d+)", line)
    }
    assert found == {"rank": 4096, "group": 8192, "all": 24576}


def test_metrics_are_plain_json_and_resume_drops_what_came_after(tmp_path):
    writer = MetricsWriter(tmp_path)
    for stage, step in (("warmup", 1), ("warmup", 2), ("grpo", 1), ("grpo", 2)):
        writer.write(stage, step, {"loss/total": 1.0 / 3, "bad": math.nan, "small": 1e-7})
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert rows[0]["bad"] == "nan" and rows[0]["small"] == 1e-7 and rows[0]["loss/total"] == pytest.approx(1 / 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "grpo", "st')  # a line cut by a crash
    keep_until(tmp_path / "metrics.jsonl", ("warmup", "grpo"), "grpo", 1)
    assert [(row["stage"], row["step"]) for row in read_jsonl(tmp_path / "metrics.jsonl")] == [
        ("warmup", 1),
        ("warmup", 2),
        ("grpo", 1),
    ]


def test_copies_named_but_missing_are_refused(tmp_path):
    assert open_copies((), tmp_path, {}) == []
    with pytest.raises(UserError, match="'mlflow' is unknown"):
        open_copies(("mlflow",), tmp_path, {})


def test_phases_add_up():
    phases = Phases(torch.device("cpu"))
    for _ in range(2):
        with phases("sample"):
            time.sleep(0.01)
    with phases("update"):
        pass
    numbers = phases.take()
    assert numbers["time/sample_s"] >= 0.02 and numbers["mem/sample_gib"] > 0.01
    assert numbers["time/step_s"] == pytest.approx(numbers["time/sample_s"] + numbers["time/update_s"])
    assert phases.take() == {"time/step_s": 0}


def test_progress_line_holds_the_promised_numbers():
    gap = {"gap/mean": 1e-7, "gap/p99": 2e-7, "gap/p99.9": 3e-7, "gap/max": 4e-7, "gap/share>0.5": 0.0}
    numbers = {"reward/mean": 0.5, "tok/per_s": 12345.0, "time/sample_s": 0.25, "mem/sample_gib": 0.5, **gap}
    text = headline(numbers)
    for part in ("reward 0.500", "tok/s 12,345", "1.0e-07 2.0e-07 3.0e-07 4.0e-07 0.0e+00", "sample 0.25s 0.50GiB"):
        assert part in text
    stream = io.StringIO()
    with Progress("grpo", 2, console=Console(file=stream, width=200)) as progress:
        progress.show(1, numbers)
    assert "grpo 1/2" in stream.getvalue()
    terminal = io.StringIO()
    with Progress("grpo", 2, console=Console(file=terminal, width=100, force_terminal=True)) as progress:
        progress.show(1, numbers)
    assert "1/2" in terminal.getvalue() and "reward 0.500" in terminal.getvalue()
    silent = io.StringIO()
    with Progress("grpo", 2, enabled=False, console=Console(file=silent)) as progress:
        progress.show(1, numbers)
        progress.say("x")
    assert silent.getvalue() == ""


def test_report_from_files_alone(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(3):
        writer.write("grpo", step, {"reward/mean": step / 3, "eval/pass@1": 0.1, "loss/total": math.inf})
    answers = [{"text": "<7>", "reward": 1.0, "logprob": -0.5}]
    row = {
        "prompt": "p",
        "text": "largest",
        "images": ["data:image/png;base64,AA"],
        "answer": "7",
        "responses": answers,
    }
    append_jsonl(tmp_path / "rollouts.jsonl", [{"stage": "grpo", "step": 2, **row}])
    (tmp_path / "config.json").write_text('{"a": "<b>"}')
    (tmp_path / "versions.json").write_text(json.dumps(provenance(tmp_path)))
    page = write_report(tmp_path).read_text()
    assert page.count("data:image/png;base64,") == 2 and "&lt;7&gt;" in page and "&lt;b&gt;" in page
    assert "not a git checkout" in page and "http" not in page.replace("http-equiv", "")


def test_what_cannot_be_written_is_refused_and_what_can_is_left_alone(tmp_path):
    there, new = tmp_path / "there.json", tmp_path / "new.json"
    there.write_text("kept")
    (tmp_path / "link.json").symlink_to(new)
    for path in (there, new, tmp_path / "link.json"):
        check_writable("--json", path)
    assert there.read_text() == "kept" and sorted(tmp_path.iterdir()) == sorted([there, tmp_path / "link.json"])
    for path, why in (
        (tmp_path, "it is a folder. Name a file in it"),
        (there / "x", f"{there} is no folder that this user may write to"),
        (tmp_path / "no" / "such" / "x.json", f"there is no folder {tmp_path}/no/such. Make it first, or name another"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(
            UserError, match=f"^--json: {re.escape(str(path))} cannot be written, because {re.escape(why)}"
        ):
            check_writable("--json", path)
    check_makeable("OUT", tmp_path)
    check_makeable("OUT", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    for path in (there / "x" / "y", there):
        with pytest.raises(UserError, match=f"^OUT: {path} cannot be written, because {there} is no folder"):
            check_makeable("OUT", path)
