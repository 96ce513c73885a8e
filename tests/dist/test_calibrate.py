"""`longspan bench --calibrate`: on two CPU ranks it measures every constant that they can show, and its file is a machine
for plan and engine."""

import json

import pytest

from longspan import Engine, EngineConfig, launch
from longspan.cli import main
from longspan.data.machine import Machine

KEPT = {"node_exchange_bytes_s", "linear_state_share"}  # one node, and a share that only many long rows show


def machine_of_engine(path):
    return Engine.build(EngineConfig(model="tiny:qwen3", machine=path)).planner.model.machine


@pytest.mark.timeout(200)
def test_a_calibrated_machine_is_used_by_plan_and_engine(tmp_path, capsys):
    path, plan = tmp_path / "mine.json", tmp_path / "plan.json"
    assert main(["bench", "--calibrate", str(path), "--ranks", "2", "--repeats", "2", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "one document of 512 tokens: predicted" in shown and "dp2, 4 layers" in shown
    base, mine = Machine.load("h200"), Machine.load(path)
    assert mine.node_ranks == 2 and mine.name.endswith("cpu")
    same = {name for name in Machine.__dataclass_fields__ if getattr(mine, name) == getattr(base, name)}
    assert same <= KEPT, same
    for name in ("matmul_flops", "head_flops", "attention_flops", "vision_flops", "exchange_bytes_s", "gather_bytes_s"):
        assert 1e4 < getattr(mine, name) < getattr(base, name), name
    command = ["plan", "--model", "tiny:qwen3", "--gpus", "2", "--lengths", "200x8", "--machine", str(path)]
    assert main([*command, "--gpu-memory-gib", "2", "--json", str(plan)]) == 0
    assert json.loads(plan.read_text())["makespan_s"] > 1e-3, "seconds of this machine, not of an H200"
    assert launch(machine_of_engine, str(path), ranks=1, timeout_s=60)[0] == mine


def test_what_cannot_be_measured_is_refused(tmp_path, capsys):
    assert main(["bench", "--calibrate", str(tmp_path / "mine.txt")]) == 2
    assert "must be a .json file" in capsys.readouterr().err
    assert main(["bench", "--ranks", "2"]) == 2
    assert "belongs to --calibrate" in capsys.readouterr().err
    assert main(["bench", "--calibrate", str(tmp_path / "mine.json"), "--base", "h9000"]) == 2
    assert "Shipped: ['h200']" in capsys.readouterr().err
