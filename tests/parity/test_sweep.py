"""The property sweep, short: random samples, layouts, objectives and calls against the oracle. `make sweep N=2000` is
the long one.
"""

import pytest

from longspan.launch import launch
from longspan.parity.faults import planted
from longspan.parity.sweep import Tally, sweep_ranks

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
