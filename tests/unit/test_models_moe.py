"""Routers and experts: recorded routes, replay, auxiliary losses and grouped matmuls. Oracles: HF's own router and
expert loop, and the losses' formulas on one unpacked sample. Bugs I1, I3, I5, I7, I10.
"""

import dataclasses

import pytest
import torch
from test_models_exact import TEXT_SAMPLES, loss_of, packed, plain, plain_model
from torch import Tensor

from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.layout import CPGroup, make_seqinfo
from longspan.models import load_model
from longspan.models.experts import _Grouped, expert_modules, shard_experts
from longspan.models.moe import MoEState, moe_shape, router_terms

FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_next"]
LENGTHS = [len(s) for s in TEXT_SAMPLES]


def recorded(family: str, samples: list[Sample], **how: object) -> tuple[MoEState, list[Tensor]]:
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=3)
    state = MoEState(keep_logits=True, keep_routes=True, **how)
    return state, packed(adapter, samples, moe=state)


def info_of(lengths: list[int]):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return make_seqinfo("contiguous", bounds, CPGroup.alone())


def formula(logits: Tensor, routes: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """aux and z of one layer and one sample, written out; logits [n, E], routes [n, k]."""
    probs = logits.softmax(-1)
    share = torch.stack([(routes == e).double().mean() for e in range(num_experts)])
    return num_experts * (share * probs.mean(0)).sum(), logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_are_those_of_plain_transformers(family):
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=3)
    oracle = plain_model(family)
    shape = moe_shape(adapter.model)
    chosen: list[Tensor] = []
    for name, module in oracle.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(lambda m, args, out: chosen.append(out[2]))
    state, _ = recorded(family, TEXT_SAMPLES)
    routes = state.recorded()
    assert routes.shape == (shape.layers, shape.top_k, sum(LENGTHS)) and routes.dtype == torch.int64
    for sample, mine in zip(TEXT_SAMPLES, routes.split(LENGTHS, -1), strict=True):
        chosen.clear()
        plain(oracle, adapter, sample)
        assert torch.equal(mine, torch.stack([layer.T for layer in chosen]))


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_repeats_the_record_in_any_packing(family):
    """I7: routes are a stream; the same routes in another packing give the same hidden states, bit for bit."""
    state, hidden = recorded(family, TEXT_SAMPLES)
    order = [2, 0, 3, 1]
    parts = state.recorded().split(LENGTHS, -1)
    again, shuffled = recorded(
        family, [TEXT_SAMPLES[i] for i in order], replay=torch.cat([parts[i] for i in order], -1)
    )
    for place, number in enumerate(order):
        # bit for bit, but for the chunks of a recurrent layer, which follow the packing
        assert (shuffled[place] - hidden[number]).abs().max() <= (1e-13 if family == "qwen3_next" else 0)
    assert torch.equal(again.recorded(), torch.cat([parts[i] for i in order], -1))
    _, other = recorded(family, TEXT_SAMPLES, replay=state.recorded().roll(1, -1))  # control: one token off
    assert max((a - b).abs().max().item() for a, b in zip(other, hidden, strict=True)) > 1e-3


def test_replayed_routes_take_gradients_through_their_scores():
    """With the router's own routes replayed, every gradient is that of the run without replay."""
    runs = []
    for replay in (False, True):
        adapter, _ = load_model("tiny:qwen3_moe", torch.float64, seed=3)
        state = MoEState(keep_routes=True, replay=recorded("qwen3_moe", TEXT_SAMPLES)[0].recorded() if replay else None)
        loss_of(packed(adapter, TEXT_SAMPLES, moe=state)).backward()
        runs.append({name: p.grad for name, p in adapter.model.model.named_parameters()})
    for name, gradient in runs[0].items():
        assert (gradient - runs[1][name]).norm() <= 1e-6 * gradient.norm(), name  # HF's scores are fp32


@pytest.mark.parametrize("family", FAMILIES)
def test_auxiliary_losses_are_per_layer_and_sample(family):
    state, _ = recorded(family, TEXT_SAMPLES)
    terms = router_terms(state, info=info_of(LENGTHS), lengths=LENGTHS)
    num_experts = state.logits[0].shape[1]
    for number, (aux, z) in enumerate(zip(terms.aux.split(LENGTHS), terms.z.split(LENGTHS), strict=True)):
        alone, _ = recorded(family, [TEXT_SAMPLES[number]])
        pairs = [formula(alone.logits[n], alone.routes[n], num_experts) for n in sorted(alone.logits)]
        assert aux.sum().item() == pytest.approx(sum(a for a, _ in pairs).item(), rel=1e-12)
        assert z.sum().item() == pytest.approx(sum(b for _, b in pairs).item(), rel=1e-12)


def test_auxiliary_gradient_reaches_the_router():
    """I3: non-zero, in proportion to the coefficient, equal to the formula's."""
    gradients = []
    for coefficient in (1.0, 2.0):
        adapter, _ = load_model("tiny:qwen3_moe", torch.float64, seed=3)
        state = MoEState(keep_logits=True)
        packed(adapter, TEXT_SAMPLES, moe=state)
        (coefficient * router_terms(state, info=info_of(LENGTHS), lengths=LENGTHS).aux.sum()).backward()
        gradients.append(adapter.model.model.layers[1].mlp.gate.weight.grad)
    oracle = plain_model("qwen3_moe")
    kept: list[tuple[Tensor, Tensor]] = []
    for layer in oracle.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, args, out: kept.append((out[0], out[2])))
    adapter, _ = load_model("tiny:qwen3_moe", torch.float64, seed=3)
    for sample in TEXT_SAMPLES:
        plain(oracle, adapter, sample)
    sum(formula(logits, routes, 4)[0] for logits, routes in kept).backward()
    expected = oracle.model.layers[1].mlp.gate.weight.grad
    assert gradients[0].norm() > 0.01
    assert torch.equal(gradients[1], 2 * gradients[0])
    assert (gradients[0] - expected).norm() < 1e-12 * expected.norm()


