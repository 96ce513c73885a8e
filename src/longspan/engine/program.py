"""The two programs: Train turns hidden states into a weighted sum and its metrics, Forward into outputs per token.

Laws 5 and 7 meet here: losses are [T] tensors, multiplied by their weight streams and summed. Nothing divides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longspan.engine.backend import Head, MicroStep
from longspan.engine.outputs import TokenBuffer
from longspan.models.moe import router_terms
from longspan.objective import Fields, HeadOut, Objective, Segments, Stats, TokenOut, evaluate, head_outputs

__all__ = ["WEIGHT", "Forward", "Train"]

WEIGHT = "weight/"  # stream name of a term's weights: weight/<term>


def head_of(hidden: Tensor, head: Head, step: MicroStep, *, entropy: bool, topk: bool = False) -> HeadOut:
    """Head outputs of this rank's tokens, each [T_local]; tokens that are not needed cost nothing."""
    fields = step.shard.fields
    return head_outputs(
        hidden,
        head.weight,
        fields["target_ids"],
        needed=step.needed,
        temperature=fields["temperature"],
        bias=head.bias,
        softcap=head.softcap,
        entropy=entropy,
        teacher_ids=fields["teacher_ids"].movedim(-1, 0) if topk else None,
    )


@dataclass(frozen=True, slots=True)
class Train:
    """sum over terms of coefficient * sum(weight * loss), its metrics going to `stats`."""

    objective: Objective
    stats: Stats
    fields: Sequence[str]  # streams that the losses read
    trains: ClassVar[bool] = True

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        objective, streams = self.objective, step.shard.fields
        made = head_of(hidden, head, step, entropy=objective.needs_entropy, topk=objective.needs_topk)
        segments = Segments(step.segment, len(step.context.info.cu_seqlens) - 1, streams["needed"], step.context.info.group)
        out = TokenOut(made.logprob, made.entropy, segments, value, made.topk_logprob)
        fields = Fields.from_streams({name: streams[name] for name in self.fields}, made.logprob.dtype)
        weights = {term.name: streams[WEIGHT + term.name] for term in objective.token_terms}
        loss = evaluate(objective, out, fields=fields, weights=weights, stats=self.stats)
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
        made = head_of(hidden, head, step, entropy="entropy" in self.outputs)
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
