"""Ranks that share a GPU: layouts of more ranks than GPUs with CUDA's kernels and travel, against the oracle.

fp32 to 1e-5 (cells.LIMITS). Control: a planted fault must be seen.
"""

import pytest
import torch

from longspan.layout import parse_layouts
from longspan.parity.compare import Request, compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "layouts", ["cp2-ulysses,cp2-ring,cp2-gather,dp2", "cp3-ring,cp3-gather", "dp2-cp2,cp4-hybrid"]
)
def test_layouts_hold_on_one_gpu(layouts: str) -> None:
    found = compare(Request("tiny:qwen3", parse_layouts(layouts), dtype="float32", steps=1, device="shared"))
    assert found.passed, [cell for cell in found.cells if not cell.passed] or found.lost


def test_a_fault_is_seen() -> None:
    layouts = parse_layouts("cp2-ulysses")
    request = Request("tiny:qwen3", layouts, dtype="float32", steps=0, plant="positions", device="shared")
    found = compare(request)
    assert not found.lost and not found.passed
