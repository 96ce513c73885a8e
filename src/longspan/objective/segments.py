"""Sums and means over a sample's trained tokens, wherever they live: the only way a loss sees more than its own token.

ids [T_local] says which sample of the row each local token belongs to; the ranks of `group` hold the rest of the row.
sum, mean: [T_local] -> [num], the same on every rank of the group; expand: [num] -> [T_local].
Differentiable: the result is on every rank, so the backward of the all-reduce is the all-reduce of the incoming
gradients; then each token takes its sample's. Every rank of the group must call it (an inert rank with an all-zero
mask too).
Deterministic: local sums run in token order over a stable sort, never by atomics. Masked values are dropped before the
sum.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RowGroup", "Segments"]


class RowGroup(Protocol):
    """What is needed of layout.CPGroup: the ranks that hold one row."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...
    @property
    def size(self) -> int: ...


def _all_reduce(x: Tensor, group: RowGroup | None) -> Tensor:
    """Sum over the row's ranks, in place.  # [num, ...] -> [num, ...]"""
    if group is not None and group.size > 1:
        assert group.group is not None, "a row over several ranks comes with its process group"
        dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group.group)
    return x


def _local_sum(x: Tensor, ids: Tensor, num: int) -> Tensor:
    """Sums of x [T, ...] by ids [T] -> [num, ...], in token order (stable sort, then one sequential sum a segment)."""
    order = torch.sort(ids, stable=True)
    edges = torch.searchsorted(order.values, torch.arange(num + 1, device=ids.device))
    return torch.segment_reduce(x[order.indices].contiguous(), "sum", offsets=edges, axis=0, initial=0, unsafe=True)


class _SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, num: int, group: RowGroup | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.group = group
        return _all_reduce(_local_sum(x, ids, num), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        total = _all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group)
        return total[ids], None, None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num = x.shape[0]
        return x[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return _local_sum(grads[0], ids, ctx.num), None


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The samples of one row as seen by one rank."""

    ids: Tensor  # [T_local] int64, sample of each token, 0 <= id < num
    num: int  # segments of the row, a tail pad included
    mask: Tensor  # [T_local] bool or 0/1: tokens that count
    group: RowGroup | None = None  # ranks that share the row; None: this rank has all of it

    def _sums(self, columns: Tensor) -> Tensor:
        """columns [T, C], already 0 outside the mask -> [num, C]: one collective."""
        return _SegmentSum.apply(columns, self.ids, self.num, self.group)  # pyright: ignore[reportReturnType]  (apply is untyped)

    def _kept(self, x: Tensor) -> Tensor:
        return torch.where(self.mask > 0, x, torch.zeros((), dtype=x.dtype, device=x.device))

    def sum(self, x: Tensor) -> Tensor:
        """Sum of x [T_local] over each sample's trained tokens -> [num]."""
        return self._sums(self._kept(x)[:, None])[:, 0]

    def mean(self, x: Tensor) -> Tensor:
        """Mean of x [T_local] over each sample's trained tokens -> [num]; 0 for a sample without one."""
        sums = self._sums(torch.stack([self._kept(x), self._kept(torch.ones_like(x))], 1))
        return sums[:, 0] / sums[:, 1].clamp(min=1)

    def count(self) -> Tensor:
        """Trained tokens of each sample -> [num] f64."""
        return self.sum(torch.ones(self.ids.shape[0], dtype=torch.float64, device=self.ids.device))

    def expand(self, x: Tensor) -> Tensor:
        """Each token takes its sample's value.  [num] -> [T_local]"""
        return _Expand.apply(x, self.ids)  # pyright: ignore[reportReturnType]  (apply is untyped)
