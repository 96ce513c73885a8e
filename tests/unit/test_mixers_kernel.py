"""The reference kernel against the naive definition, and partial softmaxes against the whole one."""

import itertools

import pytest
import torch
from torch import Tensor

from longspan.mixers import naive
from longspan.mixers.kernels import Block, reference
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.merge import PartialSoftmax, Sum

CPU = torch.device("cpu")
SCALE = 0.37
KERNEL = Reference()


def random(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def definition(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: list[int], window: int | None
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the naive attention over packed documents."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    out = naive.attention(*leaves, position=position, segment=segment, scale=SCALE, window=window)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def worst(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1.0))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("scores", [1 << 24, 64])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (8, 1), (1, 1)])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 17, 2, 3], [23]])
def test_reference_is_the_definition(
    lengths: list[int], heads: tuple[int, int], window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with queries in chunks (few scores at a time), and with values of another width than keys."""
    monkeypatch.setattr(reference, "SCORES", scores)
    total = sum(lengths)
    q, k, v, dout = random((total, heads[0], 8), (total, heads[1], 8), (total, heads[1], 6), (total, heads[0], 6))
    block = Block.make(lengths, lengths, kind="causal", device=CPU)
    out, lse = KERNEL.forward(q, k, v, block, scale=SCALE, window=window)
    grads = KERNEL.backward(dout, q, k, v, out, lse, block, scale=SCALE, window=window)
    expected = definition(q, k, v, dout, lengths, window)
    assert worst((out, *grads), expected) < 1e-13
    if len(lengths) > 1:  # the control: a dropped boundary
        merged = definition(q, k, v, dout, [total], window)
        assert worst((out,), merged[:1]) > 1e-2 or window == 1


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 8e-4)])
def test_reference_in_low_precision_computes_in_f32(dtype: torch.dtype, limit: float) -> None:
    """Only the stored results are rounded: one unit roundoff (bf16 2^-9 mean 2e-3), not one a step."""
    lengths = [40, 3]
    q, k, v, dout = random((43, 4, 16), (43, 2, 16), (43, 2, 16), (43, 4, 16), dtype=dtype)
    block = Block.make(lengths, lengths, kind="causal", device=CPU)
    out, lse = KERNEL.forward(q, k, v, block, scale=SCALE)
    grads = KERNEL.backward(dout, q, k, v, out, lse, block, scale=SCALE)
    expected = definition(*(x.double() for x in (q, k, v, dout)), lengths, None)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert worst((out, *grads), expected) < limit


def test_rows_without_keys() -> None:
    """Zero-length key segments and queries that lie before every key: out 0, lse -inf, finite gradients."""
    q, k, v, dout = random((7, 2, 4), (3, 1, 4), (3, 1, 4), (7, 2, 4))
    block = Block.make([2, 5], [0, 3], kind="causal", device=CPU)  # bottom-right: the first 2 of 5 see nothing
    out, lse = KERNEL.forward(q, k, v, block, scale=SCALE)
    assert out[:4].abs().max() == 0 and bool(torch.isneginf(lse[:, :4]).all())
    assert bool(torch.isfinite(lse[:, 4:]).all())
    grads = KERNEL.backward(dout, q, k, v, out, lse, block, scale=SCALE)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    assert grads[0][:4].abs().max() == 0


def test_full_blocks_and_blocks_of_a_larger_softmax() -> None:
    """A causal softmax cut by keys: the parts merge to the whole; with the global out and lse their gradients add."""
    total, cut = 20, 12
    q, k, v, dout = random((total, 4, 8), (total, 2, 8), (total, 2, 8), (total, 4, 8))
    expected = definition(q, k, v, dout, [total], None)
    early = Block.make([cut], [cut], kind="causal", device=CPU)
    late = Block.make([total - cut], [cut], kind="full", device=CPU, offset=[cut])
    own = Block.make([total - cut], [total - cut], kind="causal", device=CPU)
    calls = [
        (slice(0, cut), slice(0, cut), early, True),
        (slice(cut, total), slice(cut, total), own, True),
        (torch.arange(cut, total), slice(0, cut), late, False),
    ]
    merged = PartialSoftmax(total, 4, 8, like=q)
    for rows, keys, block, fresh in calls:
        merged.add(rows, *KERNEL.forward(q[rows], k[keys], v[keys], block, scale=SCALE), fresh=fresh)
    out, lse = merged.result()
    sums = Sum(q), Sum(k), Sum(v)
    for rows, keys, block, _ in calls:
        parts = KERNEL.backward(dout[rows], q[rows], k[keys], v[keys], out[rows], lse[:, rows], block, scale=SCALE)
        for total_grad, part, where in zip(sums, parts, (rows, keys, keys), strict=True):
            total_grad.add(where, part)
    assert worst((out, *(part.result() for part in sums)), expected) < 1e-13


def test_windows_are_decided_on_positions() -> None:
    """A windowed block far from the diagonal: `offset` says how far."""
    total, cut, window = 20, 12, 6
    q, k, v = random((total, 2, 8), (total, 2, 8), (total, 2, 8))
    expected = naive.attention(
        q, k, v, position=torch.arange(total), segment=torch.zeros(total), scale=SCALE, window=window
    )
    own = Block.make([total - cut], [total - cut], kind="causal", device=CPU)
    late = Block.make([total - cut], [cut], kind="full", device=CPU, offset=[cut])
    assert (own.shift, late.shift) == (0, total - cut)
    merged = PartialSoftmax(total - cut, 2, 8, like=q)
    for keys, block, fresh in ((slice(cut, total), own, True), (slice(0, cut), late, False)):
        part = KERNEL.forward(q[cut:], k[keys], v[keys], block, scale=SCALE, window=window)
        merged.add(None, *part, fresh=fresh)
    assert worst((merged.result()[0],), (expected[cut:],)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f12_merging_never_overflows(dtype: torch.dtype) -> None:
    """F12: LSE 0 against 100 and 1000 (exp overflows f32 above 88.7), a part without keys, and two of them."""
    inf = float("inf")
    values = [0.0, 100.0, 1000.0, -1000.0, -inf]
    for (lse_a, lse_b), rows in itertools.product(
        itertools.product(values, values), (None, slice(0, 1), torch.zeros(1, dtype=torch.long))
    ):
        merged = PartialSoftmax(1, 1, 2, like=torch.zeros(1, dtype=dtype))
        parts = [(lse, 0.0 if lse == -inf else value) for lse, value in ((lse_a, 1.0), (lse_b, 3.0))]
        for number, (lse, value) in enumerate(parts):
            merged.add(
                rows, torch.full((1, 1, 2), value, dtype=dtype), torch.full((1, 1), lse, dtype=dtype), fresh=number == 0
            )
        out, lse = merged.result()
        exact = torch.tensor([lse_a, lse_b], dtype=torch.float64)
        weights = exact.softmax(0).nan_to_num(0.0)
        expected = float(weights[0] * parts[0][1] + weights[1] * parts[1][1])
        assert torch.equal(out, torch.full_like(out, expected)), (lse_a, lse_b, out)
        assert float(lse) == pytest.approx(float(torch.logaddexp(exact[0], exact[1])))


def test_f12_the_naive_merge_does_overflow() -> None:
    """The control of F12: the formula of the report gives inf where ours gives 100."""
    lse_a, lse_b = torch.tensor(0.0), torch.tensor(100.0)
    assert torch.isinf(lse_a + torch.log(1 + torch.exp(lse_b - lse_a)))
    assert torch.logaddexp(lse_a, lse_b) == 100


def test_sums_stay_in_f32() -> None:
    """F13: 256 + 64 ones, one at a time: bf16 sums stop at 256, ours do not."""
    total = Sum(torch.zeros(1, 1, 1, dtype=torch.bfloat16))
    total.add(None, torch.full((1, 1, 1), 256.0, dtype=torch.bfloat16))
    stuck = torch.full((1, 1, 1), 256.0, dtype=torch.bfloat16)
    for _ in range(64):
        total.add(slice(0, 1), torch.ones(1, 1, 1, dtype=torch.bfloat16))
        stuck += 1
    assert float(total.result()) == 320 and float(stuck) == 256


def test_shift_of_unequal_segments_is_our_bug() -> None:
    block = Block.make([2, 2], [4, 4], kind="full", device=CPU, offset=[4, 9])
    with pytest.raises(AssertionError, match="one shift"):
        _ = block.shift
