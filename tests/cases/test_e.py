"""Kind E, labels and alignment: the shift is made per sample, fields stand at their tokens, metrics read what losses read."""

import pytest
import torch
from kit import Question, ask, changed, check, rows, truth

from longspan.data import Row, Sample, check_samples, pack
from longspan.data.pack import FieldSpec
from longspan.errors import UserError
from longspan.layout import CPGroup, shard
from longspan.parity.cases import Case

PPO = Case("ppo", "ppo", {"clip": 0.2})
PACK = rows((9, 14, 5), (range(2, 9), range(3, 13), range(5)))
OWN = [
    changed(sample, fields={"old_logprob": own, "temperature": torch.ones(len(sample))})
    for sample, own in zip(
        PACK, truth(Question([changed(s, fields={"temperature": torch.ones(len(s))}) for s in PACK]))[0], strict=True
    )
]
QUESTIONS = {
    "e1": Question(rows((8, 13)), PPO, layouts=("cp2-ring-zigzag",), fault="shift"),
    "e2": Question(rows((7, 4, 11)), layouts=("dp2", "cp2-gather"), fault="shift-pack"),
    "e2 one document": Question(rows((9,)), layouts=("cp2-gather",), fault="shift-pack"),
    "e5": Question(OWN, PPO, layouts=("dp2", "cp2-ring"), fault="old-logprob-shift"),
    "e8": Question(
        PACK,
        Case("all", "ppo", {"clip": 0.2, "kl": 0.1, "entropy": 0.01}),
        layouts=("cp2-ulysses",),
        fault="metrics-local",
    ),
}


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS)


def test_e1_targets_of_a_zigzag_cut_by_hand():
    """Tokens 0 to 7 on two ranks: rank 0 holds 0, 1, 6, 7 and predicts 1, 2, 7, none; rank 1 holds 2 to 5."""
    targets = torch.tensor([1, 2, 3, 4, 5, 6, 7, -100])
    stream = pack(
        Row((0,), 0, 2),
        [{"input_ids": torch.arange(8), "target_ids": targets}],
        {name: FieldSpec(torch.int64) for name in ("input_ids", "target_ids")},
        "zigzag",
    )
    held = {0: ([0, 1, 6, 7], [1, 2, 7, -100]), 1: ([2, 3, 4, 5], [3, 4, 5, 6])}
    for rank, (ids, wanted) in held.items():
        piece = shard(stream, CPGroup(None, rank, 2, (0, 1)), torch.device("cpu"))
        assert piece.fields["input_ids"].tolist() == ids and piece.fields["target_ids"].tolist() == wanted


def test_e1_labels_are_shifted_before_the_cut(answers):
    check("e1", QUESTIONS, answers)


@pytest.mark.parametrize("name", ["e2", "e2 one document"])
def test_e2_the_last_token_of_a_document_keeps_its_own_target(name, answers):
    check(name, QUESTIONS, answers)


def test_e2_a_trained_position_without_a_target_is_refused():
    """A mask on a last token that predicts nothing names the sample; it never takes the neighbour's token."""
    good, bad = Sample([1, 2], [2, 3], [1, 1]), Sample([4, 5], [5, -100], [1, 1])
    with pytest.raises(UserError, match=r"\[1\]|sample 1"):
        check_samples([good, bad], vocab_size=97)


def test_e5_own_logprobs_give_a_ratio_of_one_on_every_token(answers):
    for own in check("e5", QUESTIONS, answers).values():
        assert abs(own.metrics["ratio/mean"] - 1) < 1e-12 and abs(own.metrics["ratio/max"] - 1) < 1e-12
        assert [len(logprob) for logprob in own.logprob] == [9, 14, 5]


def test_e8_metrics_under_ulysses_are_those_of_one_rank(answers):
    check("e8", QUESTIONS, answers)
