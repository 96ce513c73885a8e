"""Token weights by hand-made numbers, and the reports on normalisation: A1, A4, A8, A16, B1, B3, B6."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.objective import NORMALISE, Fields, Objective, Stats, TokenOut, evaluate, term_masks, token_weights

PPO = Objective("ppo")
MASKS = ([0, 1, 1, 0, 1], [0, 0, 0], [1], [0, 1, 1, 1, 1, 1, 1, 0])  # 3, 0, 1, 6 trained tokens


def sample(mask, adapter=None, **fields) -> Sample:
    length = len(mask)
    given = {name: torch.tensor(x, dtype=torch.float64) for name, x in fields.items()}
    return Sample([1] * length, [2] * length, mask, fields=given, adapter=adapter)


def batch() -> list[Sample]:
    return [sample(mask) for mask in MASKS]


def by_hand(rule: str, masks, count=None) -> list[list[Fraction]]:
    """The rules in exact fractions."""
    lengths = [sum(mask) for mask in masks]
    tokens, rows = sum(lengths), sum(length > 0 for length in lengths)
    own = {
        "token": lambda length: Fraction(1, count or tokens or 1),
        "sample": lambda length: Fraction(1, (length or 1) * (count or rows or 1)),
        "sample_sum": lambda length: Fraction(1, count or rows or 1),
        "constant": lambda length: Fraction(1, count or 1),
        "sum": lambda length: Fraction(1),
    }[rule]
    return [[m * own(length) for m in mask] for mask, length in zip(masks, lengths, strict=True)]


def close(got: list[Tensor], want: list[list[Fraction]]) -> bool:
    return all(g.tolist() == pytest.approx([float(x) for x in w], rel=1e-15) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("rule", NORMALISE)
def test_normalise_once(rule):
    """Law 5: each rule by hand; fp64 CPU tensors of the samples' lengths."""
    count = 7 if rule == "constant" else None
    weights = token_weights(batch(), PPO, rule, denominator=count)
    assert list(weights) == ["ppo"]
    assert close(weights["ppo"], by_hand(rule, MASKS, count))
    assert all(w.dtype == torch.float64 and w.device.type == "cpu" for w in weights["ppo"])
    others = {"token", "sample", "sample_sum", "constant"} - {rule}
    assert not any(close(weights["ppo"], by_hand(other, MASKS, 7 if other == "constant" else None)) for other in others)


@pytest.mark.parametrize(("rule", "whole"), [("token", 10), ("sample", 3), ("sample_sum", 3), ("constant", 10)])
def test_calls_add_up_with_a_denominator(rule, whole):
    """Parts of a batch under denominator= weigh what they weigh in the whole batch; without it they do not."""
    samples = batch()
    together = token_weights(samples, PPO, rule, denominator=whole)["ppo"]
    apart = [token_weights([s], PPO, rule, denominator=whole)["ppo"][0] for s in samples]
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    if rule != "constant":
        assert all(torch.equal(a, b) for a, b in zip(together, token_weights(samples, PPO, rule)["ppo"], strict=True))
        alone = [token_weights([s], PPO, rule)["ppo"][0] for s in samples]
        assert not all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_denominator_by_term():
    objective = Objective("ppo", kl=0.1)
    weights = token_weights(batch(), objective, "token", denominator={"ppo": 20, "kl": 5})
    assert close(weights["ppo"], by_hand("token", MASKS, 20)) and close(weights["kl"], by_hand("token", MASKS, 5))
    with pytest.raises(UserError, match=r"names the terms \['ppo'\], but the objective has \['kl', 'ppo'\]"):
        token_weights(batch(), objective, "token", denominator={"ppo": 20})
    with pytest.raises(UserError, match=r"denominator\['kl'\]=0"):
        token_weights(batch(), objective, "token", denominator={"ppo": 20, "kl": 0})


@pytest.mark.parametrize(
    ("rule", "denominator", "words"),
    [
        ("mean", None, "normalise='mean' is not a rule"),
        ("constant", None, "give denominator="),
        ("sum", 3, "divides by nothing"),
        ("token", 0, "denominator=0 must be a finite number above 0"),
        ("token", float("nan"), "denominator=nan"),
        ("token", 1e-320, "denominator=1e-320 must be a finite number above 0, 1e-30 or more"),
        ("token", 10**400, "denominator=10+ must be a finite number"),
        ("token", True, "denominator=True"),
    ],
)
def test_rules_that_cannot_be_honoured_raise(rule, denominator, words):
    with pytest.raises(UserError, match=words):
        token_weights(batch(), PPO, rule, denominator=denominator)


