"""Adds up what the calls of one attention give: partial softmaxes by their LSE, gradients by plain sums.

Both are kept in f32 (f64 for f64) from the second call on; the result of a single call over all rows passes through
untouched. The merge of (out_a, lse_a) and (out_b, lse_b) is out_a + (out_b - out_a) * sigmoid(lse_b - lse_a): no
exponential of a positive number, so nothing overflows; a part without keys (lse -inf) has weight 0.
"""

import torch
from torch import Tensor

from longspan.mixers.blocks import Rows, select
from longspan.mixers.precision import accumulator

__all__ = ["PartialSoftmax", "Sum"]


class PartialSoftmax:
    """out [Tq, H, Dv] and lse [H, Tq] of the keys seen so far."""

    def __init__(self, num_q: int, heads: int, dim: int, like: Tensor) -> None:
        self._shape = (num_q, heads, dim)
        self._like = like
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: Rows, out: Tensor, lse: Tensor, *, fresh: bool) -> None:
        """Merges a part over `rows`; `fresh`: nothing was added to them before."""
        if self._out is None and rows is None:
            self._out, self._lse = out, lse
            return
        total, total_lse = self._wide()
        old, old_lse = select(total, rows), select(total_lse.T, rows)  # [q, H, Dv], [q, H]
        if fresh:
            new, new_lse = out.to(total.dtype), lse.T
        else:
            weight = torch.sigmoid(lse.T - old_lse).masked_fill(torch.isneginf(lse.T), 0.0)
            new = torch.lerp(old, out.to(total.dtype), weight[..., None])
            new_lse = torch.logaddexp(old_lse, lse.T)
        _write(total, rows, new)
        _write(total_lse.T, rows, new_lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out and lse, 0 and -inf in rows that no call wrote."""
        if self._out is None or self._lse is None:
            return self._wide()
        return self._out, self._lse

    def _wide(self) -> tuple[Tensor, Tensor]:
        dtype = accumulator(self._like.dtype)
        if self._out is None or self._lse is None:
            self._out = self._like.new_zeros(self._shape, dtype=dtype)
            self._lse = self._like.new_full((self._shape[1], self._shape[0]), float("-inf"), dtype=dtype)
        self._out = self._out.to(dtype)
        return self._out, self._lse


class Sum:
    """A sum over calls of gradients of one tensor."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, rows: Rows, part: Tensor) -> None:
        """Adds to `rows`."""
        if self._total is None and rows is None:
            self._total = part
            return
        total = self.wide()
        if isinstance(rows, Tensor):
            total.index_add_(0, rows, part.to(total.dtype))  # no row twice, so the order of adding is fixed
        else:
            select(total, rows).add_(part)

    def wide(self) -> Tensor:
        """The sum in the accumulator's dtype."""
        dtype = accumulator(self._like.dtype)
        if self._total is None:
            self._total = torch.zeros(self._like.shape, dtype=dtype, device=self._like.device)
        self._total = self._total.to(dtype)
        return self._total

    def result(self) -> Tensor:
        """The sum in the dtype of the tensor."""
        return self.wide().to(self._like.dtype) if self._total is None else self._total.to(self._like.dtype)


def _write(x: Tensor, rows: Rows, values: Tensor) -> None:
    if rows is None:
        x.copy_(values)
    elif isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, rows, values)
