"""Ulysses in groups of heads: while one group attends, the next one travels in and the last one's output travels out.

As ulysses.py, N ranks: q [T/N, H, D], k, v [T/N, H_kv, D] -> q [T, H/N, D], k, v [T, h_kv, D] -> out -> [T/N, H, Dv];
here a rank's h_kv KV heads and their query heads are cut into G equal groups, each an attention of its own. The only
travel that nothing hides is the first group's way in and the last one's way out. The same kernel on the same heads: the
same bits as ulysses.py. What backward needs is saved as it arrived, per group:
    forward   in: [N, T/N, C] with C = h_q * D + h_k * (D + Dv)     out: [N, T/N, h_q * Dv]
    backward  in: dout [N, T/N, h_q * Dv]                            out: dq, dk, dv [N, T/N, C]
No sinks (ulysses.py has them). Overlaps only with a transport that leaves the SMs alone (symmetric.py).
Two H200s, 64k row / 64k mix, forward + backward of one layer: 1 group 52.65 / 7.95 ms, 2 groups 53.4 / 7.99, 4 groups 53.7 /
10.5. What overlaps is gained less than smaller attention calls lose, so one group is the default.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.layout.mesh import CPGroup
from longspan.layout.resolve import ulysses_refusal
from longspan.layout.seqinfo import SeqInfo
from longspan.mixers.attention import Saved, SizeCheck, Work
from longspan.mixers.kernels import Kernel
from longspan.mixers.local import LocalPrepared
from longspan.mixers.transport import Arrival, Transport, copy_rows
from longspan.mixers.ulysses import Ulysses, UlyssesPrepared, _collect, _deal, kv_heads_by_rank

__all__ = ["OverlappedUlysses"]


@dataclass(frozen=True, slots=True)
class OverlappedUlysses:
    """ulysses with overlap; `groups` is an upper bound, the KV heads of a rank must divide."""

    transport: Transport
    groups: int = 1
    lean: bool = False
    name: str = "ulysses"

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """As ulysses."""
        return Ulysses().sizes(heads, kv_heads)

    def prepare(self, info: SeqInfo, device: torch.device) -> UlyssesPrepared | LocalPrepared:
        """As ulysses."""
        return Ulysses().prepare(info, device)

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
        if isinstance(prepared, LocalPrepared) or sink is not None:
            return Ulysses().attend(
                q, k, v, prepared, scale=scale, kernel=kernel, window=window, sink=sink, saved=saved
            )
        if reason := ulysses_refusal(prepared.group.size, q.shape[1]):
            raise UserError(reason)
        plan = _plan(q, k, v, prepared, self.groups)
        return _Overlapped.apply(q, k, v, plan, self.transport, Work(kernel, scale, window), saved, self.lean)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Shapes of one exchange."""

    prepared: UlyssesPrepared
    group: CPGroup
    groups: int  # G
    slots: tuple[int, ...]  # KV head in each KV slot, rank after rank
    tokens: int  # T/N
    q_heads: int  # of one group
    kv_heads: int
    dim: int
    v_dim: int

    @property
    def widths(self) -> list[int]:
        """Columns of q, k and v in a row of C."""
        return [self.q_heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.v_dim]

    def part(self, x: Tensor, g: int) -> Tensor:
        """[T/N, N * G * h, D] -> [N, T/N, h, D]: the heads of group g, rank by rank. A view."""
        return x.unflatten(1, (self.group.size, self.groups, -1))[:, :, g].movedim(1, 0)

    def order_in(self, x: Tensor) -> Tensor:
        """Rank order -> order of the inner attention."""
        return x if self.prepared.to_order is None else x.index_select(0, self.prepared.to_order)

    def order_out(self, x: Tensor) -> Tensor:
        """And back."""
        return x if self.prepared.from_order is None else x.index_select(0, self.prepared.from_order)


def _plan(q: Tensor, k: Tensor, v: Tensor, prepared: UlyssesPrepared, most: int) -> Plan:
    size = prepared.group.size
    slots = kv_heads_by_rank(q.shape[1], k.shape[1], size)
    kv_heads = len(slots) // size
    groups = max(g for g in range(1, most + 1) if kv_heads % g == 0)
    return Plan(
        prepared=prepared,
        group=prepared.group,
        groups=groups,
        slots=slots,
        tokens=q.shape[0],
        q_heads=q.shape[1] // size // groups,
        kv_heads=kv_heads // groups,
        dim=q.shape[2],
        v_dim=v.shape[2],
    )


def _send_qkv(plan: Plan, transport: Transport, parts: tuple[Tensor, Tensor, Tensor]) -> Arrival:
    """q, k, v (or their gradients) [N, T/N, h, D] each, in one travel."""

    def fill(out: Tensor) -> None:
        for columns, part in zip(out.split(plan.widths, -1), parts, strict=True):
            copy_rows(columns.unflatten(-1, part.shape[2:]), part)

    shape = (plan.group.size, plan.tokens, sum(plan.widths))
    return transport.exchange(shape, parts[0], fill, plan.group)