@pytest.mark.parametrize("rule", NORMALISE)
def test_B3_nothing_trained_weighs_nothing(rule):
    count = 4 if rule == "constant" else None
    for samples in ([sample([0, 0]), sample([0])], []):
        weights = token_weights(samples, Objective("ppo", kl=0.1), rule, denominator=count)
        assert [len(w) for w in weights.values()] == [len(samples)] * 2
        assert all(not w.any() and torch.isfinite(w).all() for per in weights.values() for w in per)


@pytest.mark.parametrize("rule", ["token", "sample", "sample_sum"])
def test_B6_empty_responses_are_not_counted(rule):
    """Responses of 0, 3, 0 tokens weigh as the batch of the one with 3."""
    full = sample([0, 1, 1, 1])
    weights = token_weights([sample([0, 0]), full, sample([0])], PPO, rule)["ppo"]
    assert torch.equal(weights[1], token_weights([full], PPO, rule)["ppo"][0]) and weights[1].any()
    assert not weights[0].any() and not weights[2].any()


def test_terms_may_have_their_own_mask():
    """<term>_mask replaces the mask for that term alone; its count is its own."""
    samples = [sample([0, 1, 1], kl_mask=[1, 1, 0]), sample([1, 1])]
    weights = token_weights(samples, Objective("ppo", kl=0.1, value=1.0), "token")
    assert close(weights["ppo"], by_hand("token", [[0, 1, 1], [1, 1]]))
    assert close(weights["value"], by_hand("token", [[0, 1, 1], [1, 1]]))
    assert close(weights["kl"], by_hand("token", [[1, 1, 0], [1, 1]]))
    narrow = [sample([0, 1, 1], kl_mask=[0, 0, 1]), sample([1, 1], kl_mask=[0, 0])]
    assert close(
        token_weights(narrow, Objective("ppo", kl=0.1))["kl"], [[Fraction(0)] * 2 + [Fraction(1)], [Fraction(0)] * 2]
    )
    assert torch.equal(term_masks(narrow, "ppo")[1], torch.ones(2, dtype=torch.float64))
    with pytest.raises(UserError, match=r"sample 0: field 'kl_mask' of shape \[2\] must be \[L\] of 0 and 1"):
        token_weights([sample([1, 1], kl_mask=[0.5, 1])], Objective("ppo", kl=0.1))


@pytest.mark.parametrize("rule", NORMALISE)
def test_weights_have_the_bits_of_one_division_a_number(rule):
    """m / L_s / count, token by token in Python's floats; terms with one mask and one denominator share their weights."""
    draw = torch.Generator().manual_seed(0)
    masks = [torch.rand(length, generator=draw).round().tolist() for length in (1, 7, 300, 2, 41)]
    count = {"ppo": 4.3, "kl": 4.3, "entropy": 7.7} if rule == "constant" else None
    weights = token_weights([sample(m) for m in masks], Objective("ppo", kl=0.1, entropy=0.1), rule, denominator=count)
    lengths = [sum(m) for m in masks]
    total = 4.3 if rule == "constant" else sum(lengths) if rule == "token" else sum(n > 0 for n in lengths)
    for found, mask, length in zip(weights["ppo"], masks, lengths, strict=True):
        own = [m / max(length, 1.0) if rule == "sample" else m for m in mask]
        assert found.tolist() == [m if rule == "sum" else m / total for m in own]
    assert weights["kl"] is weights["ppo"] and (weights["entropy"] is weights["ppo"]) == (rule != "constant")
    if rule == "constant":
        assert weights["entropy"][2].tolist() == [m / 7.7 for m in masks[2]]


@pytest.mark.parametrize("rule", ["token", "sample", "sample_sum"])
def test_adapters_are_normalised_alone(rule):
    samples = [sample([1, 1, 1], "a"), sample([1], "b"), sample([0, 1], "a"), sample([1, 1], None)]
    weights = token_weights(samples, PPO, rule, by_adapter=True)["ppo"]
    for adapter in ("a", "b", None):
        numbers = [n for n, s in enumerate(samples) if s.adapter == adapter]
        alone = token_weights([samples[n] for n in numbers], PPO, rule)["ppo"]
        assert all(torch.equal(weights[n], w) for n, w in zip(numbers, alone, strict=True))
    assert not torch.equal(weights[1], token_weights(samples, PPO, rule)["ppo"][1])


