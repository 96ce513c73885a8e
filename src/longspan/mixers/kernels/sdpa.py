"""PyTorch's own CPU FlashAttention behind the kernel interface: f32, f64, bf16, one call a segment.

Shapes: see kernels/__init__.py. Source: aten::_scaled_dot_product_flash_attention_for_cpu and its backward (torch 2.13;
GQA, LSE out, external out and LSE in). It knows square causal and full attention; segments with another diagonal or
with a window that hides something, and values of another head dim, go to reference.py. Against the reference on one
core: 6 to 12 times as fast forward and 4 to 5 times backward at segments of 200 to 4,096 tokens, half as fast at 20.
Errors are those of a tiled f32 softmax (4e-7 on unit data); in bf16 the probabilities are rounded as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.mixers.kernels import Block
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.precision import accumulator

__all__ = ["Sdpa"]

REFERENCE = Reference()


@dataclass(frozen=True, slots=True)
class Segment:
    """One pair of runs of a block."""

    q: slice
    k: slice
    causal: bool
    alone: Block | None  # the block of this segment alone, where only the reference can do it


@dataclass(frozen=True, slots=True)
class Sdpa:
    """See the file's head."""

    name: str = "sdpa"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=accumulator(q.dtype))
        for part in _segments(block, window, fast=q.shape[2] == v.shape[2]):
            operands = q[part.q], k[part.k], v[part.k]
            if part.alone is not None:
                out[part.q], lse[:, part.q] = REFERENCE.forward(*operands, part.alone, scale=scale, window=window)
                continue
            found, found_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(_heads_first(x) for x in operands), 0.0, part.causal, scale=scale
            )
            out[part.q] = found[0].transpose(0, 1)
            lse[:, part.q] = found_lse[0]
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for part in _segments(block, window, fast=q.shape[2] == v.shape[2]):
            upstream, operands = dout[part.q], (q[part.q], k[part.k], v[part.k], out[part.q])
            if part.alone is not None:
                dq[part.q], dk[part.k], dv[part.k] = REFERENCE.backward(
                    upstream, *operands, lse[:, part.q], part.alone, scale=scale, window=window
                )
                continue
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(_heads_first(x) for x in (upstream, *operands)),
                lse[None, :, part.q].contiguous(),
                0.0,
                part.causal,
                scale=scale,
            )
            dq[part.q], dk[part.k], dv[part.k] = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x.transpose(0, 1)[None]


def _segments(block: Block, window: int | None, *, fast: bool) -> Iterator[Segment]:
    """The segments with keys; those without leave out 0 and lse -inf. fast: aten can do this block's head dims."""
    first_q = first_k = 0
    lens_q = block.lens_q or tuple(block.cu_q.diff().tolist())
    lens_k = block.lens_k or tuple(block.cu_k.diff().tolist())
    for len_q, len_k, offset in zip(lens_q, lens_k, block.offset or (0,) * len(lens_q), strict=True):
        rows, keys = slice(first_q, first_q + len_q), slice(first_k, first_k + len_k)
        first_q, first_k = rows.stop, keys.stop
        if not len_q or not len_k:
            continue
        causal = block.kind == "causal" and len_q > 1  # one query sees every key: full
        shifted = causal and len_q != len_k
        hides = window is not None and offset + len_q - window > 0  # the last query's window starts after key 0
        alone = None
        if shifted or hides or not fast:
            alone = Block.make([len_q], [len_k], kind=block.kind, device=block.cu_q.device, offset=[offset])
        yield Segment(rows, keys, causal, alone)
