"""Differentiable collectives over tensor-parallel ranks, on dim 0, on any device.

`gather_whole` and `keep_own` join work cut over ranks with work that every rank repeats: the gradient of repeated work
is already whole on each rank, so it is cut or gathered, never summed. A rank's own rows are copied out: as a view they
would hold the rows of all for as long as they live, which for embeddings and for the output layer's gradient is until the
end of a micro-step. Sums live in linears.py and mixers/collectives.py.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layout import CPGroup
from longspan.layout.comm import all_gather
from longspan.mixers.precision import accumulator

__all__ = ["gather_whole", "keep_own", "pad_rows", "sum_gradient", "sum_parts"]


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


def sum_parts(x: Tensor, group: CPGroup) -> Tensor:
    """The sum of every rank's x, for work that all repeat; backward hands its gradient to each."""
    return x if group.size == 1 else _SumParts.apply(x, group)


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _own_rows(grads[0], ctx.group), None


class _KeepOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        ctx.group = group
        return _own_rows(x, group)

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
        return _total(grads[0], ctx.group), None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup) -> Tensor:
        return _total(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _own_rows(x: Tensor, group: CPGroup) -> Tensor:
    return x.chunk(group.size)[group.rank].clone(memory_format=torch.contiguous_format)


def _total(x: Tensor, group: CPGroup) -> Tensor:
    """Summed in f32 (f64 for f64)."""
    total = x.to(accumulator(x.dtype), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.group)
    return total.to(x.dtype)
