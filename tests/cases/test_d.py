"""Kind D, packing: boundaries under every mixer, windows, recurrent state, three-axis positions."""

import pytest
import torch
from kit import Question, ask, check, oracle, rows

from longspan.data import FieldSpec, Row, Sample, pack
from longspan.errors import UserError
from longspan.parity import differences
from longspan.parity.samples import fill_fields
from longspan.parity.sweep_examples import Row as Made
from longspan.parity.sweep_examples import make_sample

FIVE = rows((9, 14, 3, 21, 6))
LONG = rows((64, 19), model="tiny:mistral")
RECURRENT = rows((11, 5, 26, 2), model="tiny:qwen3_5")
PICTURED = fill_fields(
    [
        make_sample(Made(10, 2, 0.0, True, ((3, 2, 3),), 0, seed=1)),
        make_sample(Made(7, 2, 0.0, True, (), 0, seed=2)),
        make_sample(Made(12, 4, 0.0, True, ((1, 1, 2), (4, 3, 1)), 0, seed=3)),
    ],
    oracle("tiny:qwen3_vl"),
)
QUESTIONS = {
    "d1 ring": Question(FIVE, layouts=("cp2-gather", "cp2-ring"), fault="boundary"),
    "d1 gather": Question(FIVE, layouts=("cp2-gather",), fault="boundary-gather"),
    "d1 ulysses": Question(FIVE, layouts=("cp2-ulysses",), fault="boundary-ulysses"),
    "d3 packed": Question(PICTURED, model="tiny:qwen3_vl", layouts=("dp2", "cp2-ring"), fault="positions-mrope"),
    "d3 image alone": Question(PICTURED[:1], model="tiny:qwen3_vl", layouts=("dp2", "cp2-ulysses")),
    "d3 text alone": Question(PICTURED[1:2], model="tiny:qwen3_vl", layouts=("dp2", "cp2-gather")),
    "d5": Question(
        LONG, model="tiny:mistral", layouts=("dp2", "cp2-ulysses", "cp2-ring", "cp2-gather"), fault="window"
    ),
    "d7": Question(FIVE, layouts=("dp2",), fault="boundary-local"),
    "d8": Question(RECURRENT, model="tiny:qwen3_5", layouts=("dp2", "cp2-gather"), fault="recurrent-boundary"),
}


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS)


@pytest.mark.parametrize("mixer", ["ring", "gather", "ulysses"])
def test_d1_five_documents_keep_their_boundaries(mixer, answers):
    check(f"d1 {mixer}", QUESTIONS, answers)


@pytest.mark.parametrize("what", ["packed", "image alone", "text alone"])
def test_d3_three_axis_positions_are_no_boundaries(what, answers):
    check(f"d3 {what}", QUESTIONS, answers)


def test_d3_boundaries_count_tokens_and_the_dimension_is_checked():
    """Positions [3, L] pack to [3, T] and T is the last boundary, not 3 T; positions [L] are refused."""
    declared = {"input_ids": FieldSpec(torch.int64), "position": FieldSpec(torch.int64, prefix=(3,))}
    tensors = [{"input_ids": torch.arange(n), "position": torch.arange(n).expand(3, n)} for n in (5, 4)]
    stream = pack(Row((0, 1), 0, 1), tensors, declared, "contiguous")
    assert stream.cu_seqlens.tolist() == [0, 5, 9] and stream.fields["position"].shape == (3, 9)
    assert stream.fields["position"][:, 5:].tolist() == [[0, 1, 2, 3]] * 3
    flat = [dict(row, position=row["position"][0]) for row in tensors]
    with pytest.raises(UserError, match=r"'position' has shape \[5\].*expected \[3, 5\]"):
        pack(Row((0, 1), 0, 1), flat, declared, "contiguous")


def test_d5_a_window_is_kept_under_every_mixer(answers):
    check("d5", QUESTIONS, answers)


def test_d7_packed_documents_are_the_unpacked_ones(answers):
    check("d7", QUESTIONS, answers)


def test_d8_recurrent_state_ends_with_its_document(answers):
    check("d8", QUESTIONS, answers)
    joined = Sample(  # control: one document of all tokens has other log-probs
        torch.cat([sample.input_ids for sample in RECURRENT]),
        torch.cat([sample.target_ids for sample in RECURRENT]),
        torch.cat([sample.mask for sample in RECURRENT]),
    )
    with torch.no_grad():
        wrong = oracle("tiny:qwen3_5").outputs(joined).logprob.split([len(sample) for sample in RECURRENT])
    assert differences.tokens(answers["d8"]["dp2 roomy"].logprob, wrong, RECURRENT)[0] > 1e-2
