"""The two programs: Train turns hidden states into a weighted sum and its metrics, Forward into outputs per token.

Laws 5 and 7 meet here: losses are [T] tensors, multiplied by their weight streams and summed. Nothing divides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from longspan.engine.backend import Head, MicroStep
from longspan.engine.drafts import draft_loss
from longspan.engine.outputs import TokenBuffer
from longspan.models.moe import router_terms
from longspan.objective import (
    Fields,
    Objective,
    Segments,
    Stats,
    TeacherHead,
    TokenOut,
    chunk_loss,
    evaluate,
    evaluate_one_pass,
    head_kl,
    head_outputs,
)
from longspan.objective.head_loss import head_loss

__all__ = ["WEIGHT", "Forward", "Train"]

WEIGHT = "weight/"  # stream name of a term's weights: weight/<term>
ROUTES = "routed_experts"  # an output made of parts: every pipeline stage has its own layers'


def head_arguments(head: Head, step: MicroStep, *, entropy: bool, topk: bool = False) -> dict[str, Any]:
    """What the head is asked for at this rank's tokens, [T_local] each; tokens that are not needed cost nothing."""
    fields = step.shard.fields
    return {
        "targets": fields["target_ids"],
        "needed": step.needed,
        "temperature": fields["temperature"],
        "bias": head.bias,
        "softcap": head.softcap,
        "entropy": entropy,
        "teacher_ids": fields["teacher_ids"].movedim(-1, 0) if topk else None,
    }


@dataclass(frozen=True, slots=True)
class Train:
    """sum over terms of coefficient * sum(weight * loss), its metrics going to `stats`."""

    objective: Objective
    stats: Stats
    fields: Sequence[str]  # streams that the losses read
    shares: Tensor | None = None  # [layers, E] of a whole batch's routes, where moe_aux is over the batch
    trains: ClassVar[bool] = True

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        objective, streams = self.objective, step.shard.fields
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32  # of log-probs
        fields = Fields.from_streams({name: streams[name] for name in self.fields}, dtype)
        weights = {term.name: streams[WEIGHT + term.name] for term in objective.token_terms}
        info = step.context.info
        segments = Segments(step.shard.segment, len(info.cu_seqlens) - 1, streams["needed"], info.group)
        asked = head_arguments(head, step, entropy=objective.needs_entropy, topk=objective.needs_topk)
        taught = {"teacher": step.teacher, "direction": objective.teacher_direction}
        if objective.one_pass:  # the loss and its gradients formed inside the head: a matmul less
            formed = head_loss(hidden, head.weight, loss=chunk_loss(objective, fields, weights), **asked, **taught)
            out = TokenOut(formed.logprob, formed.entropy, segments, value, formed.topk_logprob, formed.teacher_kl)
            loss = evaluate_one_pass(objective, formed, out, fields=fields, weights=weights, stats=self.stats)
        else:
            made = head_outputs(hidden, head.weight, **asked)
            kl = None if step.teacher is None else self._teacher_kl(hidden, head, step.teacher, step=step)
            out = TokenOut(made.logprob, made.entropy, segments, value, made.topk_logprob, kl)
            loss = evaluate(objective, out, fields=fields, weights=weights, stats=self.stats)
        if objective.mtp:
            weight = streams[WEIGHT + "mtp"]
            loss = loss + draft_loss(hidden, head, step, weight=weight, coefficient=objective.mtp, stats=self.stats)
        routers = self.aside(step)
        return loss if routers is None else loss + routers

    def found(self) -> object:
        return self.stats.state()

    def aside(self, step: MicroStep) -> Tensor | None:
        state = step.context.moe
        wanted = self.objective.moe_aux or self.objective.moe_z
        return self._router_losses(step) if wanted and state is not None and state.logits else None

    def adopt(self, found: Sequence[object]) -> None:
        self.stats.adopt(found)

    def _teacher_kl(self, hidden: Tensor, head: Head, teacher: TeacherHead, *, step: MicroStep) -> Tensor:
        """[T_local] KL between both sides' whole distributions."""
        return head_kl(
            hidden,
            head.weight,
            teacher,
            needed=step.needed,
            temperature=step.shard.fields["temperature"],
            bias=head.bias,
            softcap=head.softcap,
            direction=self.objective.teacher_direction,
        )

    def _router_losses(self, step: MicroStep) -> Tensor:
        """[] sum over samples of (the term's weight of a sample, at each of its tokens) * auxiliary loss of the sample."""
        context = step.context
        assert context.moe is not None, "the engine keeps router logits for these terms"
        parts = router_terms(context.moe, info=context.info, lengths=step.shard.lengths, shares=self.shares)
        total = torch.zeros((), dtype=torch.float64, device=parts.aux.device)
        for name, coefficient, values in (
            ("moe_aux", self.objective.moe_aux, parts.aux),
            ("moe_z", self.objective.moe_z, parts.z),
        ):
            if coefficient:
                weighted = step.shard.fields[WEIGHT + name] * values
                self.stats.term(name, weighted, coefficient)
                total = total + coefficient * weighted.sum()
        return total


@dataclass(frozen=True, slots=True)
class Forward:
    """Per-token outputs into `buffer`; differentiates nothing."""

    outputs: Sequence[str]
    buffer: TokenBuffer
    topk: int | None = None  # of teacher_ids and teacher_logprob
    trains: ClassVar[bool] = False

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        asked = head_arguments(head, step, entropy="entropy" in self.outputs)
        made = head_outputs(hidden, head.weight, **asked, topk=self.topk)
        found = {"logprob": made.logprob, "entropy": made.entropy, "value": value}
        found |= {"teacher_ids": made.topk_ids, "teacher_logprob": made.topk_logprob}
        self.aside(step)
        for name in (name for name in self.outputs if name != ROUTES):
            values = found[name]
            assert values is not None, f"{name} was checked in Engine.forward"
            self.buffer.put(name, values, step.shard.fields["token"])
        return torch.zeros((), device=hidden.device)

    def aside(self, step: MicroStep) -> Tensor | None:
        """Routes of this stage's routers, under the number of the first one."""
        state = step.context.moe
        if ROUTES in self.outputs and state is not None and state.routes:
            values = state.recorded().movedim(-1, 0)  # [layers, k, T] -> [T, layers, k]
            self.buffer.put_part(ROUTES, min(state.routes), values, step.shard.fields["token"])
        return None

    def found(self) -> object:
        return self.buffer.flat

    def adopt(self, found: Sequence[object]) -> None:
        for flat in found:
            assert isinstance(flat, dict)
            self.buffer.flat |= flat
