"""The LM head without the [T, V] matrix: log-prob of the target, entropy and top-k log-probs, chunk by chunk.

hidden [T, E], weight [V, E] -> [T] results. Forward and backward hold one chunk of logits at a time; backward forms
the logits again (4 matmuls in all; head_loss.py needs 3 where the loss is token-wise). Only tokens with needed=True
are computed: the others get 0 and cost nothing, and their targets may be anything. Logits are logits / temperature,
per token, after bias and soft cap (softcap * tanh(logits / softcap), Gemma). Gradients use the real upstream gradient
of every token.

Precision: fp64 in fp64; logits, statistics and dW accumulation in fp32 for fp32, bf16 and fp16 (on CUDA by mm's
out_dtype; fp32 logits cost 9 % and give 850 times less error than bf16 ones, GPU.md). dlogits are rounded to bf16 for
their two matmuls on CUDA, as in a plain bf16 head. Not done here: the loss, reductions over tokens,
vocabulary-parallel heads.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.errors import UserError
from longspan.objective.chunks import HeadInputs, HeadMatmul, kernels_for, plan_chunks
from longspan.objective.head_rows import RowGrads, RowStats, row_stats_buffers

__all__ = ["HeadOut", "head_outputs"]


@dataclass(frozen=True, slots=True, eq=False)
class HeadOut:
    """Per-token results, f32 (f64 in f64); 0 at tokens that are not needed."""

    logprob: Tensor  # [T], <= 0
    entropy: Tensor | None  # [T], >= 0
    topk_logprob: Tensor | None = None  # [T, K] at teacher_ids, or at topk_ids
    topk_ids: Tensor | None = None  # [T, K] int64, the model's own top k (topk=K)


def head_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    needed: Tensor | None = None,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    teacher_ids: Tensor | None = None,
    topk: int | None = None,
    chunk: int | str = "auto",
) -> HeadOut:
    """hidden [T, E], weight [V, E], targets [T] -> HeadOut.

    needed: [T] bool (None: all). Give it on the CPU to spare CUDA a host sync. temperature: [T] above 0. bias: [V].
    teacher_ids: [T, K] int64, below 0 where absent (log-prob 0 there). topk: the model's own k best ids and their
    log-probs.
    chunk: rows of logits at a time, or "auto" (chunks.py's byte budget).
    """
    if teacher_ids is not None and topk is not None:
        raise UserError(
            f"head_outputs got teacher_ids and topk={topk}: log-probs at given ids, or at the model's own best. Give "
            "one."
        )
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
    if topk is not None and not 1 <= topk <= weight.shape[0]:
        raise UserError(f"topk={topk} must be between 1 and the vocabulary's {weight.shape[0]}.")
    results = cast(tuple[Tensor, ...], _Head.apply(hidden, weight, bias, inputs, topk))
    logprob, ent, topk_logprob, topk_ids = (inputs.spread(x) for x in results)
    if teacher_ids is None and topk is None:
        topk_logprob = None
    elif teacher_ids is not None:
        topk_logprob = torch.where(teacher_ids >= 0, topk_logprob, 0.0)
    return HeadOut(logprob, ent if entropy else None, topk_logprob, topk_ids if topk is not None else None)


class _Head(torch.autograd.Function):
    """Computed rows only: [N] results for the N needed tokens, in token order."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: HeadInputs, topk: int | None
    ) -> tuple[Tensor, ...]:
        matmul = HeadMatmul(hidden, weight, bias)
        rows = inputs.rows
        width = topk if topk is not None else None if inputs.topk_ids is None else inputs.topk_ids.shape[1]
        stats = row_stats_buffers(rows, width, matmul.like)
        best = torch.zeros(rows, topk or 0, dtype=torch.int64, device=hidden.device)
        kernels = kernels_for(hidden)
        buffer = matmul.buffer(inputs.chunk_rows)
        for part in plan_chunks(rows, inputs.chunk_rows):
            z = matmul.logits(inputs.take(hidden, part), buffer)
            asked = inputs.row_inputs(part, matmul.like)
            if topk is not None:
                best[part] = z.topk(topk, dim=1).indices  # soft cap and temperature keep the order
                asked = inputs.row_inputs(part, matmul.like, topk_ids=best[part])
            kernels.row_stats(z, asked, stats.take(part))
        ctx.save_for_backward(hidden, weight, bias, stats.logprob, stats.entropy, stats.shift, stats.log_sum, best)
        ctx.inputs, ctx.topk = inputs, topk
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(best)
        topk_logprob = stats.topk_logprob if stats.topk_logprob is not None else matmul.like.new_zeros(rows, 0)
        return stats.logprob, stats.entropy, topk_logprob, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, logprob, entropy, shift, log_sum, best = ctx.saved_tensors
        inputs: HeadInputs = ctx.inputs
        wants = ctx.needs_input_grad
        if all(grad is None for grad in upstream[:3]) or not any(wants[:3]):
            return None, None, None, None, None
        stats = RowStats(logprob, entropy, shift, log_sum, None)
        g_logprob, g_entropy, g_topk = (None if x is None else x.contiguous() for x in upstream[:3])
        grads = RowGrads(g_logprob, g_entropy, g_topk)
        matmul = HeadMatmul(hidden, weight, bias)
        sink = matmul.gradients(hidden=wants[0], weight=wants[1], bias=wants[2])
        kernels = kernels_for(hidden)
        buffer = matmul.buffer(inputs.chunk_rows)
        for part in plan_chunks(inputs.rows, inputs.chunk_rows):
            h = inputs.take(hidden, part)
            z = matmul.logits(h, buffer)
            asked = inputs.row_inputs(part, matmul.like, topk_ids=best[part] if ctx.topk is not None else None)
            d = sink.space(z)
            kernels.logits_gradient(z, asked, stats.take(part), grads=grads.take(part), out=d)
            sink.add(d, h, inputs.where(part))
        return (*sink.finish(), None, None)