# A small critic and policy, cut into micro-steps ------------------------------------------------------------


def gradient(samples, features, objective, *, normalise="token", micro=None, cut=None, weights=None):
    """Gradient of a linear model (log-prob and value are linear in the features), summed over micro-steps.

    micro: samples a micro-step. cut: also cut each sample's tokens into this many shards, each on its own "rank".
    weights: replaces token_weights (planted faults).
    """
    model = torch.zeros(2, features[0].shape[1], dtype=torch.float64, requires_grad=True)
    found = token_weights(samples, objective, normalise) if weights is None else weights
    micro = micro or len(samples)
    for start in range(0, len(samples), micro):
        for shard in range(cut or 1):
            total = torch.zeros((), dtype=torch.float64)
            for n in range(start, min(start + micro, len(samples))):
                tokens = torch.arange(len(samples[n])).tensor_split(cut or 1)[shard]
                if len(tokens) == 0:
                    continue
                x = features[n][tokens]
                out = TokenOut(-torch.nn.functional.softplus(x @ model[0]), value=x @ model[1])
                fields = Fields({name: v[tokens] for name, v in samples[n].fields.items()})
                own = {name: per[n][tokens] for name, per in found.items()}
                total = total + evaluate(objective, out, fields=fields, weights=own, stats=Stats())
            if total.requires_grad:
                total.backward()
    assert model.grad is not None
    return model.grad


def small(masks=MASKS, seed=0):
    rng = torch.Generator().manual_seed(seed)
    samples, features = [], []
    for mask in masks:
        names = ("advantage", "old_logprob", "return", "old_value")
        fields = {name: torch.randn(len(mask), generator=rng, dtype=torch.float64).tolist() for name in names}
        samples.append(sample(mask, **fields))
        features.append(torch.randn(len(mask), 5, generator=rng, dtype=torch.float64))
    return samples, features


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "value", "dro", "reinforce"])
@pytest.mark.parametrize("rule", ["token", "sample", "sample_sum", "sum"])
def test_A1_A4_A16_micro_steps_do_not_change_the_gradient(loss, rule):
    """The same rule for every loss, the value loss too; samples with 1 and 9 loss tokens among others."""
    samples, features = small(([1], [0] + [1] * 9, [0, 0], [1, 0, 1]))
    objective = Objective(loss)
    whole = gradient(samples, features, objective, normalise=rule)
    assert whole.abs().max() > 1e-3
    for micro in (1, 2):
        got = gradient(samples, features, objective, normalise=rule, micro=micro)
        assert (got - whole).norm() < 1e-14 * whole.norm()


@pytest.mark.parametrize("loss", ["cross_entropy", "value"])
def test_A1_control_mean_of_means_is_another_gradient(loss):
    samples, features = small(([1], [0] + [1] * 9))
    objective = Objective(loss)
    whole = gradient(samples, features, objective)
    naive = {loss: [token_weights([s], objective)[loss][0] / 2 for s in samples]}  # 1/2 and 1/18 instead of 1/10
    assert naive[loss][0].item() == 0.5 and naive[loss][1][1].item() == pytest.approx(1 / 18)
    assert (gradient(samples, features, objective, weights=naive) - whole).norm() > 0.1 * whole.norm()


@pytest.mark.parametrize("masks", [[[0] * 7 + [1] + [0] * 8], [[0] * 12 + [1] * 4], [[1], [0, 1]]])
@pytest.mark.parametrize("cut", [2, 3, 4])
def test_A8_B1_shards_without_loss_tokens(masks, cut):
    """One loss token in 16; a prompt of 12 and a response of 4: shards with nothing add exactly nothing."""
    samples, features = small(masks)
    for rule in ("token", "sample"):
        whole = gradient(samples, features, Objective("cross_entropy"), normalise=rule)
        got = gradient(samples, features, Objective("cross_entropy"), normalise=rule, cut=cut)
        assert torch.isfinite(got).all() and (got - whole).norm() < 1e-14 * whole.norm()
    halved = {"cross_entropy": [w / cut for w in token_weights(samples, Objective("cross_entropy"))["cross_entropy"]]}
    wrong = gradient(samples, features, Objective("cross_entropy"), weights=halved, cut=cut)
    assert (wrong - whole).norm() > 0.1 * whole.norm()  # control: divided by the number of shards
