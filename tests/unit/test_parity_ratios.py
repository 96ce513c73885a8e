"""What bf16 parity compares: figures that can carry a ratio, and the limits that are made of the unsharded engine's."""

import pytest
import torch

from longspan.data import Sample
from longspan.parity import differences
from longspan.parity.cells import LIMITS, Cell
from longspan.parity.compare import _against

SAMPLES = [Sample([1, 2, 3], [2, 3, 4], [1.0, 0.0, 1.0]), Sample([5], [6], [1.0])]
ZEROS = [torch.zeros(3), torch.zeros(1)]


def test_spread_is_the_root_mean_square_of_trained_tokens() -> None:
    found = [torch.tensor([0.3, 9.0, 0.0]), torch.tensor([0.4])]  # 9.0 is outside the mask
    figure, where = differences.token_spread(found, ZEROS, SAMPLES)
    assert figure == pytest.approx((0.25 / 3) ** 0.5) and "3 tokens" in where


@pytest.mark.parametrize("wrong", [[torch.zeros(3), torch.zeros(2)], [torch.full((3,), float("nan")), torch.zeros(1)]])
def test_wrong_shapes_and_nan_are_infinitely_far(wrong: list[torch.Tensor]) -> None:
    assert differences.token_spread(wrong, ZEROS, SAMPLES)[0] == float("inf")


def test_small_parameters_carry_no_ratio_but_must_be_there() -> None:
    oracle = {"large": torch.ones(1024), "small": torch.ones(1)}
    engine = {"large": torch.ones(1024), "small": torch.zeros(1)}
    assert differences.parameters(engine, oracle, 1e-4)[0] == 1.0
    assert differences.parameters(engine, oracle, 1e-4, LIMITS["bfloat16"].least)[0] == 0.0
    assert differences.parameters({"large": torch.ones(1024)}, oracle, 1e-4, 1024)[0] == float("inf")


def test_limits_are_ratios_where_a_ratio_can_be_taken() -> None:
    baseline = [
        Cell("dp1", "gradient", "ppo", 0.03, 1e-5),
        Cell("dp1", "gradient", "dro", 0.05, 1e-5),
        Cell("dp1", "weights", "grad/norm", 1e-6, 1e-5),
        Cell("dp1", "calls", "parts", 1e-3, 1.2e-2),
        Cell("dp1", "leak", "token 3", 0.0, 0.0),
    ]

    def limit(check: str, case: str) -> float:
        return _against(
            Cell("cp2", check, case, 0.02, next(c.limit for c in baseline if c.case == case)), baseline
        ).limit

    assert limit("gradient", "ppo") == pytest.approx(0.036)
    assert limit("weights", "grad/norm") == pytest.approx(0.06)  # the largest gradient's, by the triangle inequality
    assert limit("calls", "parts") == 1.2e-2 and limit("leak", "token 3") == 0.0
