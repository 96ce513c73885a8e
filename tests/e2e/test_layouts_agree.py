"""One recipe, one seed, two layouts: the curve at cp=1 is that at cp=2 while the rollouts agree. And the settings
that the main job leaves alone: a KL term against the frozen reference, old log-probs from the engine, mini-batches,
epochs, temperature.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from longspan.launch import launch
from longspan.observe import read_jsonl

RECIPE = str(Path(__file__).parents[2] / "recipes" / "digits_vl.py")
SMALL = {
    "policy.hidden": 64,
    "policy.layers": 2,
    "policy.mlp": 96,
    "policy.vision_layers": 1,
    "digits.images_max": 5,
    "warmup.steps": 2,
    "warmup.samples": 16,
    "warmup.schedule.warmup_steps": 0,
    "grpo.steps": 3,
    "grpo.prompts": 4,
    "grpo.group_size": 4,
    "grpo.eval_every": 0,
    "grpo.schedule.warmup_steps": 0,
    "engine.max_tokens_per_rank": 160,
}
RICH = {
    "grpo.loss.name": "ppo",
    "grpo.loss.options": "clip 0.2",
    "grpo.loss.kl": 0.1,
    "grpo.old_logprob": "engine",
    "grpo.mini_batch_prompts": 2,
    "grpo.epochs": 2,
    "grpo.temperature": 0.8,
    "grpo.advantage": "rloo",
}


def run_recipe(folder, settings):
    """The recipe on the ranks of this launch, with a reward that differs within groups from the first round on."""
    import sys

    from longspan import Engine, world
    from longspan.rl import Run
    from longspan.rl.train import load_job

    ranks = world().ranks
    settings = settings | {"engine.layout.cp": ranks, "run.folder": f"{folder}/cp{ranks}"}
    job = load_job(RECIPE, [part for name, value in settings.items() for part in (f"--{name}", *str(value).split())])
    recipe = sys.modules[type(job).__module__]
    recipe.DigitsTask.reward = lambda self, prompt, response: float(response[0] % 2)
    engine = Engine.build(replace(job.engine, model=f"{folder}/model"))
    run = Run(job.run, engine, job.stages)
    run.begin({})
    job.train(engine, run)
    run.finish()


def run_everything(folder):
    run_recipe(f"{folder}/plain", SMALL)
    run_recipe(f"{folder}/rich", SMALL | RICH)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from longspan.rl.train import load_job

    folder = tmp_path_factory.mktemp("layouts")
    for name in ("plain", "rich"):
        flags = [part for key, value in SMALL.items() for part in (f"--{key}", str(value))]
        load_job(RECIPE, [*flags, "--run.folder", str(folder / name)]).prepare()
    launch(run_everything, str(folder), ranks=2, timeout_s=58)
    return folder


def lines(runs, path, name="metrics.jsonl"):
    return [row for row in read_jsonl(runs / path / name) if row["stage"] == "grpo"]


def test_cp1_gives_the_curve_of_cp2(runs):
    launch(run_recipe, str(runs / "plain"), SMALL, ranks=1, timeout_s=50)
    assert lines(runs, "plain/cp1", "rows.jsonl") == lines(
        runs, "plain/cp2", "rows.jsonl"
    )  # the same rewards, row by row
    for one, two in zip(lines(runs, "plain/cp1"), lines(runs, "plain/cp2"), strict=True):
        for name in ("reward/mean", "loss/total", "entropy/mean", "logprob/mean", "grad/norm"):
            assert one[name] == pytest.approx(two[name], rel=2e-4, abs=1e-6), (name, one["step"])


def test_kl_epochs_and_recomputed_logprobs(runs):
    first, *later = lines(runs, "rich/cp2")
    assert all("loss/kl" in line and "loss/ppo" in line for line in (first, *later))
    assert later[-1]["loss/kl"] > 0  # the policy has left the reference
    assert [line["optimizer/step"] for line in (first, *later)] == [
        6,
        10,
        14,
    ]  # 2 of warm-up, 2 epochs x 2 mini-batches a round
    assert all(line["gap/max"] < 1e-5 for line in (first, *later))  # temperature 0.8 on both sides
    assert first["kl/old_mean"] != 0  # later mini-batches of the round are off-policy
    assert (runs / "rich" / "cp2" / "reference" / "config.json").exists()
