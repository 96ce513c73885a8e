"""Ulysses whose travel hides: in groups of heads in the forward, ahead of its use in the backward.

As ulysses.py, N ranks: q [T/N, H, D], k, v [T/N, H_kv, D] -> q [T, H/N, D], k, v [T, h_kv, D] -> out -> [T/N, H, Dv];
here a rank's h_kv KV heads and their query heads are cut into G equal groups, each an attention of its own: while one
attends, the next travels in and the last one's output travels out. The same kernel on the same heads: the same bits as
ulysses.py. Two ways to keep what backward needs, beside q, k, v and lse as they arrived:
    keep_arrivals  out as attention gave it: what o_proj keeps is another copy
    keep_output    result, as o_proj keeps it: out travels again. The backward of the attention after it starts that, a
                   whole layer's backward before its use (whether it arrives in that time was not measured); with `saved`,
                   the recomputation, where q, k and v are for backward alone too: the recomputation waits for nothing,
                   backward does
No sinks (ulysses.py has them). Overlaps only with a transport that leaves the SMs alone (symmetric.py).
Two H200s, 64k row / 64k mix, forward + backward of one layer: 1 group 52.65 / 7.95 ms, 2 groups 53.4 / 7.99, 4 groups 53.7 /
10.5. What overlaps is gained less than smaller attention calls lose, so one group is the default. These times are of the
transports before b58585c (commit 8dfaac9); two GPUs have not run the present ones (symmetric.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.layout.resolve import ulysses_refusal
from longspan.layout.seqinfo import SeqInfo
from longspan.mixers.attention import Saved, SizeCheck, Work
from longspan.mixers.kernels import Kernel
from longspan.mixers.local import LocalPrepared
from longspan.mixers.transport import Ahead, Arrival, Transport
from longspan.mixers.ulysses import Ulysses, UlyssesPrepared, collect, deal
from longspan.mixers.ulysses_trip import Trip, plan_trip

__all__ = ["OverlappedUlysses", "keep_arrivals", "keep_output"]


@dataclass(slots=True, eq=False)
class OverlappedPrepared:
    """A row's exchange, and what its last attention so far will need in backward."""

    exchange: UlyssesPrepared
    last: Ahead = field(default_factory=Ahead)


Keep = Callable[[Tensor, Tensor, Tensor, Trip, OverlappedPrepared], Tensor]


def keep_arrivals(q: Tensor, k: Tensor, v: Tensor, trip: Trip, prepared: OverlappedPrepared) -> Tensor:
    """See the file's head."""
    return _KeepArrivals.apply(q, k, v, trip)


def keep_output(q: Tensor, k: Tensor, v: Tensor, trip: Trip, prepared: OverlappedPrepared) -> Tensor:
    """See the file's head."""
    ahead = Ahead()
    result = _KeepOutput.apply(q, k, v, trip, ahead, prepared.last)[0]
    if result.requires_grad:
        sent = result.detach()
        ahead.promise(lambda: trip.to_heads(sent)[1])
        prepared.last = ahead
    return result


def keep_across(q: Tensor, k: Tensor, v: Tensor, trip: Trip, saved: Saved) -> Tensor:
    """keep_output in a layer that runs twice: the second run takes the first one's result, and sends what backward needs
    where one follows."""
    kept = saved.take()
    if kept is not None:
        follows = q.requires_grad or k.requires_grad or v.requires_grad
        return _Recomputed.apply(q, k, v, trip, saved.ahead, kept) if follows else kept[0]
    result, *lses = _KeepOutput.apply(q, k, v, trip, saved.ahead, Ahead())
    saved.put(result.detach(), torch.stack(lses))
    return result


@dataclass(frozen=True, slots=True)
class OverlappedUlysses:
    """ulysses with overlap; `groups` is an upper bound, the KV heads of a rank must divide."""

    transport: Transport
    groups: int = 1
    keep: Keep = keep_arrivals  # of layers that run once
    name: str = "ulysses"

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """As ulysses."""
        return Ulysses().sizes(heads, kv_heads)

    def prepare(self, info: SeqInfo, device: torch.device) -> OverlappedPrepared | LocalPrepared:
        """As ulysses."""
        prepared = Ulysses().prepare(info, device)
        return prepared if isinstance(prepared, LocalPrepared) else OverlappedPrepared(prepared)

    def around(self, exchange: UlyssesPrepared) -> OverlappedPrepared | UlyssesPrepared:
        """As ulysses; one rank alone has no travel to overlap."""
        return exchange if exchange.group.size == 1 else OverlappedPrepared(exchange)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: OverlappedPrepared | UlyssesPrepared | LocalPrepared,
        *,
        scale: float,
        kernel: Kernel,
        window: int | None = None,
        sink: Tensor | None = None,
        saved: Saved | None = None,
    ) -> Tensor:
        """See attention.Mixer."""
        if not isinstance(prepared, OverlappedPrepared) or sink is not None:
            plain = prepared.exchange if isinstance(prepared, OverlappedPrepared) else prepared
            return Ulysses().attend(q, k, v, plain, scale=scale, kernel=kernel, window=window, sink=sink, saved=saved)
        if reason := ulysses_refusal(prepared.exchange.group.size, q.shape[1]):
            raise UserError(reason)
        work = Work(kernel, scale, window)
        trip = plan_trip(q, k, prepared.exchange, self.transport, work, most=self.groups)
        if saved is not None:
            return keep_across(q, k, v, trip, saved)
        return self.keep(q, k, v, trip, prepared)


