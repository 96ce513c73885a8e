"""The chunked head against plain torch in fp64: log-prob, entropy, top-k, full KL, and every gradient."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.errors import UserError
from longspan.objective import TeacherHead, TokenOut, head_kl, head_loss, head_outputs

VOCABULARIES = (1, 7, 97, 255, 257, 1000)
LIMIT = 1e-12  # fp64: a few hundred roundings of 1e-16


class Case:
    """Random hidden [T, E], weight [V, E] ... and upstream gradients, some 0, some negative."""

    def __init__(self, vocab: int, *, tokens: int = 23, width: int = 16, softcap: float | None = None, seed: int = 0):
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.hidden, self.weight, self.bias = normal(tokens, width), normal(vocab, width), normal(vocab)
        self.targets = torch.randint(0, vocab, (tokens,), generator=rng)
        self.needed = torch.rand(tokens, generator=rng) < 0.7
        self.temperature = 0.5 + torch.rand(tokens, generator=rng, dtype=torch.float64)
        self.ids = torch.randint(0, vocab, (tokens, 3), generator=rng)
        self.ids[:, 1] = self.ids[:, 0]  # an id may be named twice
        self.softcap = softcap
        self.g_logprob = normal(tokens) * (torch.rand(tokens, generator=rng) < 0.6)  # some exactly 0
        self.g_entropy, self.g_topk = normal(tokens), normal(tokens, 3)
        for x in (self.hidden, self.weight, self.bias):
            x.requires_grad_()

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def log_softmax(self) -> Tensor:
        z = self.hidden @ self.weight.t() + self.bias
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return torch.log_softmax(z / self.temperature[:, None], -1)

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        log_p = self.log_softmax()
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(1, self.targets[:, None])[:, 0], entropy, log_p.gather(1, self.ids)

    def head(self, **changed):
        targets = torch.where(self.needed, self.targets, 10**9)  # anything may stand at a token that is not needed
        given = {
            "needed": self.needed,
            "temperature": self.temperature,
            "bias": self.bias,
            "softcap": self.softcap,
            "entropy": True,
            "teacher_ids": self.ids,
            "chunk": 5,
        }
        return head_outputs(self.hidden, self.weight, targets, **(given | changed))

    def weighted(self, logprob: Tensor, entropy: Tensor, topk: Tensor) -> Tensor:
        keep = self.needed
        total = (logprob * self.g_logprob)[keep].sum() + (entropy * self.g_entropy)[keep].sum()
        return total + (topk * self.g_topk)[keep].sum()


def relative(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """Worst relative L2 error; absolute where the wanted gradient is 0 (a vocabulary of 1)."""
    return max(
        ((g - w).norm() / (w.norm() if w.norm() > 1e-12 else 1.0)).item() for g, w in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_F1_F2_head_equals_plain_torch(vocab, softcap):
    case = Case(vocab, softcap=softcap)
    out, plain = case.head(), case.plain()
    keep = case.needed
    for got, want in zip((out.logprob, out.entropy, out.topk_logprob), plain, strict=True):
        assert (got - want)[keep].abs().max() < LIMIT
        assert not got[~keep].any()
    assert (out.logprob <= 0).all() and (out.entropy >= 0).all() and (out.topk_logprob <= 0).all()
    got = torch.autograd.grad(case.weighted(out.logprob, out.entropy, out.topk_logprob), case.parameters)
    want = torch.autograd.grad(case.weighted(*plain), case.parameters)
    assert relative(got, want) < LIMIT
    assert not got[0][~keep].any()


@pytest.mark.parametrize("fault", ["unit_upstream", "unmasked_tail", "shifted"])
def test_F1_F2_control_faults_are_seen(fault):
    """The comparison above fails for the faults that shipped elsewhere."""
    case = Case(97)
    out, (logprob, _, _) = case.head(), case.plain()
    keep = case.needed
    if fault == "unit_upstream":  # gradient of the plain sum, as if every upstream gradient were 1
        got = torch.autograd.grad(out.logprob.sum(), case.parameters)
        want = torch.autograd.grad((logprob * case.g_logprob)[keep].sum(), case.parameters)
        assert relative(got, want) > 0.1
    elif fault == "unmasked_tail":  # 31 columns of logit 0 beside the vocabulary
        z = (case.hidden @ case.weight.t() + case.bias) / case.temperature[:, None]
        padded = torch.log_softmax(torch.nn.functional.pad(z, (0, 31)), -1).gather(1, case.targets[:, None])[:, 0]
        assert (out.logprob - padded)[keep].abs().max() > 1e-3
    else:
        assert (out.logprob[1:] - logprob[:-1])[keep[1:]].abs().max() > 1e-3


@pytest.mark.parametrize("chunk", [1, 4, 23, 1000, "auto"])
def test_chunk_size_does_not_change_numbers(chunk):
    case = Case(97)
    out, plain = case.head(chunk=chunk), case.plain()
    got = torch.autograd.grad(case.weighted(out.logprob, out.entropy, out.topk_logprob), case.parameters)
    assert relative(got, torch.autograd.grad(case.weighted(*plain), case.parameters)) < LIMIT


def test_F5_temperature_scales_logits():
    """Logits [2, 1, 0] at T = 0.5: -0.143 is right; -0.815 is log-probs divided by T."""
    weight = torch.tensor([[2.0], [1.0], [0.0]], dtype=torch.float64)
    hidden = torch.ones(1, 1, dtype=torch.float64)
    out = head_outputs(hidden, weight, torch.tensor([0]), temperature=torch.tensor([0.5], dtype=torch.float64))
    assert out.logprob.item() == pytest.approx(-0.142932, abs=1e-6)
    wrong = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]), 0)[0] / 0.5
    assert abs(out.logprob.item() - wrong.item()) > 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_F5_ratio_is_1_for_own_samples(temperature):
    case = Case(97)
    t = torch.full((23,), temperature, dtype=torch.float64)
    own = torch.log_softmax((case.hidden @ case.weight.t() + case.bias) / temperature, -1)
    own = own.gather(1, case.targets[:, None])[:, 0]
    ratio = torch.exp(case.head(temperature=t).logprob - own)[case.needed]
    assert (ratio - 1).abs().max() < LIMIT


def test_F7_temperature_goes_with_its_token():
    """A ramp of temperatures: a cut of the tokens takes the same part of the ramp; another part gives other numbers."""
    case = Case(97, tokens=24)
    ramp = torch.linspace(0.5, 2.0, 24, dtype=torch.float64)
    whole = head_outputs(case.hidden, case.weight, case.targets, temperature=ramp).logprob
    part = slice(9, 17)
    cut = head_outputs(case.hidden[part], case.weight, case.targets[part], temperature=ramp[part]).logprob
    assert (whole[part] - cut).abs().max() < LIMIT
    wrong = head_outputs(case.hidden[part], case.weight, case.targets[part], temperature=ramp[:8]).logprob
    assert (whole[part] - wrong).abs().max() > 1e-3
    with pytest.raises(UserError, match="temperature has shape"):
        head_outputs(case.hidden[part], case.weight, case.targets[part], temperature=ramp)


def test_F9_offsets_past_32_bits():
    """Hidden rows 2^28 elements apart: the last of 12 starts past 2^31. Its pages are never touched elsewhere."""
    rows, stride, width = 12, 2**28, 8
    far = torch.empty(rows * stride, dtype=torch.bfloat16).as_strided((rows, width), (stride, 1))
    near = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    far.copy_(near)
    weight = torch.randn(97, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = torch.arange(rows)
    got = head_outputs(far, weight, targets).logprob
    assert torch.equal(got, head_outputs(near, weight, targets).logprob)
    assert not torch.equal(got[-1:], head_outputs(near[:1], weight, targets[-1:]).logprob)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_low_precision_results_are_fp32(dtype, limit):
    """Logits are fp32: log-probs of bf16 parameters are exact to fp32; gradients to their own dtype's rounding
    (2^-8)."""
    case = Case(257)
    low = [x.detach().to(dtype).requires_grad_() for x in case.parameters]
    out = head_outputs(low[0], low[1], case.targets, bias=low[2], temperature=case.temperature, entropy=True, chunk=5)
    assert out.logprob.dtype == torch.float32
    exact = [x.detach().double().requires_grad_() for x in low]
    z = (exact[0] @ exact[1].t() + exact[2]) / case.temperature[:, None]
    log_p = torch.log_softmax(z, -1)
    want = log_p.gather(1, case.targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert (out.logprob - want).abs().max() < 1e-5
    assert (out.entropy - entropy).abs().max() < 1e-5
    got = torch.autograd.grad((out.logprob * case.g_logprob + out.entropy * case.g_entropy).sum(), low)
    grads = torch.autograd.grad((want * case.g_logprob + entropy * case.g_entropy).sum(), exact)
    assert all(g.dtype == dtype for g in got)
    assert relative(tuple(g.double() for g in got), grads) < limit


def test_frozen_parts_get_no_gradient():
    case = Case(97)
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    with _Seen() as seen:
        case.head().logprob.sum().backward()
    assert case.weight.grad is None and case.bias.grad is None
    assert case.hidden.grad is not None and case.hidden.grad.any()
    assert (97, 16) not in seen.shapes  # no dW was made
    only_weight = Case(97)
    only_weight.hidden.requires_grad_(False)
    only_weight.head().logprob.sum().backward()
    assert only_weight.hidden.grad is None and only_weight.weight.grad.any()


def test_B1_nothing_needed_is_zero_and_stays_on_the_graph():
    """A shard without a trained token: result 0, gradients exactly 0, backward runs (its collectives would too)."""
    case = Case(97)
    out = case.head(needed=torch.zeros(23, dtype=torch.bool))
    assert out.logprob.requires_grad and not out.logprob.any()
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert all(not x.grad.any() for x in case.parameters)


def test_entropy_alone_and_logprob_alone():
    case = Case(97)
    logprob, entropy, _ = case.plain()
    keep = case.needed
    for name, want in (("logprob", logprob), ("entropy", entropy)):
        got = torch.autograd.grad(getattr(case.head(), name)[keep].square().sum(), case.parameters)
        wanted = torch.autograd.grad(want[keep].square().sum(), case.parameters, retain_graph=True)
        assert relative(got, wanted) < LIMIT


def test_own_topk():
    case = Case(97)
    out = case.head(teacher_ids=None, topk=4)
    best = case.log_softmax().topk(4, dim=1)
    keep = case.needed
    assert torch.equal(out.topk_ids[keep], best.indices[keep])
    assert (out.topk_logprob - best.values)[keep].abs().max() < LIMIT
    g = case.g_topk.repeat(1, 2)[:, :4]
    got = torch.autograd.grad((out.topk_logprob * g).sum(), case.parameters)
    want = torch.autograd.grad((best.values * g)[keep].sum(), case.parameters)
    assert relative(got, want) < LIMIT
    with pytest.raises(UserError, match="topk=98"):
        case.head(teacher_ids=None, topk=98)


def test_absent_teacher_ids_are_zero():
    case = Case(97)
    ids = case.ids.clone()
    ids[::2, 2] = -1
    out = case.head(teacher_ids=ids)
    assert not out.topk_logprob[::2, 2].any()
    got = torch.autograd.grad((out.topk_logprob * case.g_topk).sum(), case.parameters)
    kept = case.g_topk * (ids >= 0)
    want = torch.autograd.grad((case.plain()[2] * kept)[case.needed].sum(), case.parameters)
    assert relative(got, want) < LIMIT


# One pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_one_pass_equals_two(vocab):
    case = Case(vocab, softcap=8.0)
    two = case.head()
    want = (case.g_logprob * two.logprob.exp() + case.g_entropy * two.entropy.square()).sum()
    want = want + (case.g_topk * two.topk_logprob).sum()

    def loss(out: TokenOut, where) -> Tensor:
        parts = case.g_logprob[where] * out.logprob.exp() + case.g_entropy[where] * out.entropy.square()
        return parts + (case.g_topk[where] * out.topk_logprob).sum(1)

    one = head_loss(
        case.hidden,
        case.weight,
        torch.where(case.needed, case.targets, -5),
        loss,
        needed=case.needed,
        temperature=case.temperature,
        bias=case.bias,
        softcap=case.softcap,
        entropy=True,
        teacher_ids=case.ids,
        chunk=5,
    )
    wanted = (
        want.item() + (~case.needed).double().mul(case.g_logprob).sum().item() * -1.0
    )  # exp(0) = 1 where not needed
    assert one.total.item() == pytest.approx(wanted, abs=LIMIT * 10)
    assert torch.equal(one.logprob, two.logprob) and torch.equal(one.entropy, two.entropy)
    assert not one.logprob.requires_grad
    got = torch.autograd.grad(-3.0 * one.total, case.parameters)  # a real upstream gradient
    grads = torch.autograd.grad(-3.0 * want, case.parameters)
    assert relative(got, grads) < LIMIT
    if vocab > 1:
        assert relative(got, tuple(g / 3 for g in grads)) > 0.1  # control: the upstream gradient matters


def test_one_pass_backward_runs_once():
    case = Case(7)
    one = head_loss(case.hidden, case.weight, case.targets, lambda out, where: out.logprob)
    one.total.backward(retain_graph=True)
    with pytest.raises(UserError, match="backward ran twice"):
        one.total.backward()


def test_one_pass_without_needed_tokens_or_gradient():
    case = Case(7)
    none = torch.zeros(23, dtype=torch.bool)
    one = head_loss(case.hidden, case.weight, case.targets, lambda out, where: out.logprob, needed=none)
    one.total.backward()
    assert one.total.item() == 0 and not case.hidden.grad.any() and not case.weight.grad.any()
    with torch.no_grad():
        assert not head_loss(case.hidden, case.weight, case.targets, lambda out, where: out.logprob).total.requires_grad


# Full KL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_full_kl_equals_plain_torch(vocab, direction):
    case, other = Case(vocab, softcap=6.0), Case(vocab, width=12, seed=1)
    teacher = TeacherHead(other.hidden, other.weight, other.bias)
    kl = head_kl(
        case.hidden,
        case.weight,
        teacher,
        needed=case.needed,
        temperature=case.temperature,
        bias=case.bias,
        softcap=case.softcap,
        direction=direction,
        chunk=5,
    )
    log_p = case.log_softmax()
    other.temperature = case.temperature
    log_q = other.log_softmax().detach()
    pair = (log_q, log_p) if direction == "forward" else (log_p, log_q)
    want = (pair[0].exp() * (pair[0] - pair[1])).sum(-1)
    keep = case.needed
    assert (kl - want)[keep].abs().max() < 1e-11 and not kl[~keep].any()
    got = torch.autograd.grad((kl * case.g_entropy).sum(), case.parameters)
    grads = torch.autograd.grad((want * case.g_entropy)[keep].sum(), case.parameters)
    assert relative(got, grads) < LIMIT * 10
    assert other.weight.grad is None
    if vocab > 1:  # control: the two directions differ
        swapped = (pair[1].exp() * (pair[1] - pair[0])).sum(-1)
        assert (kl - swapped)[keep].abs().max() > 1e-3


def test_full_kl_refuses_another_vocabulary():
    case, other = Case(97), Case(7)
    with pytest.raises(UserError, match="one vocabulary"):
        head_kl(case.hidden, case.weight, TeacherHead(other.hidden, other.weight))
    with pytest.raises(UserError, match="direction='sideways'"):
        head_kl(case.hidden, case.weight, TeacherHead(case.hidden, case.weight), direction="sideways")


# Memory and bad input ---------------------------------------------------------------------------------------


class _Seen(TorchDispatchMode):
    """Shapes of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.shapes.add(tuple(x.shape))
        return out


