"""Losses against their formulas, masks that hold whatever stands behind them, settings that are refused, callables."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor

from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.objective import (
    LOSSES,
    Fields,
    Objective,
    Segments,
    Stats,
    TokenOut,
    chunk_loss,
    evaluate,
    evaluate_one_pass,
    head_loss,
    head_outputs,
    token_losses,
)

NAMES = ("advantage", "old_logprob", "ref_logprob", "return", "old_value")
T, K = 40, 3


class Case:
    """T tokens of 3 samples with every output and field. Ratios from e^-2 to e^2, advantages of both signs, some 0."""

    def __init__(self, seed: int = 0):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.logprob = (-normal(T).abs()).requires_grad_()
        self.entropy, self.value = normal(T).abs().requires_grad_(), normal(T).requires_grad_()
        self.topk = torch.log_softmax(normal(T, 6), 1)[:, :K].detach().requires_grad_()
        self.ids = torch.tensor([0] * 9 + [1] * 20 + [2] * 11)
        self.fields = {name: normal(T) for name in NAMES}
        self.fields["advantage"][::7] = 0
        self.fields["old_logprob"] = self.logprob.detach() + 2 * torch.rand(T, generator=rng, dtype=torch.float64) - 1
        self.fields["teacher_ids"] = torch.randint(0, 97, (T, K), generator=rng)
        self.fields["teacher_logprob"] = torch.log_softmax(normal(T, 6), 1)[:, :K]
        self.mask = torch.rand(T, generator=rng) < 0.6
        self.weight = torch.where(self.mask, torch.rand(T, generator=rng, dtype=torch.float64) + 0.1, 0.0)

    @property
    def out(self) -> TokenOut:
        segments = Segments(self.ids, 3, self.mask)
        return TokenOut(self.logprob, self.entropy, segments, self.value, self.topk)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.logprob, self.entropy, self.value, self.topk

    def weights(self, objective: Objective) -> dict[str, Tensor]:
        return {term.name: self.weight for term in objective.token_terms}

    def run(self, objective: Objective) -> tuple[Tensor, list[Tensor], dict[str, float]]:
        stats = Stats()
        total = evaluate(objective, self.out, fields=Fields(self.fields), weights=self.weights(objective), stats=stats)
        grads = torch.autograd.grad(total, self.leaves, allow_unused=True)
        return total.detach(), [torch.zeros(()) if g is None else g for g in grads], stats.reduce()


def ratio_formula(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def formulas(case: Case) -> dict[str, tuple[Objective, Tensor]]:
    """Objective and [T] loss written from the formula, without masks."""
    p, f = case.logprob, case.fields
    adv, old = f["advantage"], f["old_logprob"]
    r = torch.exp(p - old)
    dual = ratio_formula(r, adv, 0.8, 1.3)
    dual = torch.where(adv < 0, torch.minimum(dual, -1.5 * adv), dual)
    mean = torch.stack([(p - old).detach()[(case.ids == s) & case.mask].mean() for s in range(3)])[case.ids]
    held = f["old_value"] + (case.value - f["old_value"]).clamp(-0.3, 0.3)
    q = f["teacher_logprob"].exp()
    d = p - f["ref_logprob"]
    return {
        "cross_entropy": (Objective("cross_entropy"), -p),
        "reinforce": (Objective("reinforce"), -adv * p),
        "importance_sampling": (Objective("importance_sampling"), -r * adv),
        "ppo": (Objective("ppo", clip=0.2), ratio_formula(r, adv, 0.8, 1.2)),
        "ppo_high": (Objective("ppo", clip=0.2, clip_high=0.3), ratio_formula(r, adv, 0.8, 1.3)),
        "ppo_dual": (Objective("ppo", clip=0.2, clip_high=0.3, dual_clip=1.5), dual),
        "cispo": (Objective("cispo", clip=0.1, clip_high=0.5), -r.clamp(0.9, 1.5).detach() * p * adv),
        "dro": (Objective("dro", beta=0.1), -(p * adv - 0.05 * (p - old) ** 2)),
        "gspo": (
            Objective("gspo", clip=0.05, clip_high=0.06),
            ratio_formula(torch.exp(mean + p - p.detach()), adv, 0.95, 1.06),
        ),
        "value": (Objective("value"), 0.5 * (case.value - f["return"]) ** 2),
        "value_clip": (
            Objective("value", clip=0.3),
            0.5 * torch.maximum((case.value - f["return"]) ** 2, (held - f["return"]) ** 2),
        ),
        "distill_topk": (Objective("distill_topk"), (q * (f["teacher_logprob"] - case.topk)).sum(1)),
        "kl_k1": (Objective("cross_entropy", kl=0.3, kl_estimator="k1"), -p + 0.3 * d),
        "kl_k2": (Objective("cross_entropy", kl=0.3, kl_estimator="k2"), -p + 0.3 * 0.5 * d**2),
        "kl_k3": (Objective("cross_entropy", kl=0.3), -p + 0.3 * (torch.exp(-d) - 1 + d)),
        "entropy": (Objective("cross_entropy", entropy=0.2), -p - 0.2 * case.entropy),
        "with_value": (
            Objective("reinforce", value=0.4, value_clip=0.3),
            -adv * p + 0.2 * torch.maximum((case.value - f["return"]) ** 2, (held - f["return"]) ** 2),
        ),
    }


@pytest.mark.parametrize("name", list(formulas(Case())))
def test_loss_equals_its_formula(name):
    case = Case()
    objective, loss = formulas(case)[name]
    want = (case.weight * loss)[case.mask].sum()
    grads = [torch.zeros(()) if g is None else g for g in torch.autograd.grad(want, case.leaves, allow_unused=True)]
    total, got, report = case.run(objective)
    assert total.item() == pytest.approx(want.item(), rel=1e-13)
    assert report["loss/total"] == pytest.approx(want.item(), rel=1e-13)
    for g, w in zip(got, grads, strict=True):
        assert (g - w).norm() <= 1e-13 * w.norm()
    # control: moved outputs give another number
    case.logprob.data -= 0.37 * torch.rand(T, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    case.value.data += 0.37
    case.topk.data -= 0.37
    assert abs(case.run(objective)[0].item() - want.item()) > 1e-6


def test_clips_are_reached():
    """The case exercises every branch: clipped and unclipped, both signs, dual clip, value clip."""
    case = Case()
    for name in ("ppo", "ppo_dual", "cispo", "gspo"):
        share = case.run(formulas(case)[name][0])[2]["ratio/clip_share"]
        assert 0 < share < 1, name
    r = torch.exp(case.logprob - case.fields["old_logprob"])
    assert ((r > 1.5) & (case.fields["advantage"] < 0) & case.mask).any()


def test_loss_maps_tokens_to_tokens():
    """Law 7: [T] in, [T] out; a token's loss does not change when others leave (segments aside)."""
    case = Case()
    half = slice(0, T // 2)
    for name, entry in LOSSES.items():
        if name in ("gspo", "distill_full"):
            continue
        fn = partial(entry.fn, options=entry.options())
        whole = fn(case.out, Fields(case.fields))
        assert whole.shape == (T,)
        out = TokenOut(case.logprob[half], case.entropy[half], None, case.value[half], case.topk[half])
        assert torch.equal(fn(out, Fields(case.fields).take(half)), whole[half]), name
    assert not torch.equal(whole[half], whole[T // 2 :])


# Masks ------------------------------------------------------------------------------------------------------


def objectives() -> list[Objective]:
    found = [objective for objective, _ in formulas(Case()).values()]
    return [*found, Objective(lambda out, fields: torch.log(fields.old_logprob.abs()) * out.logprob.exp(), name="mine")]


@pytest.mark.parametrize("number", range(len(objectives())))
@pytest.mark.parametrize("garbage", [1e30, -1e30, math.inf, -math.inf, math.nan])
def test_N3_garbage_behind_the_mask_changes_nothing(number, garbage):
    objective = objectives()[number]
    clean, dirty = Case(), Case()
    for name in NAMES:
        dirty.fields[name][~dirty.mask] = garbage
    dirty.fields["teacher_logprob"][~dirty.mask] = garbage
    want, grads, report = clean.run(objective)
    total, got, numbers = dirty.run(objective)
    assert torch.equal(total, want) and numbers == report
    for g, w in zip(got, grads, strict=True):
        assert torch.equal(g, w)
        if g.dim():
            assert not g[~dirty.mask].any()  # exactly 0
    broken = Case()
    broken.fields["old_logprob"][broken.mask] = garbage  # control: in front of the mask it matters
    if "old_logprob" in objective.fields:
        assert not torch.equal(broken.run(objective)[0], want)


@pytest.mark.parametrize("loss", ["dro", "importance_sampling", "ppo", "cispo"])
def test_N3_zero_advantage_and_zero_old_logprob_stay_behind_the_mask(loss):
    case = Case()
    for name in ("advantage", "old_logprob"):
        case.fields[name].zero_()
    _, grads, _ = case.run(Objective(loss))
    assert not grads[0][~case.mask].any()
    if loss == "dro":
        assert grads[0][case.mask].any()  # control: the penalty is not zero at advantage 0
        case.weight = torch.full((T,), 0.1, dtype=torch.float64)
        case.mask = torch.ones(T, dtype=torch.bool)
        assert case.run(Objective(loss))[1][0].all()


def test_far_ratios_keep_a_finite_gradient():
    """Clipped tokens have gradient 0, not 0 * inf: exp(800) overflows fp64."""
    case = Case()
    case.fields["old_logprob"] -= 800.0
    case.fields["advantage"].abs_()
    total, grads, _ = case.run(Objective("ppo"))
    assert torch.isfinite(total) and not grads[0].any()
    assert not torch.isfinite(case.run(Objective("importance_sampling"))[0])  # unclipped: an honest overflow


def test_B3_all_weights_zero():
    case = Case()
    case.weight.zero_()
    for objective in objectives():
        total, grads, report = case.run(objective)
        assert total.item() == 0 and all(not g.any() for g in grads)
        assert all(math.isfinite(x) for x in report.values()) and report["tok/trained"] == 0


def test_B6_gspo_with_a_sample_that_has_no_trained_token():
    case = Case()
    case.mask[case.ids == 1] = False
    case.weight[case.ids == 1] = 0.0
    total, grads, _ = case.run(Objective("gspo", clip=0.05))
    assert torch.isfinite(total) and torch.isfinite(grads[0]).all() and not grads[0][case.ids == 1].any()


def test_terms_have_their_own_weights():
    case = Case()
    objective = Objective("cross_entropy", kl=0.5, entropy=0.1)
    weights = {"cross_entropy": case.weight, "kl": case.weight.flip(0), "entropy": torch.ones(T, dtype=torch.float64)}
    total = evaluate(objective, case.out, fields=Fields(case.fields), weights=weights, stats=Stats())
    d = case.logprob - case.fields["ref_logprob"]
    want = (weights["cross_entropy"] * -case.logprob).sum() - 0.1 * case.entropy.sum()
    want = want + 0.5 * (weights["kl"] * (torch.exp(-d) - 1 + d)).sum()
    assert total.item() == pytest.approx(want.item(), rel=1e-13)
    shared = evaluate(
        objective, case.out, fields=Fields(case.fields), weights=dict.fromkeys(weights, case.weight), stats=Stats()
    )
    assert abs(shared.item() - want.item()) > 1e-3


# Equal losses -----------------------------------------------------------------------------------------------


def test_A4_cross_entropy_is_importance_sampling_at_ratio_1():
    case = Case()
    case.fields["advantage"] = torch.ones(T, dtype=torch.float64)
    case.fields["old_logprob"] = case.logprob.detach().clone()
    supervised = case.run(Objective("cross_entropy"))[1][0]
    for loss in ("importance_sampling", "ppo", "reinforce", "cispo"):
        assert (case.run(Objective(loss))[1][0] - supervised).abs().max() < 1e-15
    case.fields["old_logprob"] -= 0.1
    assert (case.run(Objective("importance_sampling"))[1][0] - supervised).abs().max() > 1e-3


def test_L11_ratio_1_and_kl_0_before_the_first_step():
    case = Case()
    case.fields["old_logprob"] = case.fields["ref_logprob"] = case.logprob.detach().clone()
    report = case.run(Objective("ppo", kl=0.1))[2]
    assert report["ratio/mean"] == 1 and report["ratio/max"] == 1 and report["kl/old_mean"] == 0
    assert report["loss/kl"] == 0 and report["ratio/clip_share"] == 0
    case.fields["ref_logprob"] = case.fields["ref_logprob"] + 1e-3
    assert case.run(Objective("ppo", kl=0.1))[2]["loss/kl"] > 0


def test_A13_custom_loss_equals_the_built_in_one():
    def mine(out: TokenOut, fields: Fields) -> Tensor:
        ratio = torch.exp(out.logprob - fields.old_logprob)
        return ratio_formula(ratio, fields["advantage"], 0.8, 1.2)

    def half(out: TokenOut, fields: Fields) -> Tensor:
        return 0.5 * mine(out, fields)

    case = Case()
    total, grads, report = case.run(Objective("ppo"))
    own, got, numbers = case.run(Objective(mine))
    assert own.item() == pytest.approx(total.item(), rel=1e-14) and "loss/mine" in numbers
    assert (got[0] - grads[0]).abs().max() < 1e-15
    assert numbers["loss/total"] == pytest.approx(report["loss/total"], rel=1e-14)
    assert (case.run(Objective(half))[1][0] - grads[0]).abs().max() > 1e-3


def test_N4_loss_is_minus_weight_times_logprob():
    case = Case()
    report = case.run(Objective("cross_entropy"))[2]
    want = -(case.weight * case.logprob.detach()).sum().item()
    assert want != 0
    assert report["loss/cross_entropy"] == pytest.approx(want, rel=1e-14)
    assert report["logprob/mean"] == pytest.approx(-want / case.weight.sum().item(), rel=1e-13)


# One pass through the head ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "objective",
    [
        Objective("ppo", kl=0.1, entropy=0.02, value=0.5),
        Objective("distill_topk", entropy=0.1),
        Objective(lambda out, fields: -fields.advantage * out.logprob, token_wise=True),
    ],
)
def test_one_pass_evaluate_equals_two_pass(objective):
    case = Case()
    rng = torch.Generator().manual_seed(5)
    hidden = torch.randn(T, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(97, 8, generator=rng, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 97, (T,), generator=rng)
    leaves = (hidden, weight, case.value) if objective.needs_value else (hidden, weight)
    given = {"needed": case.mask, "entropy": True, "chunk": 7}
    given |= {"teacher_ids": case.fields["teacher_ids"]} if objective.needs_topk else {}
    fields, weights = Fields(case.fields), case.weights(objective)
    assert objective.one_pass
    two = head_outputs(hidden, weight, targets, **given)
    out = TokenOut(two.logprob, two.entropy, None, case.value, two.topk_logprob)
    stats = Stats()
    want = evaluate(objective, out, fields=fields, weights=weights, stats=stats)
    grads = torch.autograd.grad(want, leaves)
    formed = head_loss(hidden, weight, targets, chunk_loss(objective, fields, weights), **given)
    out = TokenOut(formed.logprob, formed.entropy, None, case.value, formed.topk_logprob)
    again = Stats()
    total = evaluate_one_pass(objective, formed, out, fields=fields, weights=weights, stats=again)
    assert total.item() == pytest.approx(want.item(), rel=1e-13)
    assert again.reduce() == stats.reduce()
    for g, w in zip(torch.autograd.grad(total, leaves), grads, strict=True):
        assert (g - w).norm() <= 1e-13 * w.norm() and w.any()


def test_one_pass_is_for_token_wise_losses_of_the_head():
    assert Objective("ppo", kl=0.1, entropy=0.1, value=0.1).one_pass
    assert not Objective("gspo").one_pass
    assert not Objective("value").one_pass
    assert Objective("distill_full").one_pass
    assert not Objective(lambda out, fields: out.logprob).one_pass  # may read segments
    assert not Objective(lambda out, fields: out.logprob * out.value, uses=("value",), token_wise=True).one_pass


# Settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Objective("ppo2"), "loss 'ppo2' is unknown. Use one of cross_entropy"),
        (lambda: Objective("ppo", beta=0.1), "does not take beta: its options are clip, clip_high, dual_clip"),
        (lambda: Objective("cross_entropy", clip=0.2), "does not take clip: its options are none"),
        (lambda: Objective("ppo", clipp=0.2), "does not take clipp"),
        (lambda: Objective("ppo", clip=-0.2), "clip=-0.2 must be a finite number above 0"),
        (lambda: Objective("ppo", clip="0.2"), "clip='0.2' must be a finite number above 0"),
        (lambda: Objective("ppo", dual_clip=0.5), "dual_clip=0.5 must be a number above 1"),
        (lambda: Objective("ppo", mtp="x"), "mtp='x' must be a number"),
        (lambda: Objective("dro", beta=math.nan), "beta=nan"),
        (lambda: Objective("distill_topk", topk=0), "topk=0"),
        (lambda: Objective("ppo", kl=-0.1), "kl=-0.1"),
        (lambda: Objective("ppo", kl=0.1, kl_estimator="k4"), "kl_estimator='k4'"),
        (lambda: Objective("ppo", kl_estimator="k1"), "no effect with kl=0.0"),
        (lambda: Objective("ppo", value_clip=0.2), "no effect with value=0.0"),
        (lambda: Objective("value", clip=0.2, value_clip=0.1), "clip=0.2 and value_clip=0.1, two names of one setting"),
        (lambda: Objective("value", clip=None, value_clip=0.1), "clip=None and value_clip=0.1"),
        (lambda: Objective("ppo", kl=10**400), "kl=10+ must be a finite number"),
        (lambda: Objective("value", value=0.5), "two terms share a name"),
        (lambda: Objective("ppo", fields=("x",)), "which only a callable takes"),
        (lambda: Objective(lambda out, fields: out.logprob, clip=0.2), "a callable has no options"),
        (lambda: Objective(lambda out, fields: out.logprob, uses=("logits",)), "uses=.*logits.* is unknown"),
    ],
)
def test_settings_that_cannot_be_honoured_raise(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_missing_field_names_sample_field_and_loss():
    good = Sample([1, 2], [2, 3], [1, 1], fields={"advantage": [1.0, 1.0], "old_logprob": [0.0, 0.0]})
    bad = Sample([1, 2], [2, 3], [1, 1], fields={"advantage": [1.0, 1.0]})
    Objective("ppo").check([good])
    with pytest.raises(UserError, match=r"sample 1 has no field 'old_logprob', which the loss term 'ppo' reads"):
        Objective("ppo").check([good, bad])
    with pytest.raises(UserError, match=r"sample 0 has no field 'ref_logprob', which the loss term 'kl' reads"):
        Objective("ppo", kl=0.1).check([good])
    wide = Sample([1], [2], [1], fields={"advantage": [[1.0, 2.0]], "old_logprob": [0.0]})
    with pytest.raises(UserError, match=r"'advantage' has shape \[1, 2\]"):
        Objective("ppo").check([wide])
    teacher = {"teacher_ids": [[1, 2]], "teacher_logprob": [[-1.0, -2.0, -3.0]]}
    with pytest.raises(UserError, match="must have the same shape"):
        Objective("distill_topk").check([Sample([1], [2], [1], fields=teacher)])
    teacher["teacher_logprob"] = [[-1.0, -2.0]]
    with pytest.raises(UserError, match="topk=4, but teacher_ids has 2 columns"):
        Objective("distill_topk", topk=4).check([Sample([1], [2], [1], fields=teacher)])


def test_stream_fields():
    sample = Sample(
        [1], [2], [1], fields={"advantage": [1.0], "old_logprob": [0.0], "mine": [3.0], "temperature": [1.0]}
    )
    assert Objective("reinforce").stream_fields([sample]) == ("advantage", "old_logprob")
    assert Objective("cross_entropy").stream_fields([]) == ()
    anything = Objective(lambda out, fields: fields.mine * out.logprob)
    assert anything.stream_fields([sample]) == ("advantage", "old_logprob", "mine")
    assert Objective(lambda out, fields: out.logprob, fields=("mine",)).stream_fields([sample]) == (
        "mine",
        "old_logprob",
    )


def test_callable_faults_are_named():
    case = Case()
    with pytest.raises(UserError, match=r"returned \[\]; a loss maps \[T\] tensors to one loss a token"):
        case.run(Objective(lambda out, fields: out.logprob.mean()))
    with pytest.raises(UserError, match="reads field 'nothing'"):
        case.run(Objective(lambda out, fields: fields.nothing))
    with pytest.raises(UserError, match="needs a value head"):
        token_losses(Objective("value"), TokenOut(case.logprob), Fields(case.fields), {"value": case.weight})
    with pytest.raises(UserError, match=r"needs TokenOut.segments"):
        token_losses(Objective("gspo"), TokenOut(case.logprob), Fields(case.fields), {"gspo": case.weight})


@pytest.mark.parametrize("read", [lambda x: x, lambda x: (x - 1.0).square(), lambda x: x.square()])
def test_a_loss_that_reads_what_was_not_computed_is_told_to_declare_it(read):
    out = TokenOut(torch.zeros(T, requires_grad=True), torch.zeros(T, requires_grad=True))
    weights = {"custom": torch.ones(T)}
    with pytest.raises(UserError, match=r"not compute out.value, .*uses=\('value',\)\) with .*value_head=True"):
        token_losses(Objective(lambda out, fields: read(out.value)), out, Fields({}), weights)
    with pytest.raises(TypeError, match="must be Tensor, not str"):  # not about None: the callable's own error
        token_losses(Objective(lambda out, fields: torch.exp("x")), out, Fields({}), weights)


def test_a_loss_without_a_gradient_or_not_real_is_refused():
    case, weight = Case(), torch.ones(T, dtype=torch.float64)
    logprob = case.logprob.detach().requires_grad_()

    def run(fn, logprob=logprob, weight=weight):
        return token_losses(Objective(fn), TokenOut(logprob), Fields({}), {"custom": weight})["custom"]

    cut = partial(lambda out, fields: out.logprob.detach())
    with pytest.raises(UserError, match="loss 'custom' does not require a gradient"):
        run(cut)
    with pytest.raises(UserError, match=r"returned torch.complex\d+; a loss is real"):
        run(lambda out, fields: out.logprob * 1j)
    with pytest.raises(UserError, match=r"returned torch.bool; a loss is real"):
        run(lambda out, fields: out.logprob > 0)
    assert not run(cut, weight=torch.zeros(T)).any()  # nothing trained: nothing to differentiate
    assert not run(cut, logprob=logprob.detach()).requires_grad  # evaluation
    with torch.no_grad():
        run(cut)
    assert run(lambda out, fields: -out.logprob).requires_grad


def test_a_detached_loss_is_refused_in_the_one_pass_head():
    hidden, head = torch.randn(T, 4, requires_grad=True), torch.randn(9, 4)
    objective = Objective(lambda out, fields: out.logprob.detach(), token_wise=True, uses=())
    assert objective.one_pass
    loss = chunk_loss(objective, Fields({}), {"custom": torch.ones(T, dtype=torch.float64)})
    with pytest.raises(UserError, match="does not require a gradient"):
        head_loss(hidden, head, torch.zeros(T, dtype=torch.long), loss)


def test_a_mask_of_no_term_is_refused():
    def masked(name):
        return Sample([1, 2], [2, 3], [1, 1], fields={name: [0, 1]})

    for name in ("ppo_mask", "kl_mask", "value_mask", "mtp_mask", "dro_mask", "custom_mask", "old_mask_share"):
        Objective("cross_entropy").check([masked(name)])
    with pytest.raises(UserError, match=r"sample 1: field 'pppo_mask' is the mask of no term.*cispo_mask.*ppo_mask"):
        Objective("cross_entropy").check([masked("ppo_mask"), masked("pppo_mask")])
    Objective(lambda out, fields: out.logprob, name="mine").check([masked("mine_mask")])
    Objective(lambda out, fields: out.logprob * fields.seen_mask, fields=("seen_mask",)).check([masked("seen_mask")])


def test_objectives_travel_and_compare():
    objective = Objective("ppo", clip=0.1, kl=0.2)
    assert pickle.loads(pickle.dumps(objective)) == objective != Objective("ppo", clip=0.2, kl=0.2)
    assert [term.name for term in Objective("ppo", kl=1, entropy=1, value=1, moe_aux=1, moe_z=1, mtp=1).terms] == [
        "ppo", "kl", "entropy", "value", "moe_aux", "moe_z", "mtp",
    ]  # fmt: skip
    assert Objective("ppo", value=0.1, value_clip=0.2).fields == ("advantage", "old_logprob", "return", "old_value")
    assert Objective("value", value_clip=0.2).options == Objective("value", clip=0.2).options
    assert Objective("ppo", entropy=0.1).needs_entropy and not Objective("ppo").needs_entropy
    assert Objective("value").needs_value and Objective("distill_topk").needs_topk
    fields = copy.deepcopy(Fields({"advantage": torch.ones(2)}))
    assert torch.equal(pickle.loads(pickle.dumps(fields)).advantage, torch.ones(2)) and "advantage" in fields


def test_fields_from_streams_puts_tokens_first():
    fields = Fields.from_streams(
        {"teacher_ids": torch.zeros(3, 5, dtype=torch.int64), "x": torch.zeros(5)}, torch.float64
    )
    assert fields["teacher_ids"].shape == (5, 3) and fields["teacher_ids"].dtype == torch.int64
    assert fields.x.dtype == torch.float64
