"""Hybrid (Gated DeltaNet), vision-language and expert families of the megatron backend against the oracle in fp64."""

import pytest
import torch
from megatron_cases import Job, hold, installed, run

from longspan import AdamW, Engine, EngineConfig, Objective, Sample
from longspan.layout import parse_layout

CHECKS = ("start", "logprob", "gradient")
TWO = (
    Job("qwen3_5", ("cp2-ring", "cp2-ulysses-heads", "tp2-sp", "tp2"), ("together",), "tp"),
    Job("qwen3_5_mtp", ("cp2-ring", "tp2-sp"), ("mtp",), checks=("start", "gradient")),
    Job("qwen3_5_vl", ("cp2-ring", "tp2-sp"), ("together",), checks=CHECKS),
    Job("qwen3_5_moe", ("cp2-ring-ep2", "tp2-sp"), ("ppo", "moe_aux"), checks=CHECKS),
    Job("qwen3_next", ("tp2-sp",), ("ppo", "moe_z"), checks=CHECKS),
    Job("qwen3_vl_moe", ("cp2-ring-ep2", "tp2-sp"), ("together", "moe_aux"), checks=CHECKS),
)
FOUR = (Job("qwen3_5", ("tp2-cp2-ring", "tp2-cp2-gather-heads"), ("together",), checks=CHECKS),)


def build(name, backend="megatron", seed=0):
    layout = parse_layout(name)
    return Engine.build(EngineConfig("tiny:qwen3_5", layout=layout, backend=backend, max_tokens_per_rank=48, seed=seed))


def step(engine):
    generator = torch.Generator().manual_seed(3)
    samples = []
    for length in (13, 22):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        fields = {"advantage": torch.randn(length, generator=generator)}
        samples.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields))
    engine.forward_backward(samples, Objective("reinforce"))
    engine.optim_step(AdamW(lr=1e-2, eps=1e-4))


def resume(folder):
    """Save at tp2-sp, load elsewhere: the same bits, and the same step but for rounding."""
    first = build("tp2-sp")
    step(first)
    first.save(folder / "checkpoint")
    saved = first.state_dict()
    step(first)
    after = first.state_dict()
    found = {}
    for name, backend in (("tp2", "megatron"), ("cp2-ring", "megatron"), ("dp2", "fsdp")):
        other = build(name, backend, seed=7)
        other.load(folder / "checkpoint")
        equal = all(torch.equal(saved[key], value) for key, value in other.state_dict().items())
        step(other)
        moved = max(float((value - after[key]).abs().max()) for key, value in other.state_dict().items())
        found[f"{name} {backend}"] = equal, moved
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(TWO, tmp_path_factory.mktemp("two"), resume)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run(FOUR, tmp_path_factory.mktemp("four"))[0]


@installed
@pytest.mark.parametrize(("model", "layout"), [(job.model, layout) for job in TWO for layout in job.layouts])
def test_two_ranks_equal_the_oracle(two_ranks, model, layout):
    hold(two_ranks[0], model, layout)


@installed
@pytest.mark.parametrize("layout", FOUR[0].layouts)
def test_four_ranks_equal_the_oracle(four_ranks, layout):
    hold(four_ranks, "qwen3_5", layout)


@installed
def test_a_norm_that_is_not_summed_over_heads_is_found(two_ranks):
    assert any(not cell.passed for cell in two_ranks[0]["qwen3_5", "fault"][0])


@installed
def test_recurrent_layers_in_a_checkpoint_load_under_any_layout_and_backend(two_ranks):
    for name, (equal, moved) in two_ranks[1].items():
        assert equal, f"{name} loaded other weights"
        assert moved <= 1e-5, name
