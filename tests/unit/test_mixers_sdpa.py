"""The CPU kernel of PyTorch against the naive definition and the reference, in every block that the mixers make."""

import pytest
import torch
from torch import Tensor

from longspan.mixers import naive
from longspan.mixers.kernels import Block
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.kernels.sdpa import Sdpa

CPU = torch.device("cpu")
SCALE = 0.37
# f32: tiled sums of up to 70 terms. bf16: probabilities are rounded too, which the reference does not do
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


def blocks() -> dict[str, tuple[Block, int | None]]:
    make = Block.make
    return {
        "documents": (make([5, 1, 70, 2], [5, 1, 70, 2], kind="causal", device=CPU), None),
        "towers": (make([5, 1, 70, 2], [5, 1, 70, 2], kind="full", device=CPU), None),
        "ring step": (make([30, 7], [9, 14], kind="full", device=CPU), None),
        "gathered keys": (make([30, 7], [45, 7], kind="causal", device=CPU), None),
        "one query": (make([1, 1], [20, 1], kind="causal", device=CPU), None),
        "window": (make([5, 1, 70, 2], [5, 1, 70, 2], kind="causal", device=CPU), 6),
        "window that hides nothing": (make([5, 1, 70, 2], [5, 1, 70, 2], kind="causal", device=CPU), 70),
        "ring step with a window": (make([9], [8], kind="full", device=CPU, offset=[8]), 12),
        "no keys": (make([4, 3], [0, 3], kind="full", device=CPU), None),
    }


def tensors(block: Block, dtype: torch.dtype, v_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, keys = int(block.cu_q[-1]), int(block.cu_k[-1])
    shapes = [(rows, 4, 8), (keys, 2, 8), (keys, 2, v_dim), (rows, 4, v_dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", blocks())
@pytest.mark.parametrize("v_dim", [8, 6])
def test_same_as_the_reference_in_f64(name: str, dtype: torch.dtype, v_dim: int) -> None:
    """Output, LSE and gradients; the gradients also with an out and LSE of a larger softmax."""
    block, window = blocks()[name]
    q, k, v, dout = tensors(block, dtype, v_dim)
    wide = [x.double() for x in (q, k, v, dout)]
    how = {"scale": SCALE, "window": window}
    out, lse = Sdpa().forward(q, k, v, block, **how)
    expected = Reference().forward(*wide[:3], block, **how)
    assert out.dtype == dtype and torch.equal(torch.isneginf(lse), torch.isneginf(expected[1]))
    larger = lse.double().logaddexp(torch.zeros(()).double())  # as if one more key with score 0 and value 0
    larger_out = expected[0] * (expected[1] - larger).exp().T[..., None]
    grads = Sdpa().backward(dout, q, k, v, larger_out.to(dtype), larger.to(lse.dtype), block, **how)
    wide_grads = Reference().backward(wide[3], *wide[:3], larger_out, larger, block, **how)
    seen = ~torch.isneginf(lse)
    pairs = [(out, expected[0]), (lse[seen], expected[1][seen]), *zip(grads, wide_grads, strict=True)]
    errors = [float((a.double() - b).norm() / b.norm().clamp_min(1.0)) for a, b in pairs]
    assert max(errors) < LIMITS[dtype], errors


def test_the_definition_once_more() -> None:
    """Not only against the reference: packed documents, and the control with a dropped boundary."""
    block, _ = blocks()["documents"]
    q, k, v, _ = tensors(block, torch.float64)
    lengths = torch.tensor([5, 1, 70, 2])
    position = torch.cat([torch.arange(int(n)) for n in lengths])
    for segment, same in ((torch.arange(4).repeat_interleave(lengths), True), (torch.zeros(78), False)):
        expected = naive.attention(q, k, v, position=position, segment=segment, scale=SCALE)
        assert torch.allclose(Sdpa().forward(q, k, v, block, scale=SCALE)[0], expected, atol=1e-13) == same
