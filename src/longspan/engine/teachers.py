"""A teacher: a second engine whose last hidden states and output layer stand beside the student's, micro-step by
micro-step.

The teacher runs the student's plan, so its tokens lie where the student's do; its mixer, media and experts are its own.
It sees ids and media only: fields, recorded routes and adapter names are the student's. Both sides meet in
objective/teacher.py, one chunk of logits at a time. Nothing of the teacher is differentiated; its output layer stays
gathered from its forward to the end of the student's backward, which forms the chunks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from longspan.data import Plan, Sample
from longspan.engine.backend import MicroStep
from longspan.engine.batch import Batch, make_batch
from longspan.engine.steps import Keep
from longspan.errors import UserError
from longspan.objective import TeacherHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from longspan.engine.engine import Engine

__all__ = ["check_teacher", "with_teacher"]


def check_teacher(student: Engine, teacher: Engine) -> None:
    """Raises UserError where the teacher cannot stand beside the student."""
    if teacher is student:
        raise UserError("teacher= is the engine itself, so every KL is 0. Build a second engine")
    for name, engine in (("student", student), ("teacher", teacher)):
        if engine.config.backend != "fsdp":
            raise UserError(f"the {name} has backend={engine.config.backend!r}: a teacher needs backend='fsdp' on both")
    if teacher.adapter.vocab_size != student.adapter.vocab_size:
        raise UserError(
            f"the teacher {teacher.config.model} has a vocabulary of {teacher.adapter.vocab_size} ids, the student "
            f"{student.config.model} of {student.adapter.vocab_size}. Full distillation needs one vocabulary; use "
            "'distill_topk' with ids of the student's"
        )
    if teacher.dtype != student.dtype:
        raise UserError(
            f"the teacher has dtype={teacher.config.dtype!r}, the student {student.config.dtype!r}: log-probs would be "
            f"{teacher.dtype} and {student.dtype}. Give both float64, or neither"
        )
    ours, theirs = student.mesh.layout, teacher.mesh.layout
    for axis, mine, other in (
        ("dp", ours.dp, theirs.dp),
        ("cp", ours.cp, theirs.cp),
        ("index", ours.index, theirs.index),
    ):
        if mine != other:
            raise UserError(
                f"the teacher's layout {theirs.name} has {axis}={other!r}, the student's {ours.name} {mine!r}: tokens must "
                f"lie alike. Build the teacher with Layout({axis}={mine!r}); mixer and ep may differ"
            )
    _check_plan(student, teacher)


def _check_plan(student: Engine, teacher: Engine) -> None:
    """The teacher runs the student's plan: its limits must allow what the student's allow."""
    if student.config.dynamic_cp != teacher.config.dynamic_cp:
        raise UserError(
            f"dynamic_cp is {student.config.dynamic_cp} for the student and {teacher.config.dynamic_cp} for the teacher, "
            "which runs the student's plan. Give both the same"
        )
    missing = sorted(set(student.planner.sizes or ()) - set(teacher.planner.sizes or ()))
    if missing:
        raise UserError(
            f"dynamic_cp plans cp sizes {missing}, which the teacher {teacher.config.model} cannot run with "
            f"mixer={teacher.mesh.layout.mixer!r}. Give it mixer='gather' or 'ring'"
        )
    most, least = teacher.config.max_tokens_per_rank, student.config.max_tokens_per_rank
    if most != "auto" and (least == "auto" or most < least):
        raise UserError(
            f"the teacher's max_tokens_per_rank={most} is below the student's {least!r}, whose plan it runs. Give the "
            "teacher 'auto' or at least as much"
        )


def with_teacher(
    steps: Iterable[MicroStep], teacher: Engine, samples: Sequence[Sample], plan: Plan
) -> Iterator[MicroStep]:
    """The student's micro-steps with the teacher's side in them, alive until the next one is asked for. Collective.

    Raises UserError at once, naming the sample, for what the teacher cannot read.
    """
    bare = [Sample(sample.input_ids, sample.target_ids, sample.mask, media=sample.media) for sample in samples]
    routing = teacher.backend.routing
    batch = make_batch(bare, teacher.adapter, weights={}, fields=(), dtype=teacher.dtype, routing=routing)
    return _side_by_side(steps, teacher, batch, plan)


def _side_by_side(steps: Iterable[MicroStep], teacher: Engine, batch: Batch, plan: Plan) -> Iterator[MicroStep]:
    for step, theirs in zip(steps, teacher.builder.steps(batch, plan, Keep()), strict=True):
        assert torch.equal(step.shard.info.index, theirs.shard.info.index), "both sides lay tokens out alike"
        with teacher.backend.opened(theirs) as (hidden, head):
            yield replace(step, teacher=TeacherHead(hidden, head.weight, head.bias, head.softcap))
