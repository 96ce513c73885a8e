"""The definition of attention in this package: one softmax over a whole stream, no packing tricks, no ranks.

q [T, H, D], k [T, H_kv, D], v [T, H_kv, Dv] -> [T, H, Dv]. A query sees the keys of its own segment up to its own
position and, with a window W, above its position minus W. A sink is one more logit per head, with value 0.
f64 and f32 compute in their dtype, bf16 in f32. Quadratic memory: tests only.
"""

import torch
from torch import Tensor

from longspan.mixers.precision import accumulator

__all__ = ["attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position: Tensor,  # [T] int64, position in the document
    segment: Tensor,  # [T] int64, document number
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,  # [H]
) -> Tensor:
    """Plain softmax attention; autograd gives its gradients."""
    wide = accumulator(q.dtype)
    groups = q.shape[1] // k.shape[1]
    k_THD, v_THD = (x.to(wide).repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k_THD) * scale
    distance = position[:, None] - position[None]
    visible = (segment[:, None] == segment[None]) & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(wide)[:, None, None].expand(-1, q.shape[0], 1)], -1)
    probs = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probs, v_THD).to(q.dtype)
