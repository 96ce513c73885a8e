"""How far the sampler's log-probs stand from the trainer's: the first number to look at when a run goes wrong.

The gap is |sampler - trainer| of every trained token under the same weights. With an exact pair it is rounding (about
1e-6 in fp32); a template, position or weight-sync error shows as a heavy tail long before the reward does. Plain
numbers on the CPU over all tokens of the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.errors import UserError

__all__ = ["logprob_gap"]


def logprob_gap(sampler: Sequence[Tensor], trainer: Sequence[Tensor], masks: Sequence[Tensor]) -> dict[str, float]:
    """gap/mean, p99, p99.9, max and share>0.5 over the tokens with mask 1; each list holds one [L] tensor a sample."""
    pairs = zip(sampler, trainer, masks, strict=True)
    gaps = torch.cat([(ours.double() - theirs.double()).abs()[mask > 0] for ours, theirs, mask in pairs])
    if len(gaps) == 0:
        raise UserError("the log-prob gap needs at least one trained token, got 0 in this batch")
    ordered = gaps.sort().values
    return {
        "gap/mean": float(gaps.mean()),
        "gap/p99": float(ordered[_rank(0.99, len(gaps))]),
        "gap/p99.9": float(ordered[_rank(0.999, len(gaps))]),
        "gap/max": float(ordered[-1]),
        "gap/share>0.5": float((gaps > 0.5).double().mean()),
    }


def _rank(share: float, count: int) -> int:
    """Index of the smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return min(count - 1, max(0, -int(-share * count // 1) - 1))
