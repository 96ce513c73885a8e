"""The loss of a multi-token-prediction head: sum over its steps of weight * -log p, in the model's own output layer.

Targets, masks and weights are streams [k, T] that were shifted per sample before packing (models/mtp.py); weights are
divided by the number of steps there. So this only sums. The output layer's weights come detached unless the head is
joint.
"""

import torch
from torch import Tensor

from longspan.engine.backend import Head, MicroStep
from longspan.objective import Stats, head_outputs

__all__ = ["draft_loss"]


def draft_loss(
    hidden: Tensor, head: Head, step: MicroStep, *, weight: Tensor, coefficient: float, stats: Stats
) -> Tensor:
    """[] hidden [T_local, E]; weight [k, T_local], the term's weight stream."""
    assert head.drafts is not None and head.draft_weight is not None and step.drafted is not None, "engine checks"
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for number, states in enumerate(head.drafts(hidden)):
        logprob = head_outputs(
            states,
            head.draft_weight,
            step.shard.fields["mtp_targets"][number],
            needed=step.drafted[number],
            bias=head.bias if head.bias is None or head.draft_weight.requires_grad else head.bias.detach(),
            softcap=head.softcap,
        ).logprob
        weighted = weight[number] * -logprob
        stats.term("mtp", weighted, coefficient)
        total = total + weighted.sum()
    return total * coefficient
