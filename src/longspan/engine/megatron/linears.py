"""Matmuls whose weight is cut over tensor-parallel ranks: `column` by outputs, `row` by inputs.

A product that ranks sum leaves the matmul in fp32 (fp64 for fp64) and is rounded once, after the sum, so that tp adds no
rounding; megatron-core's rounds each rank's part to bf16 first. rows: under sequence parallelism each rank has T / tp
of the tokens; they are gathered before `column` and scattered after `row`. Only a rank's own rows stay for backward, where
both collectives run beside a matmul. All matmuls are 2D: torch may run [T, 1, I] as T products.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from longspan.layout import CPGroup, comm
from longspan.mixers.precision import accumulator

__all__ = ["column", "row"]


def column(x: Tensor, weight: Tensor, bias: Tensor | None, group: CPGroup, *, rows: bool) -> Tensor:
    """[T, 1, I] (rows: [T / tp, 1, I]), weight [O / tp, I] -> [T, 1, O / tp]."""
    if group.size == 1:
        return functional.linear(x.squeeze(1), weight, bias)[:, None]
    return _Column.apply(x, weight, bias, group, rows)


def row(x: Tensor, weight: Tensor, extra: Tensor | None, group: CPGroup, *, rows: bool) -> Tensor:
    """[T, 1, I / tp], weight [O, I / tp] -> [T, 1, O] (rows: [T / tp, 1, O]), summed over ranks. extra: this rank's [T, 1, O]
    to add before the sum."""
    if group.size == 1:
        out = functional.linear(x.squeeze(1), weight)[:, None]
        return out if extra is None else out + extra
    return _Row.apply(x, weight, extra, group, rows)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: CPGroup, rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.rows = group, rows
        whole = comm.all_gather(x, group) if rows else x
        return functional.linear(whole[:, 0], weight, bias)[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, dout = ctx.group, grads[0][:, 0]
        dweight, dbias = None, None
        whole, gathering = _start_gather(x, group) if ctx.rows and ctx.needs_input_grad[1] else (x, None)
        dx, summing = _start_sum(_wide(dout, weight), group, ctx.rows)
        if gathering is not None:
            gathering.wait()
        if ctx.needs_input_grad[1]:
            dweight = dout.T @ whole[:, 0]
        if ctx.needs_input_grad[2]:
            dbias = dout.sum(0)
        summing.wait()
        return dx.to(x.dtype)[:, None], dweight, dbias, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, extra: Tensor | None, group: CPGroup, rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.rows = group, rows
        part = _wide(x[:, 0], weight.T)
        if extra is not None:
            part += extra[:, 0]
        total, summing = _start_sum(part, group, rows)
        summing.wait()
        return total.to(x.dtype)[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = comm.all_gather(grads[0], ctx.group) if ctx.rows else grads[0]
        dout = whole[:, 0]
        dweight = dout.T @ x[:, 0] if ctx.needs_input_grad[1] else None
        return (dout @ weight)[:, None], dweight, whole if ctx.needs_input_grad[2] else None, None, None


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of its sums."""
    dtype = accumulator(a.dtype)
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)  # CPU kernels have no out_dtype


def _start_gather(x: Tensor, group: CPGroup) -> tuple[Tensor, dist.Work]:
    """[T / tp, ...] -> [T, ...], there once the work was waited for."""
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    return whole, comm.gather_single(whole, x.contiguous(), group=group.group, async_op=True)


def _start_sum(part: Tensor, group: CPGroup, rows: bool) -> tuple[Tensor, dist.Work]:
    """[T, O] of every rank -> their sum, rows: this rank's [T / tp, O] of it, there once the work was waited for."""
    if not rows:
        return part, dist.all_reduce(part, group=group.group, async_op=True)
    own = part.new_empty(part.shape[0] // group.size, part.shape[1])
    return own, comm.scatter_single(own, part, group=group.group, async_op=True)
