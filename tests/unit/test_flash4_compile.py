"""FlashAttention 4's kernels compile for Hopper on a machine without a GPU, through our wrapper's arguments.

Skipped where flash-attn-4 is not installed. Fake tensors: the kernels are built, none runs. In a process of its own,
since the package reads its target from the environment when it is imported.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from longspan.mixers.kernels import flash4

for causal, left in ((True, flash4.NO_WINDOW), (False, flash4.NO_WINDOW), (True, 100)):
    with FakeTensorMode():
        q, k = (torch.empty(512, heads, 96, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        cu = torch.empty(3, dtype=torch.int32, device="cuda")
        out, lse = flash4.forward_kernel(q, k, k, cu, cu, 300, 300, causal, left, 0.1)
        assert out.shape == (512, 4, 96) and lse.shape == (4, 512) and lse.dtype == torch.float32
        grads = flash4.backward_kernel(out, q, k, k, out, lse, cu, cu, 300, 300, causal, left, 0.1, False)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn-4 is not installed")
def test_flash4_compiles_without_a_gpu() -> None:
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **target}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compiled" in done.stdout
