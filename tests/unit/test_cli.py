"""`longspan`: the table of commands, exit statuses, and a help that loads no model code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longspan import cli
from longspan.engine import EngineConfig
from longspan.errors import UserError
from longspan.parity import command
from longspan.parity.cells import Cell
from longspan.parity.compare import Comparison


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_help_loads_no_models() -> None:
    code = "import sys; from longspan.cli import main; main(['--help']); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["parity", "--no-such-option", "1"]])
def test_usage_errors_are_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert any(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layouts", "cp2-nonsense"], "nonsense"),
        (["--layouts", ","], "names no layout"),
        (["--plant", "nonsense"], "no fault we know"),
        (["--device", "shared", "--backend", "megatron"], "a GPU for each rank"),
        (["--model", "tiny:nonsense"], "nonsense"),
        (["--model", str(Path(__file__).parent)], "no readable config"),
        (["--lengths", "3,x"], "whole numbers"),
        (["--samples", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--samples", "a.jsonl", "--lengths", "3"], "Give one of them"),
        (["--layouts", "cp3-ulysses"], "divisible by 3"),
        (["--timeout-s", "0"], "timeout_s=0 must be above 0"),
        (["--timeout-s", "nan", "--plant", "shift"], "timeout_s=nan must be above 0"),
        (["--seed", "9" * 30], "must be 0 or more and below 2**63"),
        (["--lengths", "\u00b2"], "whole numbers"),
        (["--backend", "nonsense"], "nonsense"),
    ],
)
def test_parity_refuses_by_name(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parity", "--model", "tiny:qwen3", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err + shown.out


def test_parity_refuses_samples_outside_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input_ids": [1, 5000], "target_ids": [2, -100], "mask": [1, 0]}\n')
    assert cli.main(["parity", "--model", "tiny:qwen3", "--samples", str(file)]) == 2
    assert "sample 0: input_ids[1] is 5000, outside the vocabulary" in capsys.readouterr().err


def test_bench_refuses_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--timeout-s", "-1", "--lengths", "4"]) == 2
    assert "timeout_s=-1 must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [2**70, 2**63, -(2**63) - 1])
def test_seeds_of_more_than_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(UserError, match=f"seed={seed} must be a whole number of 64 bits"):
        EngineConfig(model="tiny:qwen3", seed=seed)


@pytest.mark.parametrize(
    ("option", "path", "why"),
    [
        ("--json", "/dev/null/x", "/dev/null is no folder"),
        ("--json", "/nowhere/x.json", "there is no folder /nowhere. Make it first"),
        ("--run.folder", "/dev/null/x", "/dev/null is no folder"),
        ("--run.folder", "/proc/x", "/proc is no folder"),
    ],
)
def test_train_refuses_at_start_what_it_could_not_write(
    option: str, path: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "digits_vl.py")
    assert cli.main(["train", recipe, option, path]) == 2
    assert f"{option.strip('-')}: {path} cannot be written, because {why}" in capsys.readouterr().err


def test_a_miss_is_status_1_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report names the worst token and parameter; the JSON has the pinned keys."""
    cells = [
        Cell("cp2-ring", "logprob", "packed", 1e-3, 1e-8, "sample 2, position 17"),
        Cell("cp2-ring", "gradient", "ppo", float("inf"), 1e-8, "model.embed_tokens.weight"),
        Cell("cp2-ring", "calls", "parts", 1e-15, 1e-12, "lm_head.weight"),
    ]
    found = Comparison(cells, {}, "", EngineConfig(model="tiny:qwen3"))
    monkeypatch.setattr(command, "compare", lambda request: found)
    out = tmp_path / "out.json"
    assert cli.main(["parity", "--model", "tiny:qwen3", "--plant", "shift", "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "sample 2, position 17" in shown and "model.embed_tokens.weight" in shown
    assert "'shift': caught by gradient, logprob" in shown
    found = json.loads(out.read_text())
    assert found["worst_logprob"] == 1e-3 and found["worst_gradient"] == "inf" and found["worst_calls"] == 1e-15
    assert found["passed"] is False and [cell["passed"] for cell in found["cells"]] == [False, False, True]


def test_parity_runs_and_passes(tmp_path: Path) -> None:
    """One process, from the command line to the JSON; then the same with a fault planted."""
    out = tmp_path / "out.json"
    base = ["parity", "--model", "tiny:qwen3", "--layouts", "dp1", "--lengths", "5,1,3", "--device", "cpu"]
    assert cli.main([*base, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["passed"] and found["worst_logprob"] < 1e-8 and found["worst_gradient"] < 1e-8
    assert {cell["layout"] for cell in found["cells"]} == {"dp1"}
    assert cli.main([*base, "--plant", "temperature-late"]) == 1