def test_pads_are_not_counted():
    """I5: the same tokens behind many pads give the same losses."""
    state, _ = recorded("qwen3_moe", TEXT_SAMPLES)
    padded = MoEState()
    padding = 5
    for layer in state.logits:
        parts = zip(state.logits[layer].split(LENGTHS), state.routes[layer].split(LENGTHS), strict=True)
        filled = [(torch.cat([a, a.new_zeros(padding, 4)]), torch.cat([b, b.new_zeros(padding, 2)])) for a, b in parts]
        padded.logits[layer] = torch.cat([a for a, _ in filled])
        padded.routes[layer] = torch.cat([b for _, b in filled])
    plain_terms = router_terms(state, info=info_of(LENGTHS), lengths=LENGTHS)
    terms = router_terms(padded, info=info_of([n + padding for n in LENGTHS]), lengths=LENGTHS)
    for a, b in ((terms.aux, plain_terms.aux), (terms.z, plain_terms.z)):
        parts = [x[:n] for x, n in zip(a.split([n + padding for n in LENGTHS]), LENGTHS, strict=True)]
        assert torch.allclose(torch.cat(parts), b, rtol=1e-14, atol=0)
        assert a.sum().item() == pytest.approx(b.sum().item(), rel=1e-14)


def test_whole_batch_form_uses_the_given_shares():
    state, _ = recorded("qwen3_moe", TEXT_SAMPLES)
    routes = state.recorded()
    shares = torch.stack([(routes == e).double().sum((1, 2)) / routes.shape[2] for e in range(4)], 1)
    terms = router_terms(state, info=info_of(LENGTHS), lengths=LENGTHS, shares=shares)
    weights = torch.cat(
        [torch.full((n,), n / sum(LENGTHS), dtype=torch.float64) for n in LENGTHS]
    )  # sums of token weights 1 / N
    expected = sum(formula(state.logits[n], state.routes[n], 4)[0] for n in sorted(state.logits))
    assert (weights * terms.aux).sum().item() == pytest.approx(expected.item(), rel=1e-12)


def test_nothing_is_kept_unasked():
    adapter, _ = load_model("tiny:qwen3_moe", torch.float64, seed=3)
    state = MoEState()
    assert torch.equal(packed(adapter, TEXT_SAMPLES, moe=state)[0], packed(adapter, TEXT_SAMPLES)[0])
    assert not state.logits and not state.routes


def test_recomputation_keeps_the_first_graph():
    runs = []
    for recompute in (False, True):
        adapter, _ = load_model("tiny:gpt_oss", torch.float64, seed=3)
        if recompute:
            adapter.model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        adapter.model.train()
        state = MoEState(keep_logits=True)
        hidden = packed(adapter, TEXT_SAMPLES, moe=state, selective=recompute)
        terms = router_terms(state, info=info_of(LENGTHS), lengths=LENGTHS)
        (loss_of(hidden) + 3 * terms.aux.sum() + terms.z.sum()).backward()
        runs.append({name: p.grad for name, p in adapter.model.model.named_parameters()})
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))


def test_idle_experts_get_zero_gradients():
    """I10: all tokens to experts 0 and 1; the others' gradient is zero, not None."""
    adapter, _ = load_model("tiny:qwen3_moe", torch.float64, seed=3)
    state = MoEState(replay=torch.tensor([0, 1])[None, :, None].expand(2, 2, sum(LENGTHS)))
    loss_of(packed(adapter, TEXT_SAMPLES, moe=state)).backward()
    for experts in expert_modules(adapter.model).values():
        for p in experts.parameters():
            assert p.grad[:2].any() and not p.grad[2:].any()


def test_grouped_matmul_of_half_precision():
    """The 16-bit path equals one matmul an expert, an idle expert's gradient is exactly zero."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 11, 0])
    x = torch.randn(16, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4, 24, 32, generator=generator).bfloat16().requires_grad_()
    dout = torch.randn(16, 24, generator=generator).bfloat16()
    out = _Grouped.apply(x, weight.transpose(1, 2), counts)
    out.backward(dout)
    parts = zip(x.detach().float().split(counts.tolist()), weight.detach().float(), strict=True)
    expected = torch.cat([a @ w.T for a, w in parts])
    assert (out.float() - expected).norm() < 5e-3 * expected.norm()
    parts = zip(x.detach().float().split(counts.tolist()), dout.float().split(counts.tolist()), strict=True)
    dweight = torch.stack([d.T @ a for a, d in parts])
    assert (weight.grad.float() - dweight).norm() < 5e-3 * dweight.norm()
    assert not weight.grad[1].any() and not weight.grad[3].any()


def test_ep_must_divide_the_experts():
    adapter, _ = load_model("tiny:qwen3_moe")
    group = dataclasses.replace(CPGroup.alone(), size=3)
    with pytest.raises(UserError, match="ep=3 must divide the 4 experts"):
        shard_experts(adapter.model, group)
