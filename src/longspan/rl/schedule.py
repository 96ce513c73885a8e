"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore.

factor(step) rises linearly from 1/warmup_steps to 1 over the first `warmup_steps` steps, then follows `kind` down to
`floor` at the last step: constant (stays 1), linear, or cosine (half a period). The learning rate of a step is the
optimizer's lr times the factor.
"""

import math
from dataclasses import dataclass
from typing import Literal

from longspan.errors import UserError
from longspan.typed import typed

__all__ = ["Schedule"]


@typed
@dataclass(frozen=True, slots=True)
class Schedule:
    """kind: shape after the warm-up. warmup_steps: optimizer steps of the ramp. floor: last factor, a share of the
    peak."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.floor <= 1:
            raise UserError(
                f"schedule warmup_steps={self.warmup_steps} must be at least 0 and floor={self.floor} within 0..1"
            )

    def factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rate at optimizer step `step` of `steps`, counted from 0."""
        ramp = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        done = min(1.0, max(0.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps)))
        match self.kind:
            case "constant":
                shape = 1.0
            case "linear":
                shape = 1.0 - (1.0 - self.floor) * done
            case "cosine":
                shape = self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))
        return ramp * shape
