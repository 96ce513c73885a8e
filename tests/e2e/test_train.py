"""The main job end to end on two processes: a stopped and resumed run is the uninterrupted one (K9, K10), cp=1
samples what cp=2 samples, SIGTERM saves first, and the run folder holds what it should."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.launch import launch
from longspan.observe import read_jsonl

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "digits_vl.py")
SMALL = {
    "policy.hidden": 64,
    "policy.layers": 2,
    "policy.mlp": 96,
    "policy.vision_layers": 1,
    "digits.images_max": 4,
    "digits.eval_prompts": 12,
    "warmup.steps": 2,
    "warmup.samples": 8,
    "warmup.schedule.warmup_steps": 0,
    "grpo.steps": 4,
    "grpo.prompts": 4,
    "grpo.mini_batch_prompts": 2,
    "grpo.group_size": 4,
    "grpo.eval_every": 2,
    "grpo.schedule.warmup_steps": 0,
    "engine.max_tokens_per_rank": 64,
}


def flags(**changes: object) -> list[str]:
    settings = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def stop_and_resume(folder: str) -> dict[str, list[tuple]]:
    """On each rank: run A in one go; run B stopped by SIGTERM in both stages and resumed each time."""
    from longspan import Engine
    from longspan.rl import Run
    from longspan.rl.train import load_job

    stops: dict[str, list[tuple]] = {"A": [], "B": []}
    asked: list[tuple[str, int]] = []
    for name, at in (("A", ()), ("B", (("warmup", 0), ("grpo", 5), None))):
        job = load_job(RECIPE, flags(run__folder=f"{folder}/{name}", run__checkpoint_every=1))
        recipe = sys.modules[type(job).__module__]

        class Task(recipe.DigitsTask):  # type: ignore[name-defined, misc]
            """Gets SIGTERM while it makes a given prompt; its reward differs within groups from the first round on."""

            def reward(self, prompt, response):
                return float(response[0] % 2)

            def _numbered(self, name, stream, index):
                if asked and asked[0] == (name, index):
                    asked.pop()
                    signal.raise_signal(signal.SIGTERM)
                return super()._numbered(name, stream, index)

        recipe.DigitsTask = Task
        for stop in at or (None,):
            asked[:] = [stop] if stop else []
            engine = Engine.build(replace(job.engine, model=f"{folder}/model"))
            run = Run(job.run, engine, job.stages)
            run.begin({})
            job.train(engine, run)
            run.finish()
            stops[name].append((run.position.stage, run.position.step, run.stopped))
    return stops


def comparable(rows: list[dict]) -> list[dict]:
    """Metrics without the clock and the memory."""
    clock = ("time/", "mem/", "plan/", "tok/per_s")
    return [{key: value for key, value in row.items() if not key.startswith(clock)} for row in rows]


def test_k9_stopped_and_resumed_equals_uninterrupted(tmp_path):
    from longspan.rl.train import load_job

    load_job(RECIPE, flags(run__folder=str(tmp_path))).prepare()
    stops = launch(stop_and_resume, str(tmp_path), ranks=2, timeout_s=55)
    assert stops[0] == stops[1]
    assert stops[0]["A"] == [("grpo", 4, False)]
    assert stops[0]["B"] == [("warmup", 1, True), ("grpo", 2, True), ("grpo", 4, False)]
    rows = {name: read_jsonl(tmp_path / name / "rows.jsonl") for name in "AB"}
    assert rows["A"] == rows["B"]
    ids = [row["prompt"] for line in rows["A"] if line["stage"] == "grpo" for row in line["rows"]]
    assert ids == [f"grpo-{number}" for number in range(16)]  # each prompt once, none skipped, none twice
    first, second = (comparable(read_jsonl(tmp_path / name / "metrics.jsonl")) for name in "AB")
    planned = {"plan/predicted_s", "plan/measured_s", "plan/idle_share"}
    assert all(planned <= row.keys() for row in read_jsonl(tmp_path / "A" / "metrics.jsonl") if row["step"])
    for one, other in zip(first, second, strict=True):
        assert {name: (one[name], other[name]) for name in one if one[name] != other[name]} == {}
    assert first[2]["step"] == 0 and "eval/pass@1" in first[2]
    assert all(row["reward/mixed_groups"] > 0 for row in first if row["stage"] == "grpo" and row["step"])
    gaps = [row["gap/max"] for row in first if "gap/max" in row]
    assert len(gaps) == 4 and max(gaps) < 1e-5  # fp32: sampler and trainer are one policy
    kept = sorted(path.name for path in (tmp_path / "B" / "checkpoints").iterdir())
    assert kept == ["grpo-000003", "grpo-000003.json", "grpo-000004", "grpo-000004.json"]


def wait_for(path: Path, stage: str, process: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not any(row["stage"] == stage for row in read_jsonl(path)):
        assert process.poll() is None and time.monotonic() < end, "no step came"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_command_resumes(tmp_path, number):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "longspan.cli", "train", RECIPE, *flags(run__folder=str(folder), grpo__steps=500)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for(folder / "metrics.jsonl", "grpo", process, 120)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, output
    last = read_jsonl(folder / "metrics.jsonl")[-1]
    marker = folder / "checkpoints" / f"grpo-{last['step']:06d}.json"
    assert json.loads(marker.read_text()) == {"stage": "grpo", "step": last["step"], "consumed": 4 * last["step"]}
    assert "tokens/micro_step/rank = 64" in output and "tokens/micro_step/group = 128" in output
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "versions.json",
        "metrics.jsonl",
        "rows.jsonl",
        "rollouts.jsonl",
        "report.html",
        "model",
    } <= names
    assert json.loads((folder / "config.json").read_text())["config"]["grpo"]["group_size"] == 4
    assert "data:image/png" in (folder / "report.html").read_text()


def test_a_recipe_that_is_wrong_is_refused_by_name(tmp_path, capsys):
    from longspan.rl.train import main

    assert main([str(tmp_path / "none.py")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert main([str(tmp_path / "empty.py")]) == 2
    assert "has no function config()" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([RECIPE, *flags(grpo__mini_batch_prompts=3)])
