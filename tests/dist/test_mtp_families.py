"""Multi-token-prediction heads of models with a vision tower or with experts, over ranks, against the oracle in fp64.

Steps ahead read an image's or a video's features where the decoder does; a head of two layers uses them in turn and
its experts stay whole on every rank. Apart: the draft loss moves `mtp.*` only. Joint: decoder and tower too.
Checkpoints may store a head's experts one by one: they are read, and exported again under the same names.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import ragged
import torch
from ragged import RULE
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan import Engine, EngineConfig, Layout, Sample
from longspan.errors import UserError
from longspan.launch import launch
from longspan.layout import parse_layout
from longspan.models import load_model
from longspan.models.mtp import MTPHead
from longspan.parity.cases import Case
from longspan.parity.differences import parameters
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

STEPS = 3
COEFFICIENT = 0.7
VISION, EXPERTS = "tiny:qwen3_5_vl_mtp", "tiny:qwen3_5_moe_mtp"
CASE = Case("mtp", "cross_entropy", {"mtp": COEFFICIENT}, **RULE)
Truth = dict[bool, tuple[float, dict[str, Tensor]]]  # joint -> loss/mtp and gradients


def expected(model: str) -> tuple[list[Sample], Truth]:
    found: Truth = {}
    for joint in (False, True):
        reference = Reference(model, dtype=torch.float64, mtp_steps=STEPS)
        samples = fill_fields(default_samples(reference), reference)
        reference.mtp.joint = joint
        result = reference.run(samples, CASE)
        found[joint] = result.metrics["loss/mtp"], result.gradients
    return samples, found


def train(model: str, layout: Layout, samples: list[Sample], blind: bool) -> Truth:
    """blind: the planted fault, steps read the text embeddings of placeholders."""
    if blind:
        MTPHead.see = lambda head, features, media, context: None
    found: Truth = {}
    for joint in (False, True):
        config = EngineConfig(model, layout, dtype="float64", max_tokens_per_rank=96, mtp_steps=STEPS, mtp_joint=joint)
        engine = Engine.build(config)
        found[joint] = ragged.train(engine, samples, CASE)["loss/mtp"], engine.gradients()
    return found


def worst(found: tuple[float, Mapping[str, Tensor]], wanted: tuple[float, Mapping[str, Tensor]]) -> float:
    return max(abs(found[0] - wanted[0]), parameters(found[1], wanted[1], 1e-10)[0])


@pytest.fixture(scope="module", params=[VISION, EXPERTS])
def model(request: pytest.FixtureRequest) -> tuple[str, list[Sample], Truth]:
    return request.param, *expected(request.param)


@pytest.mark.parametrize("name", ["cp2-ulysses", "cp3-gather", "ep2"])
def test_gradients_are_those_of_unpacked_samples(model: tuple[str, list[Sample], Truth], name: str) -> None:
    own, samples, truth = model
    if name == "ep2" and own == VISION:
        pytest.skip("has no experts")
    layout = parse_layout(name)
    for found in launch(train, own, layout, samples, False, ranks=layout.ranks, timeout_s=100):
        errors = [worst(found[joint], truth[joint]) for joint in (False, True)]
        print(f"{own} {name}: {max(errors):.1e}")
        assert max(errors) < 1e-8
        assert worst(found[False], truth[True]) > 1e-3


def test_steps_without_the_images_are_seen() -> None:
    samples, truth = expected(VISION)
    found = launch(train, VISION, Layout(), samples, True, ranks=1, timeout_s=100)[0]
    assert worst(found[False], truth[False]) > 1e-3


def carry(folder: str, out: str) -> None:
    Engine.build(EngineConfig(folder, Layout(), max_tokens_per_rank=64)).export(out)


def test_experts_stored_one_by_one_come_back_under_their_names(tmp_path: Path) -> None:
    adapter, _ = load_model(EXPERTS, torch.float32, 0)
    adapter.model.save_pretrained(tmp_path / "in")
    base = load_file(tmp_path / "in" / "model.safetensors")
    head: dict[str, Tensor] = {}
    for name, value in adapter.mtp.named_parameters():
        if "experts" not in name.replace("shared_expert", ""):
            head[f"mtp.{name}"] = value.detach().clone()
            continue
        stem, _, kind = name.rpartition(".")
        for number, matrix in enumerate(value.detach()):
            kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            parts = zip(kinds, matrix.chunk(len(kinds)), strict=True)
            head |= {f"mtp.{stem}.{number}.{part}_proj.weight": own.clone() for part, own in parts}
    save_file(base | head, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    again, _ = load_model(str(tmp_path / "in"), torch.float32, 0)
    for (name, value), other in zip(adapter.mtp.named_parameters(), again.mtp.parameters(), strict=True):
        assert torch.equal(value, other), name
    launch(carry, str(tmp_path / "in"), str(tmp_path / "out"), ranks=1, timeout_s=50)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in found if name.startswith("mtp.")} == head.keys()
    assert all(torch.equal(found[name], value) for name, value in head.items())
    head.pop("mtp.layers.1.mlp.experts.2.up_proj.weight")
    save_file(base | head, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack up_proj of expert 2.*set mtp_num_hidden_layers to 0"):
        load_model(str(tmp_path / "in"), torch.float32, 0)
    config = tmp_path / "in" / "config.json"  # the way out that the message names
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mtp_num_hidden_layers": 0}))
    assert load_model(str(tmp_path / "in"), torch.float32, 0)[0].mtp is None


def test_a_config_that_does_not_name_its_head_still_loads_it(tmp_path: Path) -> None:
    """Qwen3-Next's checkpoints have `mtp.*` tensors and a config that is silent about them."""
    adapter, _ = load_model("tiny:qwen3_next_mtp", torch.float32, 0)
    adapter.model.config.mtp_num_hidden_layers = None
    adapter.model.save_pretrained(tmp_path)
    base = load_file(tmp_path / "model.safetensors")
    head = {f"mtp.{name}": value.detach().clone() for name, value in adapter.mtp.named_parameters()}
    assert load_model(str(tmp_path), torch.float32, 0)[0].mtp is None
    save_file(base | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = load_model(str(tmp_path), torch.float32, 0)[0].mtp
    assert found is not None
    assert {
        f"mtp.{name}" for name, value in found.named_parameters() if torch.equal(value, head[f"mtp.{name}"])
    } == head.keys()
