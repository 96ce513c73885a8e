"""Multi-step truth: 20 AdamW steps against the oracle, weights and moments, at several layouts; resume in the middle.

After each step all ranks report the same bits, and a run resumed under its own layout repeats the uninterrupted one
bit for bit.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longspan.engine import AdamW, Engine, EngineConfig
from longspan.engine.fsdp.backend import full
from longspan.launch import launch
from longspan.layout import parse_layout
from longspan.parity import differences
from longspan.parity.cases import STEP_CASE
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

STEPS, MIDDLE = 20, 10
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clip_norm": 1.0}
LIMIT = 1e-7  # relative, 20 steps
BATCHES = 3  # the steps go through this many batches in turn


def batches(reference: Reference) -> list[list]:
    """The first has a row that trains nothing; the second is one row of one token: most ranks have nothing to do."""
    return [
        fill_fields(default_samples(reference, lengths, seed=seed), reference, seed=seed)
        for seed, lengths in enumerate([(13, 1, 24, 7, 29, 3), (1,), (31, 4, 11)])
    ]


def oracle(reference: Reference, data: list[list]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and moments after 20 steps."""
    for step in range(STEPS):
        reference.run(data[step % BATCHES], STEP_CASE)
        reference.adamw(**SETTINGS)
    moments = {f"{name}/{slot}": pair[i] for name, pair in reference.moments.items() for i, slot in enumerate(SLOTS)}
    return reference.weights(), moments


SLOTS = ("exp_avg", "exp_avg_sq")


def moments_of(engine: Engine) -> dict[str, Tensor]:
    """Full Adam moments by parameter name, read from the backend."""
    backend = engine.backend
    optimizer = backend.optimizers[None]
    found = {}
    for name, parameter in backend.named_parameters():
        for slot in SLOTS:
            found[f"{name}/{slot}"] = full(optimizer.state[parameter][slot])
    return found


def digest(*tables: Mapping[str, Tensor]) -> str:
    state = hashlib.blake2b()
    for table in tables:
        for name in sorted(table):
            state.update(table[name].contiguous().numpy().tobytes())
    return state.hexdigest()


def build(model: str, layout: str) -> Engine:
    return Engine.build(EngineConfig(model, parse_layout(layout), dtype="float64", max_tokens_per_rank=44))


def steps(engine: Engine, data: list[list], first: int, last: int) -> list[str]:
    """Run steps first .. last - 1; what this rank saw of each: reduced gradients, weights, report."""
    seen = []
    for step in range(first, last):
        metrics = engine.forward_backward(data[step % BATCHES], STEP_CASE.objective(), normalise=STEP_CASE.normalise)
        gradients = engine.gradients()
        report = engine.optim_step(AdamW(**SETTINGS))
        numbers = torch.tensor([metrics["loss/total"], report["grad/norm"]], dtype=torch.float64)
        seen.append(digest(gradients, engine.state_dict(), {"numbers": numbers}))
    return seen


def body(model: str, layouts: list[str], other: str, data: list[list], folder: str) -> dict:
    """In each rank: the whole run under every layout; the first is also saved in the middle and resumed twice."""
    out = {}
    for number, layout in enumerate(layouts):
        engine = build(model, layout)
        seen = steps(engine, data, 0, MIDDLE)
        if number == 0:
            engine.save(folder)
        seen += steps(engine, data, MIDDLE, STEPS)
        out[layout] = (engine.state_dict(), moments_of(engine), seen)
    for name, layout in (("resumed", layouts[0]), ("resumed elsewhere", other)):
        engine = build(model, layout)
        engine.load(folder)
        seen = steps(engine, data, MIDDLE, STEPS)
        out[name] = (engine.state_dict(), moments_of(engine), seen)
    return out


@pytest.mark.parametrize(
    ("model", "layouts", "other", "ranks"),
    [
        ("tiny:qwen3", ["cp2-ring", "cp2-ulysses", "dp2"], "cp2-gather", 2),
        ("tiny:qwen3_vl", ["cp2-gather"], "dp2", 2),
        ("tiny:qwen3", ["cp3-ring"], "dp3", 3),
    ],
)
def test_twenty_steps(model: str, layouts: list[str], other: str, ranks: int, tmp_path: Path) -> None:
    reference = Reference(model, dtype=torch.float64)
    data = batches(reference)
    weights, moments = oracle(reference, data)
    results = launch(
        body, model, layouts, other, data, str(tmp_path / "saved"), ranks=ranks, timeout_s=180, device="cpu"
    )
    for name in results[0]:
        got, got_moments, seen = results[0][name]
        figure, where = differences.parameters(got, weights, 1e-10)
        assert figure <= LIMIT, f"{name}: weights {figure:.3g} at {where}"
        figure, where = differences.parameters(got_moments, moments, 1e-10)
        assert figure <= LIMIT, f"{name}: optimizer state {figure:.3g} at {where}"
        for rank, other_rank in enumerate(results[1:], start=1):
            assert other_rank[name][2] == seen, f"{name}: rank {rank} saw other bits than rank 0"
    whole, resumed = results[0][layouts[0]], results[0]["resumed"]
    assert resumed[2] == whole[2][MIDDLE:], "a resumed run repeats the uninterrupted one bit for bit"
    assert digest(resumed[0], resumed[1]) == digest(whole[0], whole[1])


def cold(model: str, layout: str, data: list[list], folder: str) -> dict[str, Tensor]:
    engine = build(model, layout)
    engine.load(folder, optimizer=False)
    steps(engine, data, MIDDLE, MIDDLE + 1)
    return engine.state_dict()


def warm(model: str, layout: str, data: list[list], folder: str) -> dict[str, Tensor]:
    engine = build(model, layout)
    steps(engine, data, 0, MIDDLE)
    engine.save(folder)
    steps(engine, data, MIDDLE, MIDDLE + 1)
    return engine.state_dict()


def test_weights_alone_resume_differently(tmp_path: Path) -> None:
    """Control (K7): without the optimizer's state the next step is another one."""
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    data, folder = batches(reference), str(tmp_path / "saved")
    first = launch(warm, "tiny:qwen3", "dp1", data, folder, ranks=1, timeout_s=180, device="cpu")[0]
    second = launch(cold, "tiny:qwen3", "dp1", data, folder, ranks=1, timeout_s=180, device="cpu")[0]
    assert differences.parameters(second, first, 1e-10)[0] > 1e-5
