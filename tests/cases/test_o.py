"""Kind O: a rank that leaves the others is named. (Start-up relations are tested beside the code, in tests/unit.)"""

from dataclasses import replace

import pytest
from kit import build, rows

from longspan.errors import RankError
from longspan.launch import launch
from longspan.objective import Objective

RAGGED = rows((9, 14, 5, 11))


def skipping(call: str) -> str:
    """Rank 1 leaves out its last micro-step; what every rank is told."""
    engine = build("tiny:qwen3", "cp2-ring", [9, 14, 5, 11], tight=True)
    plan = engine.planner.plan
    if engine.rank == 1:

        def shorter(batch: object) -> object:
            whole = plan(batch)
            return replace(whole, micro_steps=whole.micro_steps[:-1])

        engine.planner.plan = shorter
    try:
        if call == "forward":
            engine.forward(RAGGED)
        else:
            engine.forward_backward(RAGGED, Objective("cross_entropy"))
    except RankError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_o5_a_skipped_micro_step_is_an_error_that_names_the_rank(call):
    """In log-probs too; within the launch's 60 s, with the number of micro-steps of both ranks."""
    for message in launch(skipping, call, ranks=2, timeout_s=60, device="cpu"):
        assert "rank 1 has" in message and "micro-steps" in message and "rank 0 has" in message
