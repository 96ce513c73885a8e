"""Optimizer state cut over the data ranks (ZeRO stage 1): each keeps the moments of one slice of every parameter.

A parameter of n elements is cut flat into `group.size` slices of ceil(n / size). A gradient is summed straight into
slices (reduce-scatter), the optimizer steps them in place, and they make the parameter whole again (all-gather).
"""

import torch
from torch import Tensor

from longspan.layout import CPGroup
from longspan.layout.comm import all_gather, reduce_scatter

__all__ = ["own_slice", "sum_into_slice", "whole_from_slices"]


def own_slice(whole: Tensor, group: CPGroup) -> Tensor:
    """This rank's elements [at most ceil(n / size)] of a tensor, as a view: writing there writes the tensor."""
    rows = _rows(whole.numel(), group)
    return whole.detach().view(-1)[rows * group.rank : rows * (group.rank + 1)]


def sum_into_slice(whole: Tensor, group: CPGroup) -> Tensor:
    """This rank's elements of the sum over the group. Collective; `whole` stays as it is."""
    rows = _rows(whole.numel(), group)
    total = reduce_scatter(_padded(whole.detach().reshape(-1), rows * group.size), group)
    return total[: own_slice(whole, group).numel()].clone()


def whole_from_slices(part: Tensor, like: Tensor, group: CPGroup) -> Tensor:
    """A tensor of the shape of `like` from every rank's slice. Collective."""
    rows = _rows(like.numel(), group)
    return all_gather(_padded(part, rows), group)[: like.numel()].view(like.shape)


def _rows(numel: int, group: CPGroup) -> int:
    return -(-numel // group.size)


def _padded(flat: Tensor, size: int) -> Tensor:
    return flat if len(flat) == size else torch.cat([flat, flat.new_zeros(size - len(flat))])