@pytest.mark.parametrize("way", ["head", "one_pass", "kl"])
def test_never_more_than_a_chunk_of_logits(way):
    case = Case(97)
    with _Seen() as seen:
        if way == "head":
            out = case.head()
            case.weighted(out.logprob, out.entropy, out.topk_logprob).backward()
        elif way == "one_pass":
            head_loss(case.hidden, case.weight, case.targets, lambda out, where: out.logprob, chunk=5).total.backward()
        else:
            teacher = TeacherHead(case.hidden.detach(), case.weight.detach())
            head_kl(case.hidden, case.weight, teacher, chunk=5).sum().backward()
    rows = {shape[0] for shape in seen.shapes if len(shape) == 2 and shape[1] == 97}
    assert max(rows - {16}) == 5  # [16, 97] is the transposed weight
    with _Seen() as plain:
        case.plain()
    assert (23, 97) in plain.shapes  # control


def test_bad_input_is_named():
    case = Case(7)
    with pytest.raises(UserError, match="one E"):
        head_outputs(case.hidden[:, :3], case.weight, case.targets)
    with pytest.raises(UserError, match="Cast one"):
        head_outputs(case.hidden.float(), case.weight, case.targets)
    with pytest.raises(UserError, match="bias has shape"):
        head_outputs(case.hidden, case.weight, case.targets, bias=case.bias[:3])
    with pytest.raises(UserError, match="targets has shape"):
        head_outputs(case.hidden, case.weight, case.targets[:3])
    with pytest.raises(UserError, match="chunk=0"):
        head_outputs(case.hidden, case.weight, case.targets, chunk=0)
    with pytest.raises(UserError, match="softcap=0"):
        head_outputs(case.hidden, case.weight, case.targets, softcap=0.0)
    with pytest.raises(UserError, match="Give one"):
        head_outputs(case.hidden, case.weight, case.targets, topk=1, teacher_ids=case.ids)
