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
    TokenOut,
    chunk_loss,
    evaluate,
    evaluate_one_pass,
    head_outputs,
)
from longspan.objective.head_loss import head_loss

__all__ = ["WEIGHT", "Forward", "Train"]

WEIGHT = "weight/"  # stream name of a term's weights: weight/<term>


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
    trains: ClassVar[bool] = True

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        objective, streams = self.objective, step.shard.fields
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32  # of log-probs
        fields = Fields.from_streams({name: streams[name] for name in self.fields}, dtype)
        weights = {term.name: streams[WEIGHT + term.name] for term in objective.token_terms}
        info = step.context.info
        segments = Segments(step.segment, len(info.cu_seqlens) - 1, streams["needed"], info.group)
        asked = head_arguments(head, step, entropy=objective.needs_entropy, topk=objective.needs_topk)
        if objective.one_pass:  # the loss and its gradients formed inside the head: a matmul less
            formed = head_loss(hidden, head.weight, loss=chunk_loss(objective, fields, weights), **asked)
            out = TokenOut(formed.logprob, formed.entropy, segments, value, formed.topk_logprob)
            loss = evaluate_one_pass(objective, formed, out, fields=fields, weights=weights, stats=self.stats)
        else:
            made = head_outputs(hidden, head.weight, **asked)
            out = TokenOut(made.logprob, made.entropy, segments, value, made.topk_logprob)
            loss = evaluate(objective, out, fields=fields, weights=weights, stats=self.stats)
        if objective.mtp:
            weight = streams[WEIGHT + "mtp"]
            loss = loss + draft_loss(hidden, head, step, weight=weight, coefficient=objective.mtp, stats=self.stats)
        return loss + self._router_losses(step) if objective.moe_aux or objective.moe_z else loss

    def found(self) -> object:
        return self.stats.state()

    def adopt(self, found: object) -> None:
        self.stats.adopt(found)

    def _router_losses(self, step: MicroStep) -> Tensor:
        """[] sum over samples of (summed token weight) * auxiliary loss of the sample; the weight stream repeats that sum."""
        parts = router_terms(step.context.moe, info=step.context.info, lengths=step.shard.lengths)
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
    trains: ClassVar[bool] = False

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        made = head_outputs(hidden, head.weight, **head_arguments(head, step, entropy="entropy" in self.outputs))
        found = {"logprob": made.logprob, "entropy": made.entropy, "value": value}
        if "routed_experts" in self.outputs:
            found["routed_experts"] = step.context.moe.recorded().movedim(-1, 0)  # [layers, k, T] -> [T, layers, k]
        for name in self.outputs:
            values = found[name]
            assert values is not None, f"{name} was checked in Engine.forward"
            self.buffer.put(name, values, step.shard.fields["token"])
        return torch.zeros((), device=hidden.device)

    def found(self) -> object:
        return self.buffer.flat

    def adopt(self, found: object) -> None:
        assert isinstance(found, dict)
        self.buffer.flat = found