def _send_out(plan: Plan, transport: Transport, part: Tensor) -> Arrival:
    """out or its gradient [N, T/N, h, Dv]."""
    shape = (plan.group.size, plan.tokens, plan.q_heads * plan.v_dim)
    return transport.exchange(shape, part, lambda out: copy_rows(out.unflatten(-1, part.shape[2:]), part), plan.group)


def _split(plan: Plan, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., C] -> q, k, v [..., h, D], views."""
    q, k, v = rows.split(plan.widths, -1)
    return (
        q.unflatten(-1, (plan.q_heads, plan.dim)),
        k.unflatten(-1, (plan.kv_heads, plan.dim)),
        v.unflatten(-1, (plan.kv_heads, plan.v_dim)),
    )


def _by_rank(plan: Plan, x: Tensor) -> Tensor:
    """[T, h, D] in rank order -> [N, T/N, h, D]."""
    return x.unflatten(0, (plan.group.size, plan.tokens))


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        transport: Transport,
        work: Work,
        saved: Saved | None,
        lean: bool,
    ) -> Tensor:
        dealt_k, dealt_v = (_deal(x, plan.slots) for x in (k, v))
        coming = [
            _send_qkv(plan, transport, (plan.part(q, g), plan.part(dealt_k, g), plan.part(dealt_v, g)))
            for g in range(plan.groups)
        ]
        kept = saved.take() if saved is not None else None
        inputs, outs, lses, leaving = [], [], [], []
        for g, arrival in enumerate(coming):
            rows = plan.order_in(arrival.wait()[0].flatten(0, 1))  # [T, C]
            inputs.append(rows)
            if kept is None:
                out, lse = _attend(plan, rows, work)
            elif lean:
                lses.append(kept[1][g])
                continue
            else:
                out, lse = kept[0][g], kept[1][g]
            leaving.append(_send_out(plan, transport, _by_rank(plan, plan.order_out(out))))
            outs.append(out)
            lses.append(lse)
        result = kept[0] if kept is not None and lean else q.new_empty(plan.tokens, q.shape[1], plan.v_dim)
        for g, arrival in enumerate(leaving):
            copy_rows(plan.part(result, g), arrival.wait()[0].unflatten(-1, (plan.q_heads, plan.v_dim)))
        if saved is not None and kept is None:
            saved.put(result.detach() if lean else torch.stack(outs).detach(), torch.stack(lses))
        ctx.save_for_backward(*inputs, *lses, *([result] if lean else outs))
        ctx.plan, ctx.transport, ctx.work, ctx.shapes = plan, transport, work, (q.shape, k.shape, v.shape)
        ctx.lean = lean
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, transport = ctx.plan, ctx.transport
        groups, kept = plan.groups, ctx.saved_tensors
        inputs, lses, outs = kept[:groups], kept[groups : 2 * groups], kept[2 * groups :]
        coming = [_send_out(plan, transport, plan.part(grads[0], g)) for g in range(groups)]
        if ctx.lean:
            travelling = [_send_out(plan, transport, plan.part(outs[0], g)) for g in range(groups)]
            outs = [_arrived_out(plan, arrival) for arrival in travelling]
        leaving = []
        for g, arrival in enumerate(coming):
            parts = _attend_backward(plan, _arrived_out(plan, arrival), inputs[g], outs[g], lses[g], ctx.work)
            dq, dk, dv = (_by_rank(plan, plan.order_out(x)) for x in parts)
            leaving.append(_send_qkv(plan, transport, (dq, dk, dv)))
        dealt = (plan.group.size * plan.groups * plan.kv_heads, plan.dim)
        dq = grads[0].new_empty(ctx.shapes[0])
        dk, dv = grads[0].new_empty(plan.tokens, *dealt), grads[0].new_empty(plan.tokens, dealt[0], plan.v_dim)
        for g, arrival in enumerate(leaving):
            for total, part in zip((dq, dk, dv), _split(plan, arrival.wait()[0]), strict=True):
                copy_rows(plan.part(total, g), part)
        dk, dv = _collect(dk, plan.slots, ctx.shapes[1][1]), _collect(dv, plan.slots, ctx.shapes[2][1])
        return dq, dk, dv, None, None, None, None, None


def _arrived_out(plan: Plan, arrival: Arrival) -> Tensor:
    """out or its gradient of this rank's heads in one group: [T, h, Dv], in the order of the inner attention."""
    return plan.order_in(arrival.wait()[0].flatten(0, 1)).unflatten(-1, (plan.q_heads, plan.v_dim))


def _attend(plan: Plan, rows: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    q, k, v = _split(plan, rows)
    inner = plan.prepared.inner
    out, lse = inner.forward(q, k, v, work)
    return out.to(q.dtype), lse


def _attend_backward(
    plan: Plan, dout: Tensor, rows: Tensor, out: Tensor, lse: Tensor, work: Work
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _split(plan, rows)
    return plan.prepared.inner.backward(dout, q, k, v, out, lse, work)
