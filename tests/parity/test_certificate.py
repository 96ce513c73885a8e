"""A run's certificate: the record of a short check from inside its ranks, what it says, and when it is made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.engine import EngineConfig
from longspan.launch import launch, world
from longspan.layout import Layout
from longspan.models.tiny import tiny
from longspan.parity.certificate import certify
from longspan.parity.command import main as parity
from longspan.parity.compare import model_hash
from longspan.parity.faults import planted
from longspan.parity.reference import Reference, auto_class
from longspan.rl.train import main

CONFIG = EngineConfig(
    model="tiny:qwen3_vl", layout=Layout(cp=2, mixer="ulysses"), dtype="bfloat16", freeze=("vision",), seed=3
)
RECIPE = str(Path(__file__).parents[2] / "recipes" / "digits_vl.py")
SMALL = {
    "policy.hidden": 64,
    "policy.layers": 2,
    "policy.mlp": 96,
    "policy.vision_layers": 1,
    "digits.eval_prompts": 12,
    "warmup.steps": 1,
    "warmup.samples": 4,
    "warmup.schedule.warmup_steps": 0,
    "grpo.steps": 1,
    "grpo.prompts": 2,
    "grpo.mini_batch_prompts": 2,
    "grpo.group_size": 2,
    "grpo.eval_every": 0,
    "grpo.schedule.warmup_steps": 0,
    "engine.max_tokens_per_rank": 64,
}


def _certify() -> dict[str, object]:
    return certify(CONFIG)


@pytest.fixture(scope="module")
def certificates() -> list[dict[str, Any]]:
    return launch(_certify, ranks=2, timeout_s=60, device="cpu")


def test_a_run_certifies_itself(certificates) -> None:
    """A bf16 run is certified in fp32, in full width; every rank has the same record."""
    first, second = certificates
    assert first == second
    assert first["passed"], first["misses"]
    assert (first["layout"], first["dtype"], first["model"]) == ("cp2-ulysses", "float32", "tiny:qwen3_vl")
    assert {"vision", "merger", "language", "embeddings"} <= set(first["worst_gradient"])
    assert all(part["figure"] < 1e-5 for part in first["worst_gradient"].values())
    assert first["worst_logprob"]["figure"] < 1e-5 and first["n_calls"]["figure"] < 1e-5
    assert first["leak_probe"]["figure"] == 0.0 and first["ranks_agree"]["figure"] == 0.0
    assert len(first["model_hash"]) == 40 and "torch" in first["versions"]


def test_a_certificate_says_what_it_is_of(certificates) -> None:
    """The hash is that of the weights; figures carry their limits and places; it is plain JSON, with versions."""
    record = json.loads(json.dumps(certificates[0]))
    weights = Reference("tiny:qwen3_vl", dtype=torch.float32, seed=3, value_head=True).weights()
    assert record["model_hash"] == model_hash(weights)
    other = Reference("tiny:qwen3_vl", dtype=torch.float32, seed=4, value_head=True).weights()
    assert record["model_hash"] != model_hash(other), "control: other weights, another hash"
    assert record["worst_logprob"]["limit"] == 1e-5 and record["worst_logprob"]["where"].startswith("sample ")
    assert record["n_calls"]["case"] == "last part first, weightless last"
    assert record["leak_probe"]["limit"] == 0.0 and record["metrics"]["limit"] == 1e-5
    assert all(place["where"] in weights for place in record["worst_gradient"].values())
    assert {"commit", "dirty", "python", "platform", "versions", "seconds", "backend"} <= set(record)
    assert {"longspan", "torch", "transformers"} <= set(record["versions"]) and record["seconds"] > 0


FAULTS = {"boundary-ulysses": {"leak", "logprob", "gradient"}, "lost-call": {"calls"}}


def _faulty() -> dict[str, dict[str, Any]]:
    found = {}
    for name in FAULTS:
        with planted(name):
            found[name] = certify(replace(CONFIG, model="tiny:qwen3", dtype="float64", freeze=()))
    return found


def test_a_fault_is_in_the_certificate() -> None:
    for name, record in launch(_faulty, ranks=2, timeout_s=60, device="cpu")[0].items():
        assert not record["passed"] and FAULTS[name] <= {miss["check"] for miss in record["misses"]}, name


def _certify_folder(folder: str) -> dict[str, object]:
    return certify(EngineConfig(model=folder, layout=Layout(cp=2, mixer="ring"), dtype="float64"))


def test_a_folder_with_media_ids_in_the_middle_of_its_words(tmp_path: Path) -> None:
    """20 words, placeholders and markers among them, no preprocessor file: the digits job's own policy."""
    marks = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    config = tiny("qwen3_vl", text={"vocab_size": 20}, **marks)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto_class(config).from_config(config).save_pretrained(tmp_path)
    record = launch(_certify_folder, str(tmp_path), ranks=2, timeout_s=60, device="cpu")[0]
    assert record["passed"], record["misses"]


def _before_step_1(config: EngineConfig) -> dict[str, Any]:
    """The certificate, and a note that no step and no checkpoint was there yet."""
    folder = Path(config.model).parent if "{run}" not in config.model else Path(config.model)
    found = [path.name for path in folder.rglob("*") if path.name in ("metrics.jsonl", "rows.jsonl", "checkpoints")]
    return certify(config) | {"found": found, "rank": world().rank}


def _refuses(config: EngineConfig) -> dict[str, Any]:
    return {"passed": False, "misses": ["planted"]}


def flags(folder: Path) -> list[str]:
    settings = SMALL | {"run.folder": folder}
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.mark.parametrize(("certificate", "status"), [(_before_step_1, 0), (_refuses, 1)])
def test_train_certifies_before_step_1_and_keeps_it(certificate, status: int, tmp_path: Path, capsys) -> None:
    """Exit status 1 where parity is missed; the run goes on, its record says so."""
    assert main([RECIPE, "--certify", *flags(tmp_path)], certificate) == status
    record = json.loads((tmp_path / "certificate.json").read_text())
    assert record["passed"] == (status == 0)
    if status == 0:
        assert record["found"] == [] and record["layout"] == "cp2-ulysses" and record["n_calls"]["figure"] < 1e-5
    assert (tmp_path / "metrics.jsonl").is_file()


def test_certify_needs_the_parity_checks(capsys) -> None:
    assert main([RECIPE, "--certify"]) == 2
    assert "--certify needs the parity checks" in capsys.readouterr().err


def test_the_parity_command_writes_a_certificate_a_layout(tmp_path: Path, capsys) -> None:
    """`longspan parity --certificate FILE`: the same record for each layout, of all default cases."""
    file = tmp_path / "certificate.json"
    layouts = "cp2-ring,dp2"
    asked = ["--model", "tiny:qwen3", "--layouts", layouts, "--lengths", "9,4,1", "--steps", "1", "--device", "cpu"]
    assert parity([*asked, "--certificate", str(file)]) == 0
    records = json.loads(file.read_text())
    assert list(records) == layouts.split(",")
    for name, record in records.items():
        assert (record["layout"], record["dtype"], record["passed"], record["misses"]) == (name, "float64", True, [])
        assert {"language", "embeddings", "value head"} <= set(record["worst_gradient"])
        assert record["worst_logprob"]["figure"] < 1e-8 and record["n_calls"]["figure"] < 1e-12
        assert record["leak_probe"]["figure"] == record["ranks_agree"]["figure"] == 0.0
    assert records["cp2-ring"]["model_hash"] == records["dp2"]["model_hash"]
