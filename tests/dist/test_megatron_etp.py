"""Expert tensor parallel: the columns of every expert over tensor-parallel ranks, with and without expert parallel.

The oracle is plain Hugging Face on unpacked samples in fp64: log-probs, every parameter's gradient, weights after two
steps. Control: the gradients of what experts read, not summed over the ranks' columns.
"""

import pytest
import torch
from megatron_cases import Job, hold, installed, run

from longspan import AdamW, Engine, EngineConfig, Objective, Sample
from longspan.layout import parse_layout
from longspan.models.loading import load_model

TWO = (
    Job("qwen3_5_moe_mtp", ("tp2-sp-etp2",), ("together", "mtp"), checks=("start", "gradient")),
    Job("qwen3_moe", ("tp2-etp2", "tp2-sp-etp2"), ("ppo", "moe_aux", "moe_z"), "columns"),
)
FOUR = (Job("qwen3_moe", ("tp2-pp2-etp2", "cp2-ring-tp2-sp-ep2-etp2", "dp2-tp2-ep2-etp2"), ("together",), "columns"),)
TARGETS = ("dp2-tp2-ep2-etp2 megatron", "tp2-sp-pp2-etp2 megatron", "dp4-ep4 megatron", "dp4 fsdp")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(TWO, tmp_path_factory.mktemp("two"), kept_by_mtp)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return *run(FOUR, folder, resume), folder


@installed
@pytest.mark.parametrize(("model", "layout"), [(job.model, layout) for job in TWO for layout in job.layouts])
def test_two_ranks_equal_the_oracle(two_ranks, model, layout):
    hold(two_ranks[0], model, layout)


@installed
@pytest.mark.parametrize("layout", FOUR[0].layouts)
def test_four_ranks_equal_the_oracle(four_ranks, layout):
    hold(four_ranks[0], "qwen3_moe", layout)


@installed
def test_a_missing_sum_over_columns_is_found(two_ranks, four_ranks):
    for table in (two_ranks[0], four_ranks[0]):
        assert any(not cell.passed for cell in table["qwen3_moe", "fault"][0])


def kept_by_mtp(folder):
    """What the head for tokens ahead still holds of the gathered embedding after a call."""
    config = EngineConfig(
        "tiny:qwen3_5_moe_mtp", parse_layout("tp2"), "megatron", max_tokens_per_rank=48, mtp_steps=1, mtp_joint=True
    )
    engine = Engine.build(config)
    metrics = engine.forward_backward(samples(), Objective("reinforce", mtp=0.5))
    return metrics["loss/mtp"], engine.backend.chunks[0].tables.embed_tokens.weight


@installed
def test_the_gathered_embedding_goes_with_its_micro_step(two_ranks):
    loss, kept = two_ranks[1]
    assert loss > 0.0 and kept is None


def samples():
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 90, (length + 1,), generator=generator) for length in (13, 1, 22, 7)]
    return [Sample(x[:-1], x[1:], torch.ones(len(x) - 1), {"advantage": torch.randn(len(x) - 1)}) for x in ids]


def build(name, backend="megatron", **settings):
    layout = parse_layout(name)
    return Engine.build(
        EngineConfig("tiny:qwen3_moe", layout=layout, backend=backend, max_tokens_per_rank=48, **settings)
    )


def step(engine):
    torch.manual_seed(0)
    engine.forward_backward(samples(), Objective("reinforce", moe_aux=0.1))
    return engine.optim_step(AdamW(lr=1e-2, eps=1e-4, clip_norm=1.0))["grad/norm"]


def resume(folder):
    """Save under etp, load under others and under fsdp: the same bits, and the same next step."""
    first = build(TARGETS[0].split()[0])
    held = sum(p.numel() for name, p in first.backend.parameters.items() if "experts" in name)
    step(first)
    first.save(folder / "checkpoint")
    first.export(folder / "exported")
    saved = first.state_dict()
    norm = step(first)
    after = first.state_dict()
    found = {}
    for target in TARGETS:
        name, backend = target.split()
        other = build(name, backend, seed=7)
        other.load(folder / "checkpoint")
        equal = all(torch.equal(saved[key], value) for key, value in other.state_dict().items())
        distance = abs(step(other) - norm) / norm
        moved = max(float((value - after[key]).abs().max()) for key, value in other.state_dict().items())
        found[target] = (equal, distance, moved)
    return found, saved, held


@installed
def test_a_checkpoint_under_etp_loads_under_any_layout(four_ranks):
    _, (found, saved, held), folder = four_ranks
    whole = sum(value.numel() for name, value in saved.items() if ".experts." in name)
    assert held == whole // 4  # half of the experts, half of their columns
    for name, (equal, distance, moved) in found.items():
        assert equal, f"{name} loaded other weights"
        limit = 0.0 if name == TARGETS[0] else 1e-5
        assert distance <= limit and moved <= limit, (name, distance, moved)
    adapter, _ = load_model(str(folder / "exported"))
    for name, parameter in adapter.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
