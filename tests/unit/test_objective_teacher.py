"""Losses that read a teacher, formed inside the head in one pass: the same numbers as head_outputs and head_kl, at one
matmul a side less. fp64 against plain log-softmax; control: the other direction.
"""

import pytest
import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.objective import Objective, TeacherHead, TokenOut, head_loss

TOKENS, WIDTH, WIDER, VOCAB = 23, 8, 12, 97


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """A student with a soft cap, a wider teacher with a bias, holes in the mask, temperatures."""

    def __init__(self) -> None:
        self.hidden = draw(TOKENS, WIDTH, seed=0).requires_grad_()
        self.weight = draw(VOCAB, WIDTH, seed=1).requires_grad_()
        self.bias = draw(VOCAB, seed=2).requires_grad_()
        self.teacher = TeacherHead(draw(TOKENS, WIDER, seed=3), draw(VOCAB, WIDER, seed=4), draw(VOCAB, seed=5))
        self.targets = torch.arange(TOKENS) % VOCAB
        self.needed = torch.arange(TOKENS) % 3 != 1
        self.temperature = 0.5 + torch.rand(TOKENS, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        self.pull = draw(TOKENS, seed=7)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, self.weight, self.bias

    def plain(self, direction: str) -> tuple[Tensor, Tensor, Tensor]:
        """KL, log-prob and entropy [T] from [T, V]."""
        z = torch.tanh((self.hidden @ self.weight.t() + self.bias) / 6) * 6
        t = self.teacher.hidden @ self.teacher.weight.t() + self.teacher.bias
        p, q = (torch.log_softmax(x / self.temperature[:, None], 1) for x in (z, t))
        over, other = (q, p) if direction == "forward" else (p, q)
        return (over.exp() * (over - other)).sum(1), p.gather(1, self.targets[:, None])[:, 0], -(p.exp() * p).sum(1)

    def formed(self, loss, direction: str):
        return head_loss(
            self.hidden,
            self.weight,
            self.targets,
            loss,
            needed=self.needed,
            temperature=self.temperature,
            bias=self.bias,
            softcap=6.0,
            entropy=True,
            teacher=self.teacher,
            direction=direction,
            chunk=5,
        )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("mixed", [False, True], ids=["kl", "kl, log-prob and entropy"])
def test_one_pass_equals_plain_log_softmax(direction: str, mixed: bool) -> None:
    case = Case()

    def loss(out: TokenOut, where: Tensor | slice) -> Tensor:
        alone = case.pull[where] * out.teacher_kl**2
        return alone + out.logprob * out.teacher_kl - 0.3 * out.entropy if mixed else alone

    found = case.formed(loss, direction)
    kl, logprob, entropy = (torch.where(case.needed, x, 0.0) for x in case.plain(direction))
    want = loss(TokenOut(logprob, entropy, teacher_kl=kl), slice(None)).sum()
    assert found.total.item() == pytest.approx(want.item(), rel=1e-12)
    for name, x in (("teacher_kl", kl), ("logprob", logprob), ("entropy", entropy)):
        assert (getattr(found, name) - x).abs().max() < 1e-11
    pairs = zip(
        torch.autograd.grad(found.total * 2, case.leaves()), torch.autograd.grad(want * 2, case.leaves()), strict=True
    )
    for got, expected in pairs:
        assert (got - expected).norm() < 1e-12 * expected.norm()
    other = case.plain("reverse" if direction == "forward" else "forward")[0]
    assert (found.teacher_kl - other)[case.needed].abs().max() > 1e-2


def test_which_losses_the_head_forms() -> None:
    assert Objective("distill_full", entropy=0.1).one_pass
    both = Objective(lambda out, fields: out.logprob + out.teacher_kl, uses=("teacher_kl",), token_wise=True)
    assert both.one_pass and both.needs_teacher and both.teacher_direction == "forward"
    assert not Objective(lambda out, fields: out.teacher_kl, uses=("teacher_kl",)).one_pass  # may read segments


def test_another_vocabulary_is_refused() -> None:
    case = Case()
    case.teacher = TeacherHead(draw(TOKENS, WIDER, seed=3), draw(7, WIDER, seed=4))
    with pytest.raises(UserError, match="7 ids and 23 tokens, the student 97"):
        case.formed(lambda out, where: out.teacher_kl, "forward")
