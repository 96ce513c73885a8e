"""Differentiable collectives over tensor-parallel ranks, on dim 0, on any device.

`gather_whole` and `keep_own` join work cut over ranks with work that every rank repeats: the gradient of repeated work
is already whole on each rank, so it is cut or gathered, never summed. Sums live in mixers/collectives.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from longspan.layout import CPGroup
from longspan.layout.comm import all_gather, reduce_scatter
from longspan.mixers.precision import accumulator

__all__ = ["gather_linear", "gather_whole", "keep_own", "pad_rows", "sum_gradient"]


def gather_whole(x: Tensor, group: CPGroup) -> Tensor:
    """[n, ...] -> [N * n, ...] for work that every rank repeats; backward keeps this rank's rows."""
    return x if group.size == 1 else _GatherWhole.apply(x, group)


def keep_own(x: Tensor, group: CPGroup) -> Tensor:
    """[N * n, ...], the same on every rank -> this rank's [n, ...]; backward gathers the rows of all."""
    return x if group.size == 1 else _KeepOwn.apply(x, group)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Zeros below x until it has `rows` rows."""
    if x.shape[0] == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def sum_gradient(x: Tensor, group: CPGroup) -> Tensor:
    """x, the same on every rank, for work that ranks share out; backward sums their parts of its gradient."""
    return x if group.size == 1 else _SumGradient.apply(x, group)


def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: CPGroup) -> Tensor:
    """[n, 1, E] -> [N * n, 1, O]: a linear on the rows of all ranks with this rank's columns. Keeps x for backward."""
    return _GatherLinear.apply(x, weight, bias, group)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: CPGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return functional.linear(all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dout = grads[0]
        dweight, dbias = None, None
        if ctx.needs_input_grad[1]:
            dweight = dout.flatten(0, 1).T @ all_gather(x, ctx.group).flatten(0, 1)
        if ctx.needs_input_grad[2]:
            dbias = dout.sum((0, 1))
        # each rank has the part of its columns: summed in f32 (f64 for f64), then back to the rows' owners
        dx = reduce_scatter((dout @ weight).to(accumulator(x.dtype)), ctx.group).to(x.dtype)
        return dx, dweight, dbias, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size)[ctx.group.rank].contiguous(), None


class _KeepOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return x.chunk(group.size)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0].contiguous(), ctx.group), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].to(accumulator(grads[0].dtype), copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group.group)
        return total.to(grads[0].dtype), None
