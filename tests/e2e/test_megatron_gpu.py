"""benchmarks/megatron_gpu.py on the CPU: both kinds of parts with --smoke and the rows they must write."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

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
