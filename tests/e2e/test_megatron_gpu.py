"""benchmarks/megatron_gpu.py on the CPU: both kinds of parts with --smoke, the rows they must write, and what fails a run."""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.timeout(120)
def test_two_ranks_are_held_to_the_oracle_and_timed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "megatron_gpu.py"), "--smoke", "--out", str(tmp_path)]
    command += ["--only", "parity/pp2", "step/tp2-sp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "megatron_gpu.json").read_text(encoding="utf-8"))["rows"]
    held = {(row["layout"], row["dtype"]): row["held"] for row in rows if row["part"] == "parity"}
    assert held == {("dp1", "bfloat16"): True, ("pp2", "float32"): True, ("pp2", "bfloat16"): True}
    timed = [row["case"] for row in rows if row["part"] == "step"]
    assert timed == ["64k row", "64k mix", "optim_step"]
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("missed", "holds"),
    [
        (None, True),
        (("fsdp", "float32"), False),
        (("megatron", "float32"), False),
        (("megatron", "bfloat16"), False),
    ],
)
def test_a_row_of_either_backend_that_misses_its_limits_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, missed: tuple[str, str] | None, holds: bool
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("megatron_gpu")
    near = dict.fromkeys((*bench.FP32_LIMITS, *bench.BF16_CHECKS), 1e-6)

    def in_launches(measure: Any, ways: Sequence[Any], *arguments: Any, add: Any) -> None:
        for way in ways:
            add(way, **near | ({"gradient": 1e-3} if (way.backend, way.dtype) == missed else {}))

    monkeypatch.setattr(bench, "in_launches", in_launches)
    monkeypatch.setattr(bench, "write_truth", lambda *arguments: None)
    asked = SimpleNamespace(smoke=True, wants=lambda label: True)
    assert bench.parity(asked, SimpleNamespace(add=lambda **row: None)) is holds
