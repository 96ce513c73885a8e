"""Causal depthwise convolution of a packed, contiguous row cut over ranks: out[t] = sum_i w[:, i] x[t - K + 1 + i],
inside a document.

Each rank prepends a halo: the K - 1 tokens to its left, whoever holds them (a rank may hold fewer than K - 1). One
small all-gather of every rank's last K - 1 tokens; its backward sums what the right neighbours send back. Whether a
token of the halo is used is decided by positions alone: a token at position p of its document reads at most p tokens
back. So any chunk and any document length from 1 up is exact (bugs B10, D8), forward and backward. Does not apply an
activation.
"""

import torch
from torch import Tensor

from longspan.layout.mesh import CPGroup
from longspan.mixers.collectives import all_gather
from longspan.mixers.precision import accumulator

__all__ = ["causal_convolution", "with_halo"]


def causal_convolution(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """x [K - 1 + T, C] halo first, weight [C, K], position [T] in the document -> [T, C], f32 (f64 for f64)."""
    width, length = weight.shape[1], position.shape[0]
    wide = accumulator(x.dtype)
    x, weight = x.to(wide), weight.to(wide)
    out = x[width - 1 :] * weight[:, width - 1]
    for back in range(1, width):
        seen = x[width - 1 - back : width - 1 - back + length].masked_fill((position < back)[:, None], 0.0)
        out = out + seen * weight[:, width - 1 - back]
    return out


def with_halo(x: Tensor, width: int, group: CPGroup, *, crossed: bool, tail: int = 0) -> Tensor:
    """x [T_local, C] -> [width - 1 + T_local + tail, C]: its halo in front, `tail` rows of zeros behind.

    crossed: some document spans ranks; if none does, nothing is exchanged and the halo is zeros.
    """
    behind = x.new_zeros(tail, x.shape[1])
    if not crossed:
        return torch.cat([x.new_zeros(width - 1, x.shape[1]), x, behind])
    kept = min(width - 1, x.shape[0])  # all ranks hold the same number of tokens
    tails = all_gather(x[x.shape[0] - kept :], group)  # [kept, C] -> [size * kept, C]
    known = torch.cat([x.new_zeros(width - 1, x.shape[1]), tails])  # zeros before the row's first token
    return torch.cat([known[group.rank * kept : group.rank * kept + width - 1], x, behind])
