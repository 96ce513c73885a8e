"""Ulysses: ranks swap tokens for heads, so that each holds whole documents of its own heads (DeepSpeed-Ulysses, 2023).

One all-to-all carries q, k and v, one brings out back; N ranks, H query heads, H_kv KV heads:
    q [T/N, H, D], k, v [T/N, H_kv, D]  ->  q [T, H/N, D], k, v [T, h_kv, D]  ->  out [T, H/N, D]  ->  [T/N, H, D]
The only rule is H % N == 0. Where H_kv % N == 0 each rank gets h_kv = H_kv/N heads; elsewhere KV heads travel once to
each rank that needs them (and, where N and H_kv share no pattern, once per group of query heads), and their gradient
is the sum over the copies. Tokens arrive in rank order and are put in stream order where that differs (zigzag).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.layout.comm import all_to_all
from longspan.layout.mesh import CPGroup
from longspan.layout.resolve import ulysses_refusal
from longspan.layout.seqinfo import SeqInfo, make_seqinfo
from longspan.layout.travel import sent
from longspan.mixers.attention import Prepared, Saved, SizeCheck, Work, core_attention
from longspan.mixers.kernels import Kernel
from longspan.mixers.local import Local, LocalPrepared

__all__ = ["Ulysses", "UlyssesPrepared", "collect", "deal", "exchange", "kv_heads_by_rank", "swap_attention"]


@dataclass(frozen=True, slots=True, eq=False)
class UlyssesPrepared:
    """The exchange, and the attention between its two halves."""

    group: CPGroup
    to_order: Tensor | None  # [n] int64 device: row in rank order of each row in inner order; None: the same order
    from_order: Tensor | None  # its inverse
    inner: Prepared


@dataclass(frozen=True, slots=True)
class Ulysses:
    """All ranks of the row in one exchange."""

    name: str = "ulysses"

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """Query heads must divide."""
        return lambda size: ulysses_refusal(size, heads)

    def prepare(self, info: SeqInfo, device: torch.device) -> UlyssesPrepared | LocalPrepared:
        """Whole documents on every rank."""
        alone = make_seqinfo("identity", info.cu_seqlens, CPGroup.alone(info.group.ranks[info.rank]))
        inner = Local().prepare(alone, device)
        return inner if info.size == 1 else exchange(info.group, info.indices, alone.index, inner, device)

    def around(self, exchange: UlyssesPrepared) -> UlyssesPrepared:
        """What `attend` takes for this exchange around an attention of another mixer."""
        return exchange

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: UlyssesPrepared | LocalPrepared,
        *,
        scale: float,
        kernel: Kernel,
        window: int | None = None,
        sink: Tensor | None = None,
        saved: Saved | None = None,
    ) -> Tensor:
        """See attention.Mixer."""
        return swap_attention(prepared, q, k, v, work=Work(kernel, scale, window), sink=sink, saved=saved)


def exchange(
    group: CPGroup, indices: tuple[Tensor, ...], order: Tensor, inner: Prepared, device: torch.device
) -> UlyssesPrepared:
    """The exchange among `group`, whose ranks hold `indices`, into the token order `order`."""
    arrived = torch.cat(indices)
    if torch.equal(arrived, order):
        return UlyssesPrepared(group, None, None, inner)
    row = torch.empty(int(arrived.max()) + 1, dtype=torch.long)
    row[arrived] = torch.arange(arrived.numel())
    to_order = row[order]
    from_order = torch.empty_like(to_order)
    from_order[to_order] = torch.arange(to_order.numel())
    return UlyssesPrepared(group, sent(to_order, device), sent(from_order, device), inner)


def swap_attention(
    prepared: UlyssesPrepared | LocalPrepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    work: Work,
    sink: Tensor | None,
    saved: Saved | None,
) -> Tensor:
    """Tokens to heads, the inner attention, heads to tokens; a row of one rank needs no exchange."""
    if isinstance(prepared, LocalPrepared):
        return core_attention(prepared, q, k, v, work=work, sink=sink, saved=saved)
    group = prepared.group
    if reason := ulysses_refusal(group.size, q.shape[1]):
        raise UserError(reason)
    q_swapped, k_swapped, v_swapped = _ToHeads.apply(q, k, v, prepared)
    if sink is not None:
        sink = sink.chunk(group.size)[group.rank]  # [H/N]; the ranks' gradients of the whole add up
    out = core_attention(prepared.inner, q_swapped, k_swapped, v_swapped, work=work, sink=sink, saved=saved)
    return _ToTokens.apply(out, prepared)


def kv_heads_by_rank(heads: int, kv_heads: int, size: int) -> tuple[int, ...]:
    """The KV head in each KV slot, rank after rank. The slots of a rank serve equally many of its query heads."""
    group = heads // kv_heads  # query heads of a KV head
    shared = math.gcd(heads // size, group)  # query heads of a slot
    return tuple(head // group for head in range(0, heads, shared))


def deal(x: Tensor, slots: tuple[int, ...]) -> Tensor:
    """[T, H_kv, D] -> [T, slots, D]."""
    if slots == tuple(range(x.shape[1])):
        return x
    return torch.stack([x[:, head] for head in slots], 1)


def collect(grad: Tensor, slots: tuple[int, ...], kv_heads: int) -> Tensor:
    """[T, slots, D] -> [T, H_kv, D]: the sum over the copies of each head (f32 inside), in slot order; heads first in memory."""
    if slots == tuple(range(kv_heads)):
        return grad
    parts = []
    for head in range(kv_heads):
        first = slots.index(head)
        parts.append(grad[:, first : first + slots.count(head)].sum(1))
    return torch.stack(parts).transpose(0, 1)


def _split_heads(xs: tuple[Tensor, ...], size: int) -> Tensor:
    """Each [T, N * h, D] -> together [N, T, sum of h * D]: what goes to each rank."""
    return torch.cat([x.unflatten(1, (size, -1)).movedim(1, 0).flatten(2) for x in xs], -1)


def _join_heads(x: Tensor, widths: list[int], dims: list[int]) -> list[Tensor]:
    """[N, T, sum of h * D] -> each [T, N * h, D], heads first in memory (kernels.heads_first)."""
    parts = [part.unflatten(-1, (-1, dim)) for part, dim in zip(x.split(widths, -1), dims, strict=True)]
    return [part.movedim(2, 1).flatten(0, 1).contiguous().transpose(0, 1) for part in parts]  # of [N, T, h, D]


def _reorder(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)


class _ToHeads(torch.autograd.Function):
    """q, k, v of this rank's tokens and all heads -> of all tokens and this rank's heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, prepared: UlyssesPrepared) -> tuple[Tensor, Tensor, Tensor]:
        size = prepared.group.size
        slots = kv_heads_by_rank(q.shape[1], k.shape[1], size)
        ctx.prepared, ctx.slots, ctx.kv_heads = prepared, slots, k.shape[1]
        ctx.dims = [q.shape[2], k.shape[2], v.shape[2]]
        ctx.heads = [q.shape[1] // size, len(slots) // size, len(slots) // size]
        outgoing = _split_heads((q, deal(k, slots), deal(v, slots)), size)  # [N, T/N, C]
        arrived = all_to_all(outgoing.flatten(0, 1), prepared.group)  # [T, C], rank order
        widths = [h * d for h, d in zip(ctx.heads, ctx.dims, strict=True)]
        parts = _reorder(arrived, prepared.to_order).split(widths, -1)
        q_out, k_out, v_out = (part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, ctx.dims, strict=True))
        return q_out, k_out, v_out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        group = ctx.prepared.group
        outgoing = torch.cat([grad.flatten(1) for grad in grads], -1)  # [T, C]
        arrived = all_to_all(_reorder(outgoing, ctx.prepared.from_order), group).unflatten(0, (group.size, -1))
        widths = [h * d for h, d in zip(ctx.heads, ctx.dims, strict=True)]
        dq, dk, dv = _join_heads(arrived, widths, ctx.dims)
        return dq, collect(dk, ctx.slots, ctx.kv_heads), collect(dv, ctx.slots, ctx.kv_heads), None


class _ToTokens(torch.autograd.Function):
    """out of all tokens and this rank's heads -> of this rank's tokens and all heads."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, prepared: UlyssesPrepared) -> Tensor:
        ctx.prepared = prepared
        arrived = all_to_all(_reorder(out, prepared.from_order), prepared.group)  # [N * T/N, H/N, D]
        return arrived.unflatten(0, (prepared.group.size, -1)).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        group = ctx.prepared.group
        outgoing = grads[0].unflatten(1, (group.size, -1)).movedim(1, 0).flatten(0, 1)  # [N * T/N, H/N, D]
        return _reorder(all_to_all(outgoing, group), ctx.prepared.to_order), None
