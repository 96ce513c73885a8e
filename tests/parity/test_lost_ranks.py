"""`longspan parity` where ranks die or are too slow: not a miss, since nothing is known of their numbers."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from longspan import cli
from longspan.errors import RankLost
from longspan.launch import launch

COMPARING = importlib.import_module("longspan.parity.compare")  # its package shows the function of that name
BASE = ["parity", "--model", "tiny:qwen3", "--lengths", "5,1,3", "--steps", "1", "--device", "cpu"]
DIED = "rank 1 failed first (failed: [0, 1]): the process died with exit code -9 (Killed)\nCurrent thread: in forward"


def test_too_little_time_is_status_3_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert cli.main([*BASE, "--layouts", "dp2", "--timeout-s", "0.01", "--json", str(out)]) == 3
    shown = capsys.readouterr().out
    assert "not known: dp2: ranks [0, 1] did not finish within 0.01 s. Raise timeout_s" in shown
    assert "--layouts dp2" in shown and "miss:" not in shown
    found = json.loads(out.read_text())
    assert found["passed"] is False and found["cells"] == [] and "did not finish" in found["lost"]["dp2"]


@pytest.mark.parametrize(("plant", "status"), [(None, 3), ("temperature-late", 1)])
def test_a_rank_that_died_leaves_the_other_layouts_their_figures(
    plant: str | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A miss among the layouts that ended (here: of a planted fault) is still a miss."""

    def killed_at_two_ranks(*arguments: Any, ranks: int, **settings: Any) -> list[Any]:
        if ranks == 2:
            raise RankLost(DIED)
        return launch(*arguments, ranks=ranks, **settings)

    monkeypatch.setattr(COMPARING, "launch", killed_at_two_ranks)
    out = tmp_path / "out.json"
    planted = [] if plant is None else ["--plant", plant]
    assert cli.main([*BASE, "--layouts", "cp2-ring,dp1,dp2", "--json", str(out), *planted]) == status
    shown = capsys.readouterr().out
    assert f"not known: cp2-ring, dp2: {DIED.splitlines()[0]}" in shown
    found = json.loads(out.read_text())
    assert {cell["layout"] for cell in found["cells"]} == {"dp1"} and found["lost"] == dict.fromkeys(
        ["cp2-ring", "dp2"], DIED
    )
    assert found["passed"] is False and all(cell["passed"] for cell in found["cells"]) == (plant is None)


def test_a_fault_is_not_caught_by_ranks_that_died(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any, **__: Any) -> list[Any]:
        raise RankLost(DIED)

    monkeypatch.setattr(COMPARING, "launch", killed)
    assert cli.main([*BASE, "--layouts", "dp1", "--plant", "temperature-late"]) == 3
    assert "planted fault 'temperature-late': not known: ranks were lost" in capsys.readouterr().out
    assert cli.main([*BASE, "--layouts", "dp1", "--dtype", "bfloat16"]) == 3, "nothing to compare with"
    assert "exit code -9 (Killed)" in capsys.readouterr().err
