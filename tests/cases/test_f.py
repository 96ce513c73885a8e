"""Kind F, the head: real upstream gradients, any vocabulary, temperatures that stay with their tokens."""

import pytest
import torch
from kit import Question, ask, changed, check, rows, truth

from longspan.objective import head_outputs
from longspan.parity.cases import Case

RAMPS = [
    changed(sample, fields={"temperature": torch.linspace(0.5, 2.0, len(sample)).double()})
    for sample in rows((11, 3, 7))
]
SIGNS = [
    changed(sample, fields={"advantage": torch.tensor([-2.0, 0.0, 1.5, 0.3, -0.7] * 5)[: len(sample)].double()})
    for sample in rows((13, 9), ([1, 2, 3, 4, 7, 12], [0, 2, 8]))
]


def at(temperature: float) -> Question:
    """Ragged rows whose old log-probs are their own at this temperature."""
    hot = [changed(s, fields={"temperature": torch.full((len(s),), temperature).double()}) for s in rows((11, 3, 7))]
    own = truth(Question(hot))[0]
    samples = [changed(s, fields={"old_logprob": o}) for s, o in zip(hot, own, strict=True)]
    return Question(samples, Case("ppo", "ppo", {"clip": 0.2}), layouts=("cp2-ring",), fault="temperature-late")


QUESTIONS = {
    "f1": Question(SIGNS, Case("reinforce", "reinforce"), layouts=("dp2", "cp2-ulysses"), fault="advantage-shift"),
    "f5 0.5": at(0.5),
    "f5 1.3": at(1.3),
    "f7": Question(
        RAMPS,
        Case("ppo", "ppo", {"clip": 0.2, "entropy": 0.1}),
        layouts=("cp2-ulysses", "cp2-ring"),
        fault="temperature-uncut",
    ),
}


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS)


def test_f1_weights_of_any_sign_reach_every_token(answers):
    """Advantages below, at and above 0 with ignored labels between, through the engine."""
    check("f1", QUESTIONS, answers)


@pytest.mark.parametrize("vocab", [1, 7, 255, 257, 1000, 4096 + 128])
def test_f2_no_column_beyond_the_vocabulary(vocab):
    """Forward and backward against plain torch; log-probs are at most 0."""
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64).requires_grad_() for n in (9, vocab))
    targets, upstream = torch.arange(9) * 31 % vocab, torch.linspace(-1, 1, 9, dtype=torch.float64)
    got = head_outputs(hidden, weight, targets, chunk=4).logprob
    want = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])[:, 0]
    assert bool((got <= 0).all()) and float((got - want).detach().abs().max()) < 1e-12
    pairs = zip(
        *(torch.autograd.grad((x * upstream).sum(), (hidden, weight), retain_graph=True) for x in (got, want)),
        strict=True,
    )
    assert all(float((a - b).norm()) <= 1e-12 * max(float(b.norm()), 1.0) for a, b in pairs)
    if vocab > 1:  # control: 128 columns of logit 0 in the sum
        padded = torch.log_softmax(torch.nn.functional.pad(hidden @ weight.t(), (0, 128)), -1)
        assert float((padded.gather(1, targets[:, None])[:, 0] - got).detach().abs().max()) > 1e-6


@pytest.mark.parametrize("temperature", ["0.5", "1.3"])
def test_f5_own_samples_have_ratio_one_at_any_temperature(temperature, answers):
    for own in check(f"f5 {temperature}", QUESTIONS, answers).values():
        assert abs(own.metrics["ratio/max"] - 1) < 1e-10 and abs(own.metrics["ratio/mean"] - 1) < 1e-10


def test_f7_a_ramp_of_temperatures_is_cut_with_its_tokens(answers):
    check("f7", QUESTIONS, answers)
