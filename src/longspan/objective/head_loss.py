"""Token-wise losses formed inside the head: loss and gradients in one pass over the chunks, 3 matmuls instead of 4.

For each chunk of needed tokens: logits -> log-prob, entropy -> weighted token losses by a callable, under an autograd
graph on [C] tensors only -> dlogits -> dhidden, dW, db. Backward multiplies these by the upstream gradient of the sum.
Same numbers as head_outputs followed by the same losses; the log-probs come back too, without gradient. Only for losses
whose token reads no other token (Objective.one_pass): gspo goes through head_outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.errors import UserError
from longspan.objective.chunks import GradientSink, HeadInputs, HeadMatmul, kernels_for, plan_chunks
from longspan.objective.head_rows import RowGrads, RowStats, row_stats_buffers
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


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    inputs: HeadInputs
    loss: ChunkLoss
    entropy: bool
    width: int | None  # K


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
    chunk: int | str = "auto",
) -> HeadLoss:
    """hidden [T, E], weight [V, E] -> sum of loss over the needed tokens. Arguments as in head_outputs."""
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
    )
    asked = _Asked(inputs, loss, entropy, None if teacher_ids is None else teacher_ids.shape[1])
    total, logprob, ent, topk = cast(tuple[Tensor, ...], _HeadLoss.apply(hidden, weight, bias, asked))
    logprob, ent, topk = (inputs.spread(x) for x in (logprob, ent, topk))
    if teacher_ids is not None:
        topk = torch.where(teacher_ids >= 0, topk, 0.0)
    return HeadLoss(total, logprob, ent if entropy else None, None if teacher_ids is None else topk)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> tuple[Tensor, ...]:
        inputs, wants = asked.inputs, ctx.needs_input_grad
        matmul = HeadMatmul(hidden, weight, bias)
        sink = matmul.gradients(hidden=wants[0], weight=wants[1], bias=wants[2]) if any(wants[:3]) else None
        stats = row_stats_buffers(inputs.rows, asked.width, matmul.like)
        kernels, buffer = kernels_for(hidden), matmul.buffer(inputs.chunk_rows)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in plan_chunks(inputs.rows, inputs.chunk_rows):
            h = inputs.take(hidden, part)
            z = matmul.logits(h, buffer)
            rows, own = inputs.row_inputs(part, matmul.like), stats.take(part)
            kernels.row_stats(z, rows, own)
            loss, grads = _chunk_loss(asked, own, part)
            total += loss
            if sink is not None and grads is not None:
                d = sink.space(z)
                kernels.logits_gradient(z, rows, own, grads=grads, out=d)
                sink.add(d, h, inputs.where(part))
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        topk = stats.topk_logprob if stats.topk_logprob is not None else matmul.like.new_zeros(inputs.rows, 0)
        ctx.mark_non_differentiable(stats.logprob, stats.entropy, topk)
        return total, stats.logprob, stats.entropy, topk

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


def _chunk_loss(asked: _Asked, stats: RowStats, part: slice) -> tuple[Tensor, RowGrads | None]:
    """Sum of the chunk's losses, and its gradients with respect to the head's results; None: it does not depend on
    them."""
    where = asked.inputs.where(part)
    leaves = [stats.logprob, stats.entropy if asked.entropy else None, stats.topk_logprob]
    with torch.enable_grad():
        logprob, entropy, topk = (None if x is None else x.detach().requires_grad_() for x in leaves)
        assert logprob is not None
        seen = topk
        if topk is not None and asked.inputs.topk_ids is not None:
            seen = torch.where(asked.inputs.take(asked.inputs.topk_ids, part) >= 0, topk, 0.0)
        losses = asked.loss(TokenOut(logprob, entropy, topk_logprob=seen), where)
        total = losses.double().sum()
    given = [x for x in (logprob, entropy, topk) if x is not None]
    if not total.requires_grad:
        return total.detach(), None
    found = iter(torch.autograd.grad(total, given, allow_unused=True))
    grads = [None if x is None else next(found) for x in (logprob, entropy, topk)]
    g_logprob, g_entropy, g_topk = (None if g is None else g.contiguous() for g in grads)
    return total.detach(), RowGrads(g_logprob, g_entropy, g_topk)