class _KeepArrivals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trip: Trip) -> Tensor:
        result, landed, lses, outs = _forward(trip, q, k, v)
        ctx.save_for_backward(*landed, *lses, *outs)
        ctx.trip, ctx.kv_heads = trip, k.shape[1]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        trip, kept = ctx.trip, list(ctx.saved_tensors)
        coming = trip.to_heads(grads[0])[1]
        landed, lses, outs = kept[: -2 * trip.groups], kept[-2 * trip.groups : -trip.groups], kept[-trip.groups :]
        return *_backward(trip, coming, landed, lses, outs, ctx.kv_heads), None


class _KeepOutput(torch.autograd.Function):
    """The result, and the lse of each group."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, trip: Trip, ahead: Ahead, before: Ahead
    ) -> tuple[Tensor, ...]:
        result, landed, lses, _ = _forward(trip, q, k, v)
        ctx.save_for_backward(*landed, *lses, result)
        ctx.mark_non_differentiable(*lses)
        ctx.trip, ctx.ahead, ctx.before, ctx.kv_heads = trip, ahead, before, k.shape[1]
        return result, *lses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward_of_output(ctx, grads[0]), None, None, None


class _Recomputed(torch.autograd.Function):
    """The recomputation of _KeepOutput, which keeps the same tensors: q, k, v and out are still on their way."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, trip: Trip, ahead: Ahead, kept: tuple[Tensor, Tensor]
    ) -> Tensor:
        result, lses = kept
        landing, coming = trip.to_heads(q, deal(k, trip.slots), deal(v, trip.slots))
        ahead.started(coming + trip.to_heads(result)[1])
        ctx.save_for_backward(*landing, *lses, result)
        ctx.trip, ctx.ahead, ctx.before, ctx.kv_heads = trip, ahead, Ahead(), k.shape[1]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward_of_output(ctx, grads[0]), None, None, None


def _forward(trip: Trip, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """The result; q, k, v as they landed, group after group; lse and out of each group."""
    landed, coming = trip.to_heads(q, deal(k, trip.slots), deal(v, trip.slots))
    result = q.new_empty(*q.shape[:2], v.shape[2])
    lses, outs, leaving = [], [], []
    for g, arrival in enumerate(coming):
        arrival.wait()
        out, lse = trip.attend(landed[3 * g : 3 * g + 3])
        leaving.append(trip.to_tokens((out,), (result,), g))
        lses.append(lse)
        outs.append(out)
    for arrival in leaving:
        arrival.wait()
    return result, landed, lses, outs


def _backward_of_output(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    trip = ctx.trip
    *kept, result = ctx.saved_tensors  # under a checkpoint this runs the recomputation, which sends what `ahead` has
    coming = trip.to_heads(grad)[1]
    arrivals = ctx.ahead.take() or trip.to_heads(result)[1]
    ctx.before.start()
    arrived = [arrival.wait()[0] for arrival in arrivals]
    outs = [trip.ordered(x) for x in arrived[-trip.groups :]]
    return _backward(trip, coming, kept[: -trip.groups], kept[-trip.groups :], outs, ctx.kv_heads)


def _backward(
    trip: Trip, coming: list[Arrival], landed: list[Tensor], lses: list[Tensor], outs: list[Tensor], kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens; `coming` brings the gradient of each group's out."""
    totals: tuple[Tensor, ...] = ()
    leaving = []
    for g, arrival in enumerate(coming):
        parts = trip.attend_backward(arrival.wait()[0], landed[3 * g : 3 * g + 3], outs[g], lses[g])
        totals = totals or tuple(trip.whole(part) for part in parts)
        leaving.append(trip.to_tokens(parts, totals, g))
    for arrival in leaving:
        arrival.wait()
    dq, dk, dv = totals
    return dq, collect(dk, trip.slots, kv_heads), collect(dv, trip.slots, kv_heads)
