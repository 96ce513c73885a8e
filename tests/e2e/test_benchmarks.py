"""Every benchmark script runs on CPU with --smoke and writes its JSON and picture; the numbers mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    ("attention", []),
    ("head", []),
    ("mixers", ["--only", "64k mix"]),
    ("deltanet", ["--only", "64k row", "heads"]),
    ("step", ["--only", "cp/64k mix"]),
    ("memory", ["--only", "table/cp1/full/16"]),
    ("memory_model", ["--only", "0.6b/32k"]),
    ("scaling", ["--only", "scale/64k"]),
]


@pytest.mark.timeout(120)  # two processes that import transformers, beside other tests
@pytest.mark.parametrize(("name", "arguments"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_benchmark_runs(name: str, arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--smoke", "--out", str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert written["smoke"] is True
    assert written["rows"]
    assert {"hardware", "versions", "commit", "command"} <= set(written)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
