"""KL between a student's and a teacher's whole next-token distributions, chunk by chunk: no [T, V] tensor on either
side.

hidden [T, E], weight [V, E] and teacher_hidden [T, F], teacher_weight [V, F] -> kl [T], with gradient to the student
only. Formulas: head_rows.py.
p and q are both tempered by `temperature`. One chunk of each side's logits at a time, together below one chunk's
budget. `head_kl` forms the chunks again in backward; head_loss.py forms them once, for token-wise losses. The teacher's
hidden states come from a second engine as a stream; this file runs no model.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.errors import UserError
from longspan.objective.chunks import HeadInputs, HeadMatmul, kernels_for, plan_chunks
from longspan.objective.head_rows import KLStats, Rows

__all__ = ["DIRECTIONS", "TeacherHead", "TeacherSide", "head_kl"]

DIRECTIONS = ("forward", "reverse")


@dataclass(frozen=True, slots=True, eq=False)
class TeacherHead:
    """The teacher's side: no gradient goes there."""

    hidden: Tensor  # [T, F]
    weight: Tensor  # [V, F]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None

    def check(self, hidden: Tensor, weight: Tensor, direction: str) -> None:
        """Raises UserError where it does not fit the student's hidden [T, E] and weight [V, E]."""
        if direction not in DIRECTIONS:
            raise UserError(
                f"head_kl: direction={direction!r} is unknown. Use 'forward', KL(teacher || student), or 'reverse'."
            )
        if self.weight.shape[0] != weight.shape[0] or self.hidden.shape[0] != hidden.shape[0]:
            raise UserError(
                f"head_kl: the teacher has {self.weight.shape[0]} ids and {self.hidden.shape[0]} tokens, the student "
                f"{weight.shape[0]} and {hidden.shape[0]}. Both sides need one vocabulary and the same tokens."
            )


class TeacherSide:
    """The teacher's chunks of logits, beside the student's."""

    __slots__ = ("_buffer", "_inputs", "_matmul", "_teacher")

    def __init__(self, teacher: TeacherHead, inputs: HeadInputs) -> None:
        self._teacher, self._inputs = teacher, inputs
        self._matmul = HeadMatmul(teacher.hidden.detach(), teacher.weight.detach(), teacher.bias)
        self._buffer = self._matmul.buffer(inputs.chunk_rows)

    def chunk(self, part: slice, ours: Rows) -> tuple[Tensor, Rows]:
        """Raw logits [C, V], and what its rows are asked for: tempered as the student's."""
        t = self._matmul.logits(self._inputs.take(self._teacher.hidden, part), self._buffer)
        return t, Rows(ours.targets, ours.temperature, self._teacher.softcap, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    inputs: HeadInputs
    teacher: TeacherHead
    reverse: bool


def head_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherHead,
    *,
    needed: Tensor | None = None,
    temperature: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    direction: str = "forward",
    chunk: int | str = "auto",
) -> Tensor:
    """hidden [T, E], weight [V, E] -> KL [T], 0 where not needed. Other arguments as in head_outputs."""
    teacher.check(hidden, weight, direction)
    inputs = HeadInputs.checked(
        hidden,
        weight,
        torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device),
        needed=needed,
        temperature=temperature,
        bias=bias,
        softcap=softcap,
        teacher_ids=None,
        chunk=chunk,
        sides=2,
    )
    asked = _Asked(inputs, teacher, direction == "reverse")
    return inputs.spread(cast(Tensor, _HeadKL.apply(hidden, weight, bias, asked)))


class _HeadKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> Tensor:
        pairs = _Pairs(hidden, weight, bias, asked)
        kernels, stats = kernels_for(hidden), KLStats.empty(asked.inputs.rows, pairs.student.like)
        for part in plan_chunks(asked.inputs.rows, asked.inputs.chunk_rows):
            kernels.kl_stats(*pairs.chunk(part), reverse=asked.reverse, into=stats.take(part))
        ctx.save_for_backward(hidden, weight, bias, stats.kl, stats.shift, stats.log_sum)
        ctx.asked = asked
        return stats.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, *kept = ctx.saved_tensors
        asked: _Asked = ctx.asked
        pairs, stats, wants = _Pairs(hidden, weight, bias, asked), KLStats(*kept), ctx.needs_input_grad
        sink = pairs.student.gradients(hidden=wants[0], weight=wants[1], bias=wants[2])
        kernels, pull = kernels_for(hidden), upstream[0].contiguous()
        for part in plan_chunks(asked.inputs.rows, asked.inputs.chunk_rows):
            z, ours, t, theirs = pairs.chunk(part)
            d = sink.space(z)
            own = stats.take(part)
            kernels.kl_gradient(z, ours, t, theirs, reverse=asked.reverse, stats=own, upstream=pull[part], out=d)
            sink.add(d, asked.inputs.take(hidden, part), asked.inputs.where(part))
        return (*sink.finish(), None)


class _Pairs:
    """Both sides' chunks of logits."""

    __slots__ = ("_buffer", "_hidden", "_inputs", "_teacher", "student")

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked) -> None:
        self._inputs, self._hidden = asked.inputs, hidden
        self.student = HeadMatmul(hidden, weight, bias)
        self._buffer = self.student.buffer(asked.inputs.chunk_rows)
        self._teacher = TeacherSide(asked.teacher, asked.inputs)

    def chunk(self, part: slice) -> tuple[Tensor, Rows, Tensor, Rows]:
        """Raw logits [C, V] of the student and what its rows are asked for, then the teacher's."""
        z = self.student.logits(self._inputs.take(self._hidden, part), self._buffer)
        ours = self._inputs.row_inputs(part, self.student.like)
        return z, ours, *self._teacher.chunk(part, ours)
