"""Mixture of experts through the engine: expert parallelism, auxiliary losses and replayed routes at any layout, in fp64.

Compared with the oracle, one unpacked sample at a time; its auxiliary losses with their formula on plain `transformers` router
logits.
"""

import pytest
import torch
from ragged import RULE, gap, ragged, train, truth, worst
from torch import nn

from longspan import Engine, EngineConfig, Sample, launch
from longspan.layout import parse_layout
from longspan.models.tiny import tiny
from longspan.parity import Reference
from longspan.parity.cases import Case
from longspan.parity.faults import planted

LAYOUTS = ("cp2-ulysses", "cp3-gather", "ep2", "dp2-cp2-ep2", "cp4-ring-ep4")


CASE = Case("aux", "importance_sampling", {"moe_aux": 0.5, "moe_z": 0.1}, **RULE)
MODEL = "tiny:qwen3_moe"


def build(name):
    return Engine.build(EngineConfig(MODEL, parse_layout(name), dtype="float64", max_tokens_per_rank=48))


def run(name, fault=None):
    with planted(fault):
        engine = build(name)
        return train(engine, ragged(), CASE), engine.gradients()


@pytest.fixture(scope="module")
def oracle():
    """Plain transformers, one unpacked sample at a time, fp64."""
    return truth(MODEL, ragged(), CASE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_auxiliary_losses_and_experts_do_not_depend_on_the_layout(name, oracle):
    for metrics, gradients in launch(run, name, ranks=parse_layout(name).ranks, timeout_s=60):
        assert worst(gradients, oracle.gradients) <= 1e-10
        assert gap(metrics, oracle.metrics) <= 1e-10


@pytest.mark.parametrize(("name", "fault"), [("cp2-ulysses", "cp-factor"), ("ep2", "duplicated-rows")])
def test_a_fault_in_the_sums_is_seen(name, fault, oracle):
    """Gradients averaged over ranks; every data rank on the first one's rows."""
    assert worst(launch(run, name, fault, ranks=2, timeout_s=60)[0][1], oracle.gradients) > 1e-2


def test_the_auxiliary_losses_are_their_formula(oracle):
    """The oracle's own, once more from the papers' formulas on the model as transformers makes it."""
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
    aux = z = 0.0
    for sample in ragged():
        seen.clear()
        with torch.no_grad():
            model(input_ids=sample.input_ids[None])
        weight = float(sample.mask.sum()) / RULE["denominator"]
        for logits, experts in seen:
            logits = logits.double()
            n, num_experts, k = len(logits), logits.shape[1], experts.shape[1]
            share = nn.functional.one_hot(experts, num_experts).sum((0, 1)) / (n * k)
            aux += weight * float(num_experts * (share * logits.softmax(-1).mean(0)).sum())
            z += weight * float(logits.logsumexp(-1).square().mean())
    assert abs(oracle.metrics["loss/moe_aux"] - aux) <= 1e-6  # HF's router computes in fp32
    assert abs(oracle.metrics["loss/moe_z"] - z) <= 1e-6


def turned(routes):
    return 3 - routes


def replay(name):
    """What is recorded, and what comes of other routes in the record's place: routes and log-probs."""
    engine, samples = build(name), ragged()
    recorded = engine.forward(samples, ("logprob", "routed_experts"))
    other = [
        Sample(s.input_ids, s.target_ids, s.mask, {**s.fields, "routed_experts": turned(out.routed_experts)})
        for s, out in zip(samples, recorded, strict=True)
    ]
    return recorded, engine.forward(other, ("logprob", "routed_experts"))


def forced(reference, sample, routes):
    """Log-probs [L] of the oracle whose routers choose these experts."""
    routers = [module for module in reference.model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]

    def force(layer):
        def hook(router, args, out):
            weights = out[0].softmax(-1, dtype=torch.float32).gather(1, routes[:, layer])  # fp32 as HF's own
            weights = weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights
            return out[0], weights.to(out[0].dtype), routes[:, layer]

        return hook

    hooks = [router.register_forward_hook(force(layer)) for layer, router in enumerate(routers)]
    with torch.no_grad():
        found = reference.outputs(sample).logprob
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["dp1", "cp3-gather", "dp2-cp2-ep2"])
def test_routes_are_recorded_and_replayed_under_any_layout(name):
    reference, far = Reference(MODEL, dtype=torch.float64), []
    recorded, changed = launch(replay, name, ranks=parse_layout(name).ranks, timeout_s=60)[0]
    for sample, out, other in zip(ragged(), recorded, changed, strict=True):
        routes = reference.routes(sample)
        assert torch.equal(out.routed_experts, routes) and torch.equal(other.routed_experts, turned(routes))
        own = forced(reference, sample, routes)
        assert (out.logprob - own).abs().max() <= 1e-10
        assert (other.logprob - forced(reference, sample, turned(routes))).abs().max() <= 1e-10
        far.append(float((other.logprob - own).abs().max()))
    assert max(far) > 1e-3
