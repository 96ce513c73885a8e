"""Weights that tensor-parallel ranks repeat stay alike, bit for bit, whatever rounding a rank's own gradient has."""

import pytest
import torch
from megatron_cases import BACKEND, installed, replaced

from longspan import AdamW, Engine, EngineConfig, Objective, Sample, launch
from longspan.engine.megatron.copies import digest
from longspan.errors import CheckpointError
from longspan.launch import world
from longspan.layout import parse_layout


def samples():
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (13, 7):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        fields = {"advantage": torch.randn(length, generator=generator)}
        made.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields))
    return made


def stepped(name):
    """An engine after one step in which the second rank's gradients of repeated parameters had another last bit."""
    config = EngineConfig(
        "tiny:qwen3_moe", layout=parse_layout(name), backend="megatron", max_tokens_per_rank=48, value_head=True
    )
    engine = Engine.build(config)
    engine.forward_backward(samples(), Objective("reinforce", moe_aux=0.1))
    backend = engine.backend
    repeated = [name for name, entry in backend.trainable() if entry.axis != "tp"]
    for parameter in (backend.parameters[name] for name in repeated if world().rank == 1):
        if parameter.grad is not None:
            parameter.grad = torch.nextafter(parameter.grad, torch.tensor(float("inf")))
    engine.optim_step(AdamW(lr=1e-2))
    return engine, {name: int(digest(backend.masters[name])) for name in repeated}


def saved(engine, path):
    try:
        engine.save(path)
    except CheckpointError as error:
        return str(error)
    return ""


def body(folder):
    found = {}
    for name in ("tp2", "tp2-sp"):
        engine, bits = stepped(name)
        found[name] = bits, saved(engine, folder / name)
    with replaced(BACKEND + "spread_first", lambda real: lambda tensors, group: None):
        engine, bits = stepped("tp2")
        found["fault"] = bits, saved(engine, folder / "fault")
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    return launch(body, folder, ranks=2, timeout_s=120), folder


@installed
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp"])
def test_repeated_weights_stay_alike(results, layout):
    (first, second), folder = results
    assert first[layout] == second[layout]
    assert first[layout][1] == ""
    assert (folder / layout / "manifest.json").is_file()


@installed
def test_weights_that_parted_are_seen_and_not_saved(results):
    (first, second), folder = results
    parted = [name for name, bits in first["fault"][0].items() if bits != second["fault"][0][name]]
    assert any("experts" in name for name in parted) and any("layernorm" in name for name in parted), parted
    for found in (first, second):
        assert "ranks 0 and 1 hold" in found["fault"][1] and "drifted apart" in found["fault"][1]
    assert not (folder / "fault").exists()


def test_a_digest_sees_one_bit_and_one_swap():
    x = torch.randn(1000)
    moved = x.clone()
    moved[[3, 7]] = x[[7, 3]]
    nearby = x.clone()
    nearby[5] = torch.nextafter(x[5], torch.tensor(9.0))
    nearby[6] = torch.nextafter(x[6], torch.tensor(-9.0))
    values = {int(digest(value)) for value in (x, x.clone(), moved, nearby, x.double(), x.to(torch.bfloat16))}
    assert len(values) == 5
