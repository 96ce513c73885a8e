"""FlashAttention 4 (`flash-attn-4`, CuTe DSL) behind the kernel interface. The only file that imports flash_attn.

Shapes: see kernels/__init__.py. CUDA of compute capability 9 and above, bf16 and f16, head dims up to 256.
Source: flash_attn.cute.interface._flash_attn_fwd / _flash_attn_bwd of flash-attn-4 4.0.0b36. Both are wrapped as
torch custom ops, opaque to torch.compile (fullgraph works). Head dims are padded to one of SIZES: at 72 and 80 the
backward of b36 gives a wrong dQ on Hopper (relative error 1.1). Kernels compile at first use, 3 to 6 s each on a core;
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 keeps them on disk. Not used: its own sinks, soft caps and block sparsity.
"""

from dataclasses import dataclass
from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from . import Block, heads_first
from .padding import pad_head_dim

__all__ = ["Flash4"]

SIZES = (64, 96, 128, 192, 256)  # head dims whose forward and backward were checked against the reference on an H200
MAX_HEAD_DIM = SIZES[-1]
NO_WINDOW = -1


@dataclass(frozen=True, slots=True)
class Flash4:
    """See the file's head. deterministic: backward adds dq in a fixed order (615 -> 508 TFLOP/s of a 64k row on an H200)."""

    deterministic: bool = False
    name: str = "flash4"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        q_pad, k_pad, v_pad = pad_head_dim(_head_dim(q, v), q, k, v)
        out, lse = flash4_forward(
            q_pad, k_pad, v_pad, block.cu_q, block.cu_k, block.max_q, block.max_k, *_mask(block, window), scale
        )
        return out[..., : v.shape[2]], lse

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
        size = _head_dim(q, v)
        dout_pad, q_pad, k_pad, v_pad, out_pad = pad_head_dim(size, dout.contiguous(), q, k, v, out.contiguous())
        dq, dk, dv = flash4_backward(
            dout_pad,
            q_pad,
            k_pad,
            v_pad,
            out_pad,
            lse.contiguous(),
            block.cu_q,
            block.cu_k,
            block.max_q,
            block.max_k,
            *_mask(block, window),
            scale,
            self.deterministic,
        )
        return dq[..., : q.shape[2]], dk[..., : k.shape[2]], dv[..., : v.shape[2]]


def _head_dim(q: Tensor, v: Tensor) -> int:
    """The smallest size that holds both; one size for q, k and v keeps to the checked kernels."""
    needed = max(q.shape[2], v.shape[2])
    return next(size for size in SIZES if size >= needed)


def _mask(block: Block, window: int | None) -> tuple[bool, int]:
    """(causal, keys visible to the left of the bottom-right diagonal)."""
    return block.kind == "causal", NO_WINDOW if window is None else window - 1 - block.shift


def _segments(
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool, left: int, scale: float
) -> dict[str, Any]:
    """FA4's own words: a window is "local" attention, whose right edge is the diagonal where it is causal."""
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    if left == NO_WINDOW:
        return {**named, "softmax_scale": scale, "causal": causal}
    edges = {"window_size_left": left, "window_size_right": 0 if causal else None}
    return {**named, "softmax_scale": scale, "causal": False, **edges}


def forward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    left: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out [Tq, H, D] in the dtype of q, lse [H, Tq] f32."""
    told = _segments(cu_q, cu_k, max_q, max_k, causal=causal, left=left, scale=scale)
    out, lse = _flash_attn_fwd(q, k, v, return_lse=True, **told)[:2]
    return out, lse


flash4_forward = torch.library.custom_op(
    "longspan::flash4_forward", forward_kernel, mutates_args=(), device_types="cuda"
)


@flash4_forward.register_fake
def _(q, k, v, cu_q, cu_k, max_q, max_k, causal, left, scale):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def backward_kernel(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    left: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the dtype of q, heads first in memory."""
    told = _segments(cu_q, cu_k, max_q, max_k, causal=causal, left=left, scale=scale)
    dq, dk, dv = (heads_first(x, *x.shape) for x in (q, k, v))
    _flash_attn_bwd(q, k, v, out, dout, lse, deterministic=deterministic, dq=dq, dk=dk, dv=dv, **told)
    return dq, dk, dv


flash4_backward = torch.library.custom_op(
    "longspan::flash4_backward", backward_kernel, mutates_args=(), device_types="cuda"
)


@flash4_backward.register_fake
def _(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, left, scale, deterministic):
    return heads_first(q, *q.shape), heads_first(k, *k.shape), heads_first(v, *v.shape)
