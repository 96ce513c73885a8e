"""recipes/large.py: dry runs under the recipes' layouts say what one rank of the other backend says."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import Qwen3_5Config, Qwen3_5MoeConfig

from longspan.engine.plan_command import main as plan
from longspan.errors import UserError
from longspan.observe import read_jsonl
from longspan.rl.train import load_job, main, train

RECIPE = str(Path(__file__).parents[2] / "recipes" / "large.py")
ONE_RANK = ["--engine.backend", "fsdp", "--engine.layout.no_sequence_parallel"]
ONE_RANK += [word for axis in ("dp", "cp", "tp", "ep") for word in (f"--engine.layout.{axis}", "1")]
installed = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


@installed
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "fewer"),
    [("images_9b_dry", []), ("agents_35b_dry", ["--engine.layout.dp", "1", "--engine.layout.ep", "2"])],
)
def test_a_dry_run_equals_one_rank_of_the_fsdp_backend(name, fewer, tmp_path):
    found = []
    for number, flags in enumerate((fewer, ONE_RANK)):
        folder = tmp_path / str(number)
        train(f"{RECIPE}:{name}", ["--run.folder", str(folder), *flags])
        found.append(read_jsonl(folder / "metrics.jsonl"))
    assert len(found[0]) == 2
    for here, there in zip(*found, strict=True):
        for metric in ("loss/ppo", "grad/norm", "logprob/mean"):
            assert abs(here[metric] - there[metric]) <= 1e-8 * max(1.0, abs(there[metric])), metric


@pytest.mark.parametrize(("name", "ranks"), [("images_9b", 8), ("agents_35b", 16)])
def test_a_real_run_asks_for_its_data_and_its_ranks(name, ranks, capsys):
    job = load_job(f"{RECIPE}:{name}")
    assert job.engine.layout.ranks == ranks
    assert main([f"{RECIPE}:{name}"]) == 2
    assert "Give --data FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "lengths", "gpus", "layout"),
    [
        (Qwen3_5Config, "1500/12288", 8, "dp4-cp2-ulysses-contiguous"),
        (Qwen3_5MoeConfig, "24000/65536", 16, "dp8-cp2-ulysses-contiguous"),
    ],
)
def test_the_plan_of_the_real_shapes_has_cp_2(config, lengths, gpus, layout, tmp_path):
    config(architectures=[config.__name__.replace("Config", "ForConditionalGeneration")]).save_pretrained(tmp_path)
    report = tmp_path / "plan.json"
    flags = ["--model", str(tmp_path), "--lengths", lengths, "--gpus", str(gpus), "--json", str(report)]
    assert plan(flags) == 0
    found = json.loads(report.read_text())
    choices = [(found["layout"], found["peak_memory_gib"])]
    choices += [(c["name"], c["peak_memory_gib"]) for c in found["alternatives"] if c["makespan_s"] is not None]
    assert any(name.startswith(layout) and peak < 141 for name, peak in choices), choices


CASES = [
    ("images_9b", Qwen3_5Config, ["--lengths", "1500/12288", "--visual-share", "0.4", "--trained-share", "0.5"]),
    ("agents_35b", Qwen3_5MoeConfig, ["--lengths", "24000/65536", "--freeze", "vision"]),
]


def checked(folder, job, flags):
    """`longspan plan` of a recipe's own layout, policy and budget."""
    report = folder / "plan.json"
    layout, engine = job.engine.layout, job.engine
    fixed = [
        "--layouts",
        layout.name,
        "--recompute",
        engine.recompute,
        "--max-tokens-per-rank",
        str(engine.max_tokens_per_rank),
    ]
    assert plan(["--model", str(folder), *flags, *fixed, "--json", str(report)]) == 0
    return json.loads(report.read_text())


@pytest.mark.parametrize(("name", "config", "flags"), CASES)
def test_the_plan_says_that_the_recipe_fits_its_gpus(name, config, flags, tmp_path):
    config(architectures=[config.__name__.replace("Config", "ForConditionalGeneration")]).save_pretrained(tmp_path)
    job = load_job(f"{RECIPE}:{name}")
    found = checked(tmp_path, job, flags)
    assert found["backend"] == "megatron" and found["layout"].startswith(job.engine.layout.name.removesuffix("-state"))
    assert found["max_tokens_per_rank"] == job.engine.max_tokens_per_rank <= found["room_tokens_per_rank"]
    assert found["peak_memory_gib"] < 0.94 * 141
    less = str(0.9 * found["peak_memory_gib"])
    with pytest.raises(UserError, match="no layout can run on"):
        checked(tmp_path, job, [*flags, "--gpu-memory-gib", less])


@pytest.mark.parametrize("name", ["images_9b_dry", "agents_35b_dry"])
def test_the_plan_reads_a_dry_runs_layout_and_model(name, tmp_path):
    job = load_job(f"{RECIPE}:{name}", ["--run.folder", str(tmp_path)])
    job.prepare()
    found = checked(tmp_path / "model", job, ["--lengths", "10/30"])
    assert found["layout"].startswith(job.engine.layout.name.removesuffix("-state")) and found["micro_steps"]
