"""Mixture of experts through the engine: expert parallelism, auxiliary losses and replayed routes at any layout, in fp64.

Compared with the oracle and with one rank of ours; the auxiliary losses also with their formula on plain `transformers`
router logits, one unpacked sample at a time.
"""

import pytest
import torch
from torch import nn

from longspan import Engine, EngineConfig, Objective, Sample, launch
from longspan.layout import parse_layout
from longspan.models.tiny import tiny
from longspan.parity import Reference
from longspan.parity.cases import Case
from longspan.parity.faults import planted

LAYOUTS = ("cp2-ulysses", "cp3-gather", "ep2", "dp2-cp2-ep2", "cp4-ring-ep4")


def make_samples(lengths=(13, 1, 40, 7, 29, 3)):
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > 0.3).float() * (number != 3)
        fields = {
            "advantage": torch.randn(length, generator=generator).double(),
            "old_logprob": torch.full((length,), -4.5),
        }
        samples.append(Sample(ids[:-1], ids[1:], mask, fields))
    return samples


def run(name, budget):
    engine = Engine.build(
        EngineConfig(model="tiny:qwen3_moe", layout=parse_layout(name), dtype="float64", max_tokens_per_rank=budget)
    )
    metrics = engine.forward_backward(
        make_samples(), Objective("importance_sampling", moe_aux=0.5, moe_z=0.1), normalise="sample"
    )
    return metrics, engine.gradients()


def worst(a, b):
    return max(float((a[key] - b[key]).norm() / b[key].norm().clamp(min=1e-30)) for key in b)


def run_with_fault(name, fault):
    with planted(fault):
        return run(name, 48)


@pytest.fixture(scope="module")
def one_rank():
    return launch(run, "dp1", 1000, ranks=1, timeout_s=60)[0]


@pytest.fixture(scope="module")
def oracle():
    """Plain transformers, one unpacked sample at a time, fp64."""
    case = Case("aux", "importance_sampling", {"moe_aux": 0.5, "moe_z": 0.1}, "sample")
    return Reference("tiny:qwen3_moe", dtype=torch.float64).run(make_samples(), case)


@pytest.mark.parametrize("name", LAYOUTS)
def test_auxiliary_losses_and_experts_do_not_depend_on_the_layout(name, one_rank, oracle):
    for metrics, gradients in launch(run, name, 48, ranks=parse_layout(name).ranks, timeout_s=60):
        assert worst(gradients, oracle.gradients) <= 1e-8
        assert all(
            abs(metrics[key] - value) <= 1e-8 * max(1.0, abs(value))
            for key, value in oracle.metrics.items()
            if key.startswith("loss/")
        )
        assert worst(gradients, one_rank[1]) <= 1e-10
        for key in ("loss/moe_aux", "loss/moe_z", "loss/total"):
            assert abs(metrics[key] - one_rank[0][key]) <= 1e-10


@pytest.mark.parametrize(("name", "fault"), [("cp2-ulysses", "cp-factor"), ("ep2", "duplicated-rows")])
def test_a_fault_in_the_sums_is_seen(name, fault, oracle):
    """Gradients averaged over ranks; every data rank on the first one's rows."""
    assert worst(launch(run_with_fault, name, fault, ranks=2, timeout_s=60)[0][1], oracle.gradients) > 1e-2


def test_the_auxiliary_losses_are_their_formula(one_rank):
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            tiny("qwen3_moe"), attn_implementation="eager", experts_implementation="eager"
        ).double()
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for router in routers:
        router.register_forward_hook(lambda module, args, out: seen.append((out[0], out[2])))
    trained = [s for s in make_samples() if s.mask.sum() > 0]
    aux = z = 0.0
    for sample in trained:
        seen.clear()
        with torch.no_grad():
            model(input_ids=sample.input_ids[None])
        for logits, experts in seen:
            logits = logits.double()
            n, num_experts, k = len(logits), logits.shape[1], experts.shape[1]
            share = nn.functional.one_hot(experts, num_experts).sum((0, 1)) / (n * k)
            aux += float(num_experts * (share * logits.softmax(-1).mean(0)).sum()) / len(trained)
            z += float(logits.logsumexp(-1).square().mean()) / len(trained)
    assert abs(one_rank[0]["loss/moe_aux"] - aux) <= 1e-6  # HF's router computes in fp32
    assert abs(one_rank[0]["loss/moe_z"] - z) <= 1e-6


def replay(name):
    engine = Engine.build(
        EngineConfig(model="tiny:qwen3_moe", layout=parse_layout(name), dtype="float64", max_tokens_per_rank=48)
    )
    samples = make_samples()
    recorded = engine.forward(samples, ("logprob", "routed_experts"))
    reversed_routes = [
        Sample(s.input_ids, s.target_ids, s.mask, {**s.fields, "routed_experts": (3 - out.routed_experts)})
        for s, out in zip(samples, recorded, strict=True)
    ]
    other = engine.forward(reversed_routes, ("logprob", "routed_experts"))
    return recorded, other


def test_routes_are_recorded_and_replayed_under_any_layout():
    base, other = launch(replay, "dp1", ranks=1, timeout_s=60)[0]
    for name in ("cp3-gather", "dp2-cp2-ep2"):
        recorded, changed = launch(replay, name, ranks=parse_layout(name).ranks, timeout_s=60)[0]
        for a, b, c, d in zip(base, recorded, other, changed, strict=True):
            assert torch.equal(a.routed_experts, b.routed_experts)
            assert torch.equal(c.routed_experts, d.routed_experts) and torch.equal(
                c.routed_experts, 3 - a.routed_experts
            )
            assert (a.logprob - b.logprob).abs().max() <= 1e-10
            assert (c.logprob - d.logprob).abs().max() <= 1e-10
        assert max(float((a.logprob - c.logprob).abs().max()) for a, c in zip(base, other, strict=True)) > 1e-3
