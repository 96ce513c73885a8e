"""Token-wise losses formed inside the head: loss and gradients in one pass over the chunks, 3 matmuls instead of 4.

For each chunk of needed tokens: logits -> log-prob, entropy, KL against a teacher -> weighted token losses by a callable, under an autograd
graph on [C] tensors only -> dlogits -> dhidden, dW, db. Backward multiplies these by the upstream gradient of the sum.
Same numbers as head_outputs followed by the same losses; the log-probs come back too, without gradient. Only for losses
whose token reads no other token (Objective.one_pass): gspo goes through head_outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.errors import UserError
from longspan.objective.chunks import GradientSink, HeadInputs, HeadMatmul, kernels_for, plan_chunks
from longspan.objective.head_rows import KLStats, RowGrads, Rows, RowStats, row_stats_buffers
from longspan.objective.teacher import TeacherHead, TeacherSide
from longspan.objective.tokens import TokenOut

__all__ = ["ChunkLoss", "HeadLoss", "head_loss"]

# (TokenOut of C tokens, their token numbers) -> [C] losses, weights and coefficients included
ChunkLoss = Callable[[TokenOut, Tensor | slice], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HeadLoss:
    """The sum, with gradient, and the per-token results behind it, without."""

    total: Tensor  # [] f64
    logprob: Tensor  # [T]
    entropy: Tensor | None  # [T]
    topk_logprob: Tensor | None  # [T, K]
    teacher_kl: Tensor | None  # [T]


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    inputs: HeadInputs
    loss: ChunkLoss
    entropy: bool
    width: int | None  # K
    teacher: TeacherHead | None
    reverse: bool


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss: ChunkLoss,
    *,
    needed: Tensor | None = None,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    teacher_ids: Tensor | None = None,
    teacher: TeacherHead | None = None,
    direction: str = "forward",
    chunk: int | str = "auto",
) -> HeadLoss:
    """hidden [T, E], weight [V, E] -> sum of loss over the needed tokens. Arguments as in head_outputs and head_kl."""
    if teacher is not None:
        teacher.check(hidden, weight, direction)
    inputs = HeadInputs.checked(
        hidden,
        weight,
        targets,
        needed=needed,
        temperature=temperature,
        bias=bias,
        softcap=softcap,
        teacher_ids=teacher_ids,
        chunk=chunk,
        sides=1 if teacher is None else 2,
    )
    width = None if teacher_ids is None else teacher_ids.shape[1]
    asked = _Asked(inputs, loss, entropy, width, teacher, direction == "reverse")
    total, *found = cast(tuple[Tensor, ...], _HeadLoss.apply(hidden, weight, bias, asked))
    logprob, ent, topk, kl = (inputs.spread(x) for x in found)
    if teacher_ids is not None:
        topk = torch.where(teacher_ids >= 0, topk, 0.0)
    return HeadLoss(
        total,
        logprob,
        entropy=ent if entropy else None,
        topk_logprob=None if teacher_ids is None else topk,
        teacher_kl=None if teacher is None else kl,
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> tuple[Tensor, ...]:
        inputs, wants = asked.inputs, ctx.needs_input_grad
        matmul = HeadMatmul(hidden, weight, bias)
        sink = matmul.gradients(hidden=wants[0], weight=wants[1], bias=wants[2]) if any(wants[:3]) else None
        stats = row_stats_buffers(inputs.rows, asked.width, matmul.like)
        kernels, buffer = kernels_for(hidden), matmul.buffer(inputs.chunk_rows)
        side = None if asked.teacher is None else TeacherSide(asked.teacher, inputs)
        kl = KLStats.empty(0 if side is None else inputs.rows, matmul.like)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in plan_chunks(inputs.rows, inputs.chunk_rows):
            h = inputs.take(hidden, part)
            z = matmul.logits(h, buffer)
            rows, own = inputs.row_inputs(part, matmul.like), stats.take(part)
            kernels.row_stats(z, rows, own)
            pair = None if side is None else _Pair(*side.chunk(part, rows), kl.take(part), asked.reverse)
            if pair is not None:
                kernels.kl_stats(z, rows, pair.t, pair.rows, reverse=asked.reverse, into=pair.stats)
            loss, grads = _chunk_loss(asked, own, pair, part=part)
            total += loss
            if sink is not None and grads is not None:
                d = _logits_gradient(kernels, z, rows, stats=own, pair=pair, grads=grads, out=sink.space(z))
                sink.add(d, h, inputs.where(part))
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        topk = stats.topk_logprob if stats.topk_logprob is not None else matmul.like.new_zeros(inputs.rows, 0)
        found = (stats.logprob, stats.entropy, topk, kl.kl if side is not None else torch.zeros_like(stats.logprob))
        ctx.mark_non_differentiable(*found)
        return total, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if upstream[0] is None:
            return None, None, None, None
        sink: GradientSink | None = ctx.sink
        if sink is None:
            raise UserError(
                "head_loss: backward ran twice. The gradients are scaled in place the first time: call it once."
            )
        ctx.sink = None
        sink.scale_(upstream[0])
        return (*sink.finish(), None)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """The teacher's side of a chunk."""

    t: Tensor  # [C, V] raw logits
    rows: Rows
    stats: KLStats
    reverse: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Grads:
    """Of the chunk's losses; None: they do not depend on it."""

    head: RowGrads | None
    kl: Tensor | None  # [C]


