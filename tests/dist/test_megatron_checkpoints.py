"""A checkpoint of the megatron backend under other layouts and under fsdp: the same bits, and the same next step."""

from dataclasses import dataclass, field

import pytest
import torch
from megatron_cases import engine_of, installed, once
from ragged import ragged

from longspan import AdamW, Objective, launch
from longspan.models.loading import load_model


@dataclass(frozen=True)
class Trip:
    """Saved under the first layout after one step, loaded under all; each is "layout backend"."""

    model: str
    stops: tuple[str, ...]
    terms: dict[str, float] = field(default_factory=dict)


TRIPS = {
    2: {
        "hybrid": Trip("qwen3_5", ("tp2-sp megatron", "tp2 megatron", "cp2-ring megatron", "dp2 fsdp")),
    },
    3: {
        "thirds": Trip("qwen3", ("cp3-ring megatron", "dp3 megatron", "cp3-gather fsdp")),
    },
    4: {
        "dense": Trip("qwen3", ("tp2-cp2 megatron", "pp2-dp2 megatron", "tp2-pp2-sp megatron", "dp4 fsdp")),
        "etp": Trip(
            "qwen3_moe",
            ("dp2-tp2-ep2-etp2 megatron", "tp2-sp-pp2-etp2 megatron", "dp4-ep4 megatron", "dp4 fsdp"),
            {"moe_aux": 0.1},
        ),
    },
}  # fmt: skip


def step(engine, terms):
    engine.forward_backward(ragged(lengths=(13, 1, 22, 7)), Objective("ppo", clip=0.2, **terms))
    return engine.optim_step(AdamW(lr=1e-2, eps=1e-4, clip_norm=1.0))["grad/norm"]


def travel(trip, folder):
    """{stop: (same bits, distance of the next step's norm, of its weights, steps)}, what was saved, elements of experts here."""
    name, backend = trip.stops[0].split()
    first = engine_of(f"tiny:{trip.model}", name, backend)
    held = sum(p.numel() for key, p in first.backend.parameters.items() if "experts" in key)
    step(first, trip.terms)
    first.save(folder / "checkpoint")
    first.export(folder / "exported")
    saved = first.state_dict()
    norm = step(first, trip.terms)
    after = first.state_dict()
    found = {}
    for stop in trip.stops:
        name, backend = stop.split()
        other = engine_of(f"tiny:{trip.model}", name, backend, seed=7)
        other.load(folder / "checkpoint")
        equal = all(torch.equal(saved[key], value) for key, value in other.state_dict().items())
        distance = abs(step(other, trip.terms) - norm) / norm
        moved = max(float((value - after[key]).abs().max()) for key, value in other.state_dict().items())
        found[stop] = (equal, distance, moved, other.step)
    return found, saved, held


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """Number of ranks -> trip -> what `travel` found, and where."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def of(ranks):
        trips = TRIPS[ranks]
        made = launch(lambda: {name: travel(t, folder / name) for name, t in trips.items()}, ranks=ranks, timeout_s=200)
        return {name: (*found, folder / name) for name, found in made[0].items()}

    return once(of)


@installed
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, trips in TRIPS.items() for name in trips])
def test_a_checkpoint_loads_under_any_layout_and_backend(travelled, ranks, name):
    found, saved, _, folder = travelled(ranks)[name]
    for stop, (equal, distance, moved, steps) in found.items():
        assert equal, f"{stop} loaded other weights"
        assert steps == 2
        limit = 0.0 if stop == TRIPS[ranks][name].stops[0] else 1e-5
        assert distance <= limit and moved <= limit, (stop, distance, moved)
    adapter, _ = load_model(str(folder / "exported"))
    for key, parameter in adapter.model.named_parameters():
        assert torch.equal(parameter, saved[key]), key


@installed
def test_a_rank_holds_its_experts_columns_alone(travelled):
    _, saved, held, _ = travelled(4)["etp"]
    assert held == sum(value.numel() for key, value in saved.items() if ".experts." in key) // 4  # half of half of them
