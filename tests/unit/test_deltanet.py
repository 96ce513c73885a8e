"""Gated DeltaNet on one process: the chunked form, the convolution and the cut into pieces against the definitions,
in fp64.
"""

import functools
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from longspan.errors import UserError
from longspan.layout import CPGroup
from longspan.layout.seqinfo import make_seqinfo
from longspan.mixers.conv import causal_convolution
from longspan.mixers.deltanet_chunked import affine_maps, chunk_plan, chunked, intra_chunk
from longspan.mixers.deltanet_naive import packed_convolution, packed_recurrence, recurrence, unit
from longspan.mixers.deltanet_pieces import cut_pieces, whole_pieces
from longspan.mixers.deltanet_state import DeltaSaved, delta_rule
from longspan.mixers.deltanet_torch import TorchDeltaKernel
from longspan.mixers.linear import DeltaShape, heads_refusal

CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, 1, 40, 17)
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 16


def boundaries(lengths: tuple[int, ...]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rule_inputs(tokens: int) -> list[Tensor]:
    """q, k (not unit), v, g (slow decay), beta."""
    q, k, v = (draw(tokens, *s, seed=i) for i, s in enumerate([(KEY_HEADS, KEY_DIM)] * 2 + [(HEADS, VALUE_DIM)]))
    g, beta = -0.2 * draw(tokens, HEADS, seed=3).abs(), draw(tokens, HEADS, seed=4).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunked_equals_the_recurrence(chunk: int) -> None:
    """Outputs, final states and the gradients of every input and initial state; an empty document among them."""
    lengths = (*LENGTHS, 0, 130)
    cu = boundaries(lengths)
    inputs = rule_inputs(cu[-1])
    start = draw(len(lengths), HEADS, KEY_DIM, VALUE_DIM, seed=5).requires_grad_()
    expected = packed_recurrence(*inputs, cu, start)
    weights = [draw(*x.shape, seed=6) for x in expected]
    wanted = torch.autograd.grad(expected, [*inputs, start], weights)
    q, k, *others = inputs
    found = chunked(unit(q), unit(k), *others, cu, initial=start, chunk=chunk)
    gradients = torch.autograd.grad(found, [*inputs, start], weights)
    errors = [(a - b).abs().max().item() for a, b in zip((*found, *gradients), (*expected, *wanted), strict=True)]
    print(f"chunk {chunk}: {max(errors):.1e}")
    assert max(errors) < 1e-12


def test_a_piece_is_affine_in_its_state() -> None:
    cu = boundaries(LENGTHS)
    q, k, *others = rule_inputs(cu[-1])
    start = draw(len(LENGTHS), HEADS, KEY_DIM, VALUE_DIM, seed=5)
    _, final = packed_recurrence(q, k, *others, cu, start)
    plan = chunk_plan(cu, 8)
    for pieces in ((4,), (0, 3, 4), tuple(range(6))):
        a, b = affine_maps(intra_chunk(unit(q), unit(k), *others, plan), plan, pieces)
        torch.testing.assert_close(a @ start[list(pieces)] + b, final[list(pieces)], rtol=0, atol=1e-12)


def test_the_recurrence_is_that_of_transformers() -> None:
    """torch_recurrent_gated_delta_rule of transformers, one document, fp32."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    inputs = [x.detach().float() for x in rule_inputs(30)]
    q, k, v, g, beta = inputs
    wide = [x.repeat_interleave(HEADS // KEY_HEADS, 1)[None] for x in (q, k)]
    out, state = torch_recurrent_gated_delta_rule(
        *wide, v[None], g=g[None], beta=beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    expected, final = recurrence(*inputs)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(state[0], final, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (2, 1), (5,)])
def test_convolution_stays_inside_documents(lengths: tuple[int, ...]) -> None:
    """B10, D8: documents shorter than the kernel too."""
    cu = boundaries(lengths)
    x, weight = draw(cu[-1], 6, seed=0).requires_grad_(), draw(6, 4, seed=1).requires_grad_()
    expected = packed_convolution(x, weight, cu)
    positions = cut_pieces(make_seqinfo("contiguous", torch.tensor(cu), CPGroup.alone())).positions
    found = causal_convolution(functional.pad(x, (0, 0, 3, 0)), weight, positions)
    gradient = draw(*expected.shape, seed=2)
    wanted = torch.autograd.grad(expected, [x, weight], gradient)
    got = torch.autograd.grad(found, [x, weight], gradient)
    for a, b in zip((found, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("longest", [1, 3, 7, 64])
def test_cutting_pieces_further_changes_nothing(longest: int) -> None:
    """Pieces of one device pass their states in the same way as ranks do."""
    cu = boundaries(LENGTHS)
    info = make_seqinfo("contiguous", torch.tensor(cu), CPGroup.alone())
    pieces = cut_pieces(info, longest)
    kernel = TorchDeltaKernel(pieces, CPU)
    inputs = rule_inputs(cu[-1])
    expected, _ = packed_recurrence(*inputs, cu)
    gradient = draw(*expected.shape, seed=6)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    q, k, *others = inputs
    found = delta_rule((kernel.unit(q), kernel.unit(k), *others), pieces=pieces, group=info.group, kernel=kernel)
    got = torch.autograd.grad(found, inputs, gradient)
    errors = [(a - b).abs().max().item() for a, b in zip((found, *got), (expected, *wanted), strict=True)]
    print(f"longest {longest}: {max(errors):.1e}")
    assert max(errors) < 1e-12


class CountingKernel(TorchDeltaKernel):
    """Counts its forward passes."""

    passes = 0

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs)


def test_recomputation_runs_the_rule_once() -> None:
    cu = boundaries(LENGTHS)
    info = make_seqinfo("contiguous", torch.tensor(cu), CPGroup.alone())
    pieces = cut_pieces(info, 7)
    kernel = CountingKernel(pieces, CPU)
    inputs = rule_inputs(cu[-1])
    results, passes = [], []
    for slot in (None, DeltaSaved()):
        kernel.passes = 0
        rule = functools.partial(delta_rule, pieces=pieces, group=info.group, kernel=kernel, saved=slot)
        out = checkpoint(rule, inputs, use_reentrant=False)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
        passes.append(kernel.passes)
    assert passes == [2, 1]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_pieces_of_three_ranks() -> None:
    """12 tokens, documents of 1, 9, 2: rank 1 holds nothing but the middle of the second."""
    group = CPGroup(None, 1, 3, (0, 1, 2))
    info = make_seqinfo("contiguous", torch.tensor([0, 1, 10, 12]), group)
    pieces = cut_pieces(info)
    assert pieces.bounds == (0, 4) and pieces.carried == (True, True)
    assert pieces.crossed == (False, True, True, False) and pieces.through == (False, True, False)
    assert pieces.positions.tolist() == [3, 4, 5, 6]
    assert cut_pieces(info, 3).bounds == (0, 3, 4)
    assert whole_pieces(info).bounds == (0, 1, 10, 12) and not whole_pieces(info).exchanged


def test_an_order_that_is_not_contiguous_is_refused() -> None:
    info = make_seqinfo("zigzag", torch.tensor([0, 8]), CPGroup(None, 0, 2, (0, 1)))
    with pytest.raises(UserError, match="contiguous"):
        cut_pieces(info)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    assert [size for size in range(1, 9) if heads_refusal(size, shape) is None] == [1, 2, 4]
    assert "cp in (1, 2, 4)" in str(heads_refusal(3, shape))