def _chunk_loss(asked: _Asked, stats: RowStats, pair: _Pair | None, *, part: slice) -> tuple[Tensor, _Grads | None]:
    """Sum of the chunk's losses, and its gradients with respect to the head's results; None: it does not depend on
    them."""
    where = asked.inputs.where(part)
    leaves = [stats.logprob, stats.entropy if asked.entropy else None, stats.topk_logprob]
    leaves.append(None if pair is None else pair.stats.kl)
    with torch.enable_grad():
        logprob, entropy, topk, kl = (None if x is None else x.detach().requires_grad_() for x in leaves)
        assert logprob is not None
        seen = topk
        if topk is not None and asked.inputs.topk_ids is not None:
            seen = torch.where(asked.inputs.take(asked.inputs.topk_ids, part) >= 0, topk, 0.0)
        losses = asked.loss(TokenOut(logprob, entropy, topk_logprob=seen, teacher_kl=kl), where)
        total = losses.double().sum()
    given = [x for x in (logprob, entropy, topk, kl) if x is not None]
    if not total.requires_grad:
        return total.detach(), None
    found = iter(torch.autograd.grad(total, given, allow_unused=True))
    grads = [None if x is None else next(found) for x in (logprob, entropy, topk, kl)]
    g_logprob, g_entropy, g_topk, g_kl = (None if g is None else g.contiguous() for g in grads)
    of_head = g_kl is None or any(g is not None for g in grads[:3])
    return total.detach(), _Grads(RowGrads(g_logprob, g_entropy, g_topk) if of_head else None, g_kl)


def _logits_gradient(
    kernels: ModuleType, z: Tensor, rows: Rows, *, stats: RowStats, pair: _Pair | None, grads: _Grads, out: Tensor
) -> Tensor:
    """dlogits of raw student logits z [C, V] into out, which may lie over z; both sides' logits are lost."""
    if pair is None or grads.kl is None:
        kernels.logits_gradient(z, rows, stats, grads=grads.head, out=out)
        return out
    asked = {"reverse": pair.reverse, "stats": pair.stats, "upstream": grads.kl}
    if grads.head is None:
        kernels.kl_gradient(z, rows, pair.t, pair.rows, **asked, out=out)
        return out
    kernels.kl_gradient(z, rows, pair.t, pair.rows, **asked, out=pair.t)  # nothing reads the teacher's logits again
    kernels.logits_gradient(z, rows, stats, grads=grads.head, out=z)
    return out.copy_(pair.t.add_(z))  # one rounding, of the sum
