"""Kind B, nothing to train on: empty shards, empty responses, rows shorter than the split."""

import pytest
import torch
from kit import SUPERVISED, Question, ask, build, changed, check, rows

from longspan.engine import SGD, AdamW
from longspan.launch import launch
from longspan.objective import Objective
from longspan.parity import differences
from longspan.parity.cases import Case

HALF_SILENT = rows((10, 10, 4), (range(3, 10), [], []))
EMPTY_RESPONSES = rows((9, 12, 5), ([], [8, 9, 10], []))
BY_SAMPLE = Case("by sample", "cross_entropy", {}, "sample")
QUESTIONS = {
    "b3": Question(HALF_SILENT, fault="mask-ignored"),
    "b3 alone": Question(HALF_SILENT[:1]),
    "b6 token": Question(EMPTY_RESPONSES, SUPERVISED),
    "b6 token alone": Question(EMPTY_RESPONSES[1:2], SUPERVISED),
    "b6 sample": Question(EMPTY_RESPONSES, BY_SAMPLE),
    "b6 sample alone": Question(EMPTY_RESPONSES[1:2], BY_SAMPLE),
    "b10": Question(
        rows((1, 2, 3, 1, 40), model="tiny:qwen3_5"),
        model="tiny:qwen3_5",
        layouts=("cp2-gather", "cp2-ring"),
        fault="halo",
    ),
}
FOUR = {
    "b1": Question(
        rows((16,), (range(12, 16),)), layouts=("cp4-gather-contiguous", "cp4-ring-zigzag"), fault="denominator-shard"
    ),
    "b8": Question(
        rows((1, 2, 3, 15, 16, 17)), layouts=("dp2-cp2-ring-zigzag", "dp2-cp2-gather", "cp4-ring-zigzag"), fault="shift"
    ),
}


def silence() -> tuple[float, bool, bool]:
    """A batch without a loss token: largest gradient, whether SGD moved anything, whether AdamW only decayed."""
    silent = [changed(sample, mask=torch.zeros(len(sample))) for sample in HALF_SILENT]
    found: list[object] = []
    for settings, factor in ((SGD(lr=0.5), 1.0), (AdamW(lr=0.5, weight_decay=0.1), 0.95)):
        engine = build("tiny:qwen3", "cp2-ring", [10, 10, 4], tight=True)
        before = engine.state_dict()
        engine.forward_backward(silent, Objective("ppo", kl=0.1))
        largest = max(float(gradient.abs().max()) for gradient in engine.gradients().values())
        engine.optim_step(settings)
        after = engine.state_dict()
        found.append(all(torch.equal(after[name], before[name] * factor) for name in before))
    return largest, found[0], found[1]


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS) | ask(FOUR, ranks=4)


def test_b1_a_rank_with_masked_tokens_only_adds_exactly_zero(answers):
    for own in check("b1", FOUR, answers).values():
        assert all(bool(torch.isfinite(gradient).all()) for gradient in own.gradients.values())


def test_b3_a_data_rank_without_labels_changes_nothing(answers):
    """The same gradient as the run on the other rank's row."""
    found, alone = (check(name, QUESTIONS, answers) for name in ("b3", "b3 alone"))
    for where, own in found.items():
        assert differences.parameters(own.gradients, alone[where].gradients, 1e-10)[0] <= 1e-12


def test_b3_a_batch_without_labels_is_a_defined_step():
    """The gradient is exactly 0; SGD moves nothing; AdamW's step is its weight decay."""
    for largest, still, decayed in launch(silence, ranks=2, timeout_s=60, device="cpu"):
        assert largest == 0.0 and still and decayed


@pytest.mark.parametrize("rule", ["token", "sample"])
def test_b6_empty_responses_leave_the_batch_of_the_others(rule, answers):
    found, alone = (check(f"b6 {rule}{more}", QUESTIONS, answers) for more in ("", " alone"))
    for where, own in found.items():
        assert all(bool(torch.isfinite(gradient).all()) for gradient in own.gradients.values())
        assert differences.parameters(own.gradients, alone[where].gradients, 1e-10)[0] <= 1e-12
        assert own.metrics["tok/trained"] == 3


def test_b8_rows_shorter_than_the_cut_keep_their_numbers(answers):
    check("b8", FOUR, answers)


def test_b10_documents_shorter_than_the_convolution(answers):
    check("b10", QUESTIONS, answers)
