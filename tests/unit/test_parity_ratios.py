"""What bf16 parity compares: figures that can carry a ratio, and the limits that are made of the unsharded engine's."""

import math

import pytest
import torch

from longspan.data import Sample
from longspan.layout import Layout
from longspan.parity import differences
from longspan.parity.cells import CHANCE, Cell
from longspan.parity.compare import ORACLE_DTYPE, Request, _against, prepare
from longspan.parity.reference import Reference

SAMPLES = [Sample([1, 2, 3], [2, 3, 4], [1.0, 0.0, 1.0]), Sample([5], [6], [1.0])]
ZEROS = [torch.zeros(3), torch.zeros(1)]


def test_spread_is_the_root_mean_square_of_trained_tokens() -> None:
    found = [torch.tensor([0.3, 9.0, 0.0]), torch.tensor([0.4])]  # 9.0 is outside the mask
    figure, where = differences.token_spread(found, ZEROS, SAMPLES)
    assert figure == pytest.approx((0.25 / 3) ** 0.5) and "3 tokens" in where


@pytest.mark.parametrize("wrong", [[torch.zeros(3), torch.zeros(2)], [torch.full((3,), float("nan")), torch.zeros(1)]])
def test_wrong_shapes_and_nan_are_infinitely_far(wrong: list[torch.Tensor]) -> None:
    assert differences.token_spread(wrong, ZEROS, SAMPLES)[0] == float("inf")


def test_chance_takes_more_off_small_parameters() -> None:
    oracle = {"large": torch.ones(160_000), "small": torch.ones(4)}
    engine = {"large": oracle["large"] * 1.01, "small": oracle["small"] * 1.02}
    assert differences.parameters(engine, oracle, 1e-4) == (pytest.approx(0.02), "small")
    figure, where = differences.parameters(engine, oracle, 1e-4, CHANCE)
    assert (figure, where) == (pytest.approx(0.01 / 1.01), "large")
    gone = {"large": oracle["large"], "small": torch.zeros(4)}
    assert differences.parameters(gone, oracle, 1e-4, CHANCE) == (pytest.approx(1 / 3), "small"), (
        "a lost gradient is seen"
    )
    assert differences.parameters({"large": torch.ones(160_000)}, oracle, 1e-4, CHANCE)[0] == float("inf")


def test_chance_is_four_deviations_of_a_ratio() -> None:
    """Drawn: ratios of two root mean squares, and of two maxima, of errors alike. Four deviations are passed 5 times in 1,000 at
    most (64 errors; a ratio is skewed), one is passed often."""
    draw = torch.Generator().manual_seed(0)
    trials = 4000
    for count in (64, 1024):
        a, b = (torch.randn(trials, count, generator=draw, dtype=torch.float64) for _ in range(2))
        rms = a.square().mean(1).sqrt() / b.square().mean(1).sqrt()
        largest = a.abs().amax(1) / b.abs().amax(1)
        for ratio, deviation in ((rms, count**-0.5), (largest, differences.GUMBEL / math.log(count))):
            assert float((ratio > 1.0 + CHANCE * deviation).double().mean()) < 5e-3
            assert float((ratio > 1.0 + deviation).double().mean()) > 0.05, "control"


def test_limits_are_ratios_where_a_ratio_can_be_taken() -> None:
    baseline = [
        Cell("dp1", "gradient", "ppo", 0.03, 1e-5),
        Cell("dp1", "gradient", "dro", 0.05, 1e-5),
        Cell("dp1", "weights", "grad/norm", 1e-6, 1e-5),
        Cell("dp1", "calls", "parts", 1e-3, 1e-5),
        Cell("dp1", "leak", "token 3", 0.0, 0.0),
    ]

    def limit(check: str, case: str) -> float:
        return _against(
            Cell("cp2", check, case, 0.02, next(c.limit for c in baseline if c.case == case)), baseline
        ).limit

    assert limit("gradient", "ppo") == pytest.approx(0.036)
    assert limit("weights", "grad/norm") == pytest.approx(0.06)  # the largest gradient's, by the triangle inequality
    assert limit("calls", "parts") == pytest.approx(0.12)  # two results within 0.06 of the oracle
    assert limit("leak", "token 3") == 0.0


@pytest.mark.parametrize(("dtype", "clips"), [("bfloat16", False), ("float64", True)])
def test_steps_in_bf16_have_no_edge(dtype: str, clips: bool) -> None:
    """Rounding takes a token across a clip's edge: the gradient jumps, and a ratio of errors says nothing of the layout."""
    request = Request(
        "tiny:qwen3", {"dp1": Layout()}, dtype=dtype, lengths=[3, 5], cases=(), checks=("weights",), steps=1
    )
    plan, truth = prepare(request, Reference(request.model, dtype=ORACLE_DTYPE[dtype], seed=0, value_head=True))
    assert any("clip" in name for name in plan.step_case.settings) == clips
    assert len(truth.norms) == 1 and math.isfinite(truth.norms[0])
