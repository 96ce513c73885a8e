"""The property sweep, short: random samples, layouts, objectives and calls against the oracle. `make sweep N=2000` is
the long one.
"""

import pytest
import torch

from longspan.data import Plan, Row, Sample
from longspan.launch import launch
from longspan.layout import Layout
from longspan.parity.cases import Case
from longspan.parity.faults import planted
from longspan.parity.sweep import Tally, sweep_ranks
from longspan.parity.sweep_coverage import REQUIRED, covered, owners
from longspan.parity.sweep_examples import Example, make_sample
from longspan.parity.sweep_examples import Row as Made
from longspan.parity.sweep_summary import summary

MODELS = ("tiny:qwen3", "tiny:mistral", "tiny:qwen3_vl", "tiny:qwen3_5", "tiny:qwen3_moe")
SEED = 1000


@pytest.mark.parametrize(("ranks", "examples"), [(2, 10), (3, 6), (4, 5)])
def test_random_examples(ranks: int, examples: int) -> None:
    tally, miss = launch(sweep_ranks, examples, SEED + ranks, MODELS, ranks=ranks, timeout_s=120, device="cpu")[0]
    assert miss is None, miss
    assert tally.examples >= examples


def _with_fault(name: str) -> tuple[Tally, str | None]:
    with planted(name):
        return sweep_ranks(10, SEED, ("tiny:qwen3",))


def test_a_sweep_finds_a_fault_and_shrinks_it() -> None:
    """Control: a planted fault is found, and the example shown is small."""
    _, miss = launch(_with_fault, "cp-factor", ranks=2, timeout_s=120, device="cpu")[0]
    assert miss is not None and "gradient" in miss
    assert miss.count("Row(") <= 2, miss


def test_owners_of_zigzag_by_hand() -> None:
    """8 and 3 tokens on two ranks: chunks of 2 and of 1 (padded to 4)."""
    first, second = owners(Row((0, 1), 0, 2), [8, 3], "zigzag")
    assert first.tolist() == [0, 0, 1, 1, 1, 1, 0, 0] and second.tolist() == [0, 1, 1]
    first, second = owners(Row((0, 1), 0, 2), [8, 3], "contiguous")
    assert first.tolist() == [0, 0, 0, 0, 0, 0, 1, 1] and second.tolist() == [1, 1, 1]


def _example(layout: Layout, rows: tuple[Made, ...]) -> tuple[Example, list[Sample]]:
    example = Example("tiny:qwen3_vl", layout, rows, Case("ppo", "ppo", {"kl": 0.1}), 1, 0, False, "none", False)
    return example, [make_sample(row) for row in rows]


def test_coverage_is_what_the_plan_cut() -> None:
    """An image of 12 tokens over the middle of its row is cut at cp=2 and whole on one rank."""
    pictured = Made(16, 15, 0.0, True, ((2, 3, 4),), 0, seed=1)
    silent = Made(3, 0, 0.0, False, (), 0, seed=2)
    example, samples = _example(Layout(cp=2, mixer="gather"), (pictured, silent))
    cut = Plan(((Row((0, 1), 0, 2),),), 2)
    found = covered(example, samples, "contiguous", "gather", [([0, 1], cut), ([1, 0], cut)])
    assert {
        "image cut by a shard edge",
        "sample cut by a shard edge",
        "rank without a trained token",
        "rank without an image beside one with",
        "no image beside a tower",
        "order of samples changed",
        "mixer gather cp2",
        "term kl",
    } <= found
    assert not {"inert row", "several micro-steps", "terms ppo alone"} & found
    whole = Plan(((Row((0,), 0, 1), Row((), 1, 1)), (Row((1,), 0, 1), Row((), 1, 1))), 2)
    found = covered(example, samples, "contiguous", "gather", [([0, 1], whole), ([0, 1], whole)])
    assert {"inert row", "several micro-steps", "index identity"} <= found
    assert not {name for name in found if "shard edge" in name or name == "order of samples changed"}


def test_a_sampled_placeholder_is_trained() -> None:
    """G7: the row's run of placeholders before its last token is sampled, so its targets carry weight."""
    sample = make_sample(Made(12, 6, 0.8, True, (), 2, seed=3))
    places = (sample.input_ids == 93).nonzero()[:, 0]
    assert len(places) == 2 and bool((sample.mask[places - 1] == 1).all())
    assert torch.equal(sample.target_ids[places - 1], sample.input_ids[places])


def test_a_summary_adds_shards_and_finds_what_is_missing() -> None:
    shard = {
        "seeds": [0, 2],
        "examples": 7,
        "misses": [],
        "worst": {"logprob": 1e-15},
        "coverage": dict.fromkeys(REQUIRED, 1),
    }
    other = {**shard, "seeds": [1000, 1001], "worst": {"logprob": 3e-15}}
    found = summary([shard, other])
    assert found["passed"] and found["examples"] == 14 and found["launches"] == 5
    assert found["worst"] == {"logprob": 3e-15} and found["coverage"]["calls 2"] == 2
    assert not summary([shard, shard])["passed"], "the same seeds twice are not twice as many examples"
    assert summary([{**shard, "coverage": {}}])["not_met"] == list(REQUIRED)
    assert not summary([shard, {**other, "misses": ["seed 1000"]}])["passed"]
