"""Gated DeltaNet on fla's kernels against the torch form in fp32, on a GPU, bf16: outputs and all gradients.

Tolerance 2e-2 relative L2: bf16 rounds q, k, v, states and outputs at 2^-9 each; a lost boundary or state measures
above 0.1. Ragged documents (1 and 2 tokens too), pieces cut further, a tail, grouped heads; and a row alone equals
itself packed, bit for bit.
"""

from importlib.util import find_spec
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from longspan.layout import CPGroup
from longspan.layout.seqinfo import make_seqinfo
from longspan.mixers.deltanet_pieces import cut_pieces
from longspan.mixers.deltanet_torch import TorchDeltaKernel
from longspan.mixers.linear import DeltaShape, DeltaWeights, LinearPrepared, gated_delta, prepare_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # fla autotunes its kernels at first use
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("fla") is None, reason="needs CUDA and fla-core"),
]
SHAPE = DeltaShape(key_heads=4, value_heads=8, key_dim=128, value_dim=128)
RAGGED = (1, 2, 3, 1, 700, 1, 64, 1300)
TOLERANCE = 2e-2


def run(lengths: tuple[int, ...], *, fla: bool, longest: int | None = None, start: int = 0) -> list[Tensor]:
    """Output and gradients of mixed, b, a and the weights. start: which tokens of the drawn row these are."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16 if fla else torch.float32
    draw = torch.Generator(device=device).manual_seed(0)
    total, tokens, heads = 4096, sum(lengths), SHAPE.value_heads
    channels = sum(SHAPE.channels)
    shapes = [(total, channels), (total, heads), (total, heads), (total, heads, SHAPE.value_dim)]
    mixed, b, a, gradient = (
        torch.randn(s, device=device, generator=draw).bfloat16()[start : start + tokens].to(dtype) for s in shapes
    )
    weights = [
        torch.randn(channels, 4, device=device, generator=draw),
        *(torch.full((heads,), -2.0, device=device),) * 2,
    ]
    leaves = [x.detach().requires_grad_() for x in (mixed, b, a, *(w.bfloat16().to(dtype) for w in weights))]
    cu = torch.tensor([0, *accumulate(lengths)])
    info = make_seqinfo("contiguous", cu, CPGroup.alone())
    prepared = prepare_linear(info, device, how="state", dtype=dtype)
    if longest is not None:
        pieces = cut_pieces(info, longest)
        kernel = TorchDeltaKernel(pieces, device) if not fla else type(prepared.kernel)(pieces, device)
        prepared = LinearPrepared("state", pieces, info.group, kernel, None)
    out = gated_delta(*leaves[:3], DeltaWeights(*leaves[3:]), shape=SHAPE, prepared=prepared, layer=0)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("longest", [None, 256])
def test_fla_equals_the_torch_form(longest: int | None) -> None:
    error = worst(run(RAGGED, fla=True, longest=longest), run(RAGGED, fla=False))
    print(f"longest {longest}: {error:.1e}")
    assert error < TOLERANCE


def test_a_lost_boundary_is_seen() -> None:
    assert worst(run((sum(RAGGED),), fla=True), run(RAGGED, fla=False)) > 5 * TOLERANCE


def test_packed_equals_alone_bit_for_bit() -> None:
    """Outputs and token gradients; weight gradients are sums over other tokens."""
    packed, alone = run(RAGGED, fla=True), run((700,), fla=True, start=7)
    assert all(torch.equal(a[7:707], b) for a, b in zip(packed[:4], alone[:4], strict=True))
