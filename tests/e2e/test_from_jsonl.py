"""recipes/from_jsonl.py: SFT and a policy loss on a file of trajectories; what is wrong with the file is said at
start.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan import Sample
from longspan.data.jsonl import read_jsonl as read_samples
from longspan.data.jsonl import write_jsonl
from longspan.observe import read_jsonl
from longspan.rl.train import load_job, main, train

RECIPE = str(Path(__file__).parents[2] / "recipes" / "from_jsonl.py")


def write_rows(path: Path, *, policy: bool) -> None:
    """24 ragged rows over 97 ids that repeat a few tokens, so that there is something to learn."""
    random = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(24):
        length = int(torch.randint(6, 30, (1,), generator=random))
        ids = torch.randint(5, 13, (length + 1,), generator=random)
        fields = {"advantage": torch.ones(length), "old_logprob": torch.full((length,), -4.5)} if policy else {}
        samples.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields=fields))
    write_jsonl(path, samples)


def test_sft_learns_and_names_its_rows(tmp_path):
    write_rows(tmp_path / "rows.jsonl", policy=False)
    flags = ["--data", str(tmp_path / "rows.jsonl"), "--run.folder", str(tmp_path / "run"), "--engine.layout.cp", "2"]
    result = train(RECIPE, [*flags, "--training.optimizer.lr", "1e-2"])
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["loss/cross_entropy"] > 4.5 and result["training"]["loss/cross_entropy"] < 3.5
    rows = [row["row"] for line in read_jsonl(tmp_path / "run" / "rows.jsonl") for row in line["rows"]]
    assert sorted(rows[:24]) == sorted(f"line-{number}" for number in range(1, 25))  # an epoch holds each row once
    assert (tmp_path / "run" / "report.html").exists()


def test_what_is_wrong_is_said_before_any_rank_starts(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", policy=False)
    data = ["--data", str(tmp_path / "rows.jsonl"), "--run.folder", str(tmp_path / "run")]
    assert main([RECIPE]) == 2
    assert "Give --data FILE" in capsys.readouterr().err
    assert main([RECIPE, "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl does not exist" in capsys.readouterr().err
    assert main([RECIPE, *data, "--training.loss.name", "ppo"]) == 2
    assert "sample 0 has no field" in capsys.readouterr().err
    assert main([RECIPE, *data, "--training.samples", "25"]) == 2
    assert "training.samples=25 is more than the 24 rows" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_the_model_cannot_take_is_said_before_the_first_step(tmp_path, capsys):
    """A row longer than budget x cp, or an id outside the vocabulary, in the last line of the file."""
    for name, ids, said in (("long", [5] * 200, "sample 24 has 199 tokens"), ("id", [5, 970, 6], "sample 24")):
        write_rows(tmp_path / f"{name}.jsonl", policy=False)
        last = torch.tensor(ids)
        rows = [*read_samples(tmp_path / f"{name}.jsonl"), Sample(last[:-1], last[1:], torch.ones(len(ids) - 1))]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        run = ["--run.folder", str(tmp_path / name), "--engine.max-tokens-per-rank", "64", "--engine.layout.cp", "2"]
        assert main([RECIPE, "--data", str(tmp_path / f"{name}.jsonl"), *run]) == 2
        shown = capsys.readouterr().err
        assert said in shown and "sample 0 is line 1" in shown, shown
        assert not (tmp_path / name / "metrics.jsonl").exists() or not read_jsonl(tmp_path / name / "metrics.jsonl")
    write_jsonl(tmp_path / "masked.jsonl", [Sample([5, 6], [6, 7], [0, 0])] * 8)
    assert main([RECIPE, "--data", str(tmp_path / "masked.jsonl")]) == 2
    assert "every mask is 0" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", policy=False)
    run = tmp_path / "run"
    run.mkdir()
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "file.write('somewhere pid 1'); file.flush(); print('held', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run / "lock")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        assert main([RECIPE, "--data", str(tmp_path / "rows.jsonl"), "--run.folder", str(run)]) == 2
        holder.kill()
    assert "in use by somewhere pid 1" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["lock"]


def test_policy_loss_settings_reach_the_objective(tmp_path):
    write_rows(tmp_path / "rows.jsonl", policy=True)
    flags = [
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--training.loss.name",
        "ppo",
        "--training.loss.options",
        "clip",
        "0.3",
    ]
    job = load_job(RECIPE, flags)
    assert job.training.loss.objective().options.clip == pytest.approx(0.3)
    job.prepare()
