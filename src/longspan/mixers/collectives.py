"""Differentiable collectives on dim 0, for parts of a model that are no attention (recurrent layers, vision towers).

all_gather's gradient is a reduce-scatter and the other way round, summed in f32 (f64 for f64): the rank that makes a
value is not the one that uses it, so gradients add over ranks. Every rank of the group must take part, forward and
backward.
"""

from typing import Any

import torch
from torch import Tensor

from longspan.layout import comm
from longspan.layout.mesh import CPGroup
from longspan.mixers.precision import accumulator

__all__ = ["all_gather", "all_to_all", "reduce_scatter"]


def all_to_all(x: Tensor, group: CPGroup) -> Tensor:
    """[N * n, ...] -> [N * n, ...]: part i goes to rank i, part i comes from rank i."""
    return _AllToAll.apply(x, group)


def all_gather(x: Tensor, group: CPGroup) -> Tensor:
    """[n, ...] -> [N * n, ...], rank order."""
    return _AllGather.apply(x, group)


def reduce_scatter(x: Tensor, group: CPGroup) -> Tensor:
    """[N * n, ...] -> [n, ...]: the sum over ranks of the r-th part."""
    return _ReduceScatter.apply(x, group)


def _sum_parts(x: Tensor, group: CPGroup) -> Tensor:
    return comm.reduce_scatter(x.to(accumulator(x.dtype)), group).to(x.dtype)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return comm.all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return comm.all_to_all(grads[0], ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return comm.all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_parts(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return _sum_parts(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(grads[0], ctx.group), None
