"""Weights that tensor-parallel ranks repeat stay alike, bit for bit, whatever rounding a rank's own gradient has; and those
that data ranks repeat, of which each moves a slice.
"""

import pytest
import torch
from megatron_cases import BACKEND, engine_of, installed, once, replaced
from ragged import ragged

from longspan import AdamW, Objective, launch
from longspan.engine.megatron.copies import digest
from longspan.errors import CheckpointError
from longspan.launch import world
from longspan.layout import parse_layout


def stepped(name):
    """An engine after one step in which the second rank's gradients of repeated parameters had another last bit."""
    engine = engine_of("tiny:qwen3_moe", name, value_head=True)
    engine.forward_backward(ragged(lengths=(13, 1, 7), tempered=False), Objective("reinforce", moe_aux=0.1))
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


FAULTS = {  # layout -> what would keep its copies alike, left out
    "tp2": ("spread_first", lambda real: lambda tensors, group: None),
    "cp3-ring": (
        "whole_from_slices",
        lambda real: lambda part, like, group: like,
    ),  # each rank moves its own slice alone
}
LAYOUTS = {2: ("tp2", "tp2-sp"), 3: ("cp3-ring",)}


def body(folder, layouts):
    found = {}
    for name in layouts:
        engine, bits = stepped(name)
        found[name] = bits, saved(engine, folder / name)
        if name in FAULTS:
            target, make = FAULTS[name]
            with replaced(BACKEND + target, make):
                engine, bits = stepped(name)
                found[name, "fault"] = bits, saved(engine, folder / f"{name} fault")
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    return once(lambda ranks: launch(body, folder, LAYOUTS[ranks], ranks=ranks, timeout_s=120)), folder


@installed
@pytest.mark.parametrize(("ranks", "layout"), [(ranks, name) for ranks, names in LAYOUTS.items() for name in names])
def test_repeated_weights_stay_alike(results, ranks, layout):
    of, folder = results
    first, *others = of(ranks)
    assert all(other[layout] == first[layout] for other in others)
    assert first[layout][1] == ""
    assert (folder / layout / "manifest.json").is_file()


@installed
@pytest.mark.parametrize("layout", FAULTS)
def test_weights_that_parted_are_seen_and_not_saved(results, layout):
    of, folder = results
    found = [each[layout, "fault"] for each in of(parse_layout(layout).ranks)]
    parted = [name for name, bits in found[0][0].items() if bits != found[1][0][name]]
    assert any("experts" in name for name in parted) and any("layernorm" in name for name in parted), parted
    for _, said in found:
        assert "ranks 0 and 1 hold" in said and "drifted apart" in said
    assert not (folder / f"{layout} fault").exists()


def test_a_digest_sees_one_bit_and_one_swap():
    x = torch.randn(1000)
    moved = x.clone()
    moved[[3, 7]] = x[[7, 3]]
    nearby = x.clone()
    nearby[5] = torch.nextafter(x[5], torch.tensor(9.0))
    nearby[6] = torch.nextafter(x[6], torch.tensor(-9.0))
    values = {int(digest(value)) for value in (x, x.clone(), moved, nearby, x.double(), x.to(torch.bfloat16))}
    assert len(values) == 5
