"""PyTorch's own FlashAttention-2 (aten) behind the kernel interface; needs no extra package. CUDA, bf16 and f16.

Shapes: see kernels/__init__.py. Source: aten::_flash_attention_forward / _backward (torch 2.11), varlen form.
Differences that are evened out here: rows without keys have LSE +inf there and -inf here; q, k and v need one head
dim, a multiple of 8 and at most 256; a window is (left, right) counts around the bottom-right diagonal.
A segment may be empty on either side. No dropout, no soft cap, no ALiBi.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from . import Block
from .padding import pad_head_dim

__all__ = ["Flash2"]

MAX_HEAD_DIM = 256
INF = float("inf")


@dataclass(frozen=True, slots=True)
class Flash2:
    """See the file's head. deterministic: backward adds dq in a fixed order (slower)."""

    deterministic: bool = False
    name: str = "flash2"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        q_pad, k_pad, v_pad = pad_head_dim(_head_dim(q, v), q, k, v)
        left, right = _window(block, window)
        out, lse = torch.ops.aten._flash_attention_forward(
            q_pad,
            k_pad,
            v_pad,
            block.cu_q,
            block.cu_k,
            block.max_q,
            block.max_k,
            0.0,
            block.kind == "causal" and window is None,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )[:2]
        return out[..., : v.shape[2]], lse.masked_fill(lse == INF, -INF)

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
        left, right = _window(block, window)
        no_rng = torch.empty(2, dtype=torch.uint64, device=q.device)  # read only with dropout
        with _deterministic(self.deterministic):
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                dout_pad,
                q_pad,
                k_pad,
                v_pad,
                out_pad,
                # +inf again: exp(score - inf) is 0, while exp(-inf + inf) would be NaN
                lse.masked_fill(lse == -INF, INF).contiguous(),
                block.cu_q,
                block.cu_k,
                block.max_q,
                block.max_k,
                0.0,
                block.kind == "causal" and window is None,
                no_rng,
                no_rng,
                scale=scale,
                window_size_left=left,
                window_size_right=right,
            )
        return dq[..., : q.shape[2]], dk[..., : k.shape[2]], dv[..., : v.shape[2]]


def _head_dim(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[2], v.shape[2]) // 8) * 8


def _window(block: Block, window: int | None) -> tuple[int | None, int | None]:
    """(left, right) of FlashAttention; -1 is no limit."""
    if window is None:
        return None, None
    return window - 1 - block.shift, 0 if block.kind == "causal" else -1


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """aten reads its process-wide flag (and ignores it where it only warns); it is set for this call only."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
