"""Our wrapper of fla's Gated DeltaNet without a GPU: its arithmetic under Triton's interpreter, and the mended kernel.

The interpreter (fp32, tiny shapes) runs every Triton kernel of both passes: ragged documents, a tail, pieces cut
further. It does not run the TileLang kernel, of which the text, and where TileLang is installed the CUDA source, is
checked. Programs run in processes of their own: Triton reads its mode from the environment when it is imported.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from longspan.mixers.deltanet_tile import GUARD, RACE, one_writer

FLA = find_spec("fla") is not None and find_spec("triton") is not None
CLOSE = 1e-5  # fp32 against fp64 measures 3e-6; a lost boundary 0.4 and more

# Builds fla's kernel for Hopper as shipped and as mended; prints how often each adds to the shared sum, and under what.
LOWER = """
import json
import tilelang
from tilelang import tvm
from fla.ops.common.backends.tilelang import chunk_bwd
from longspan.mixers.deltanet_tile import mended

def lines(module):
    build = module._build_chunk_bwd_dqkwg_kernel
    program = build.get_tir(
        B=1, H=4, HV=8, K=128, V=128, BT=64, BK=64, BV=64, NK=2, hD1=128, hD2=128, dtype_str="bfloat16",
        USE_G=True, USE_DW=True, STATE_V_FIRST=False, IS_VARLEN=True, num_warps=4,
    )
    target = {"kind": "cuda", "arch": "sm_90a"}
    with tvm.target.Target(target), tvm.transform.PassContext(opt_level=3, config=dict(build.pass_configs)):
        return [x.strip() for x in tilelang.lower(program, target=target).kernel_source.splitlines()]

print(json.dumps([lines(chunk_bwd), lines(mended(chunk_bwd))]))
"""


def run(*program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(not FLA, reason="fla-core or triton is not installed")
def test_fla_equals_the_torch_form_in_the_interpreter() -> None:
    """Also: the first import of fla survives warnings that are errors."""
    found = json.loads(run(str(Path(__file__).with_name("fla_interpreted.py")), TRITON_INTERPRET="1"))
    lost = found.pop("lost boundary")
    assert all(error < CLOSE for case in found.values() for error in case.values()), found
    assert min(lost.values()) > 0.1, lost


def test_the_racing_line_gets_a_guard_once() -> None:
    before = f"def kernel():\n    for i in x:\n        {RACE}\n        rest()\n"
    after = f"def kernel():\n    for i in x:\n        {GUARD}\n            {RACE}\n        rest()\n"
    assert one_writer(before) == after
    assert one_writer(after) == after
    assert one_writer("nothing()\n") == "nothing()\n"


@pytest.mark.slow
@pytest.mark.skipif(not FLA or find_spec("tilelang") is None, reason="fla-core or tilelang is not installed")
def test_the_mended_kernel_has_one_writer() -> None:
    """Lowered for Hopper: the shipped source adds in every thread, the mended one in one, and nothing else differs."""
    shipped, mended = json.loads(run("-c", LOWER))
    added = [number for number, line in enumerate(shipped) if "s_dg_last_acc)[0] + " in line]
    assert len(added) == 1 and not shipped[added[0] - 1].startswith("if ")
    extra = mended[added[0]]
    assert extra.startswith("if (((int)threadIdx.x) ==")
    assert mended == [*shipped[: added[0]], extra, shipped[added[0]], "}", *shipped[added[0] + 1 :]]
