"""What a parity check finds: cells (one figure of one check of one layout) and the limits they are held to.

Limits are DESIGN.md's table. A cell names where its worst figure stands: "sample 2, position 17" or a parameter's name.

bf16 is held to a ratio of errors, and errors move by chance between two runs of the same arithmetic. Its figures are taken down by what four
standard deviations of such a ratio add (`CHANCE`), so that 1.2 is left for the layout:
    gradients   a root mean square of n errors moves by 1/sqrt(2n), a ratio of two by 1/sqrt(n): error / (1 + 4 / sqrt(n))
    log-probs   as a root mean square over all tokens; and the largest of n, whose standard deviation is 1.28 / (2 ln n) of itself
                (Gumbel): largest / (1 + 4 * sqrt(2) * 1.28 / (2 ln n))
A norm is one number; its error is at most the gradient's. Steps have a loss without an edge (cases.SMOOTH_STEP_CASE). Several calls and
one are each within 1.2 times the error of the unsharded engine, so within twice that of each other.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest figure that passes, by check."""

    logprob: float  # absolute, any token
    gradient: float  # relative L2, any parameter
    metric: float  # absolute for metrics below 1, else relative
    weights: float  # relative L2 of any parameter after the optimizer steps
    calls: float  # relative L2, several calls against one
    leak: float  # 0: not one bit
    # a reference gradient below this share of the global norm counts as zero: its error is taken against that norm
    zero: float
    chance: float = 0.0  # standard deviations that a figure may move by chance: of figures that are held to a ratio


LIMITS = {
    "float64": Limits(logprob=1e-8, gradient=1e-8, metric=1e-8, weights=1e-8, calls=1e-12, leak=0.0, zero=1e-10),
    "float32": Limits(logprob=1e-5, gradient=1e-5, metric=1e-5, weights=1e-5, calls=1e-5, leak=0.0, zero=1e-4),
}
CHANCE = 4.0
LIMITS["bfloat16"] = replace(LIMITS["float32"], chance=CHANCE)  # its limits are replaced by ratios
BFLOAT16_FACTOR = 1.2  # bf16: as far from the fp32 oracle as unsharded bf16 is, times this
MOE_LEAK = 1e-12  # experts see their tokens grouped by expert, so sums over tokens may round differently


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure. `limit` is what it must not exceed."""

    layout: str
    check: str  # logprob, gradient, metrics, weights, calls, leak, ranks, start, run
    case: str
    figure: float
    limit: float
    where: str = ""

    @property
    def passed(self) -> bool:
        return not math.isnan(self.figure) and self.figure <= self.limit

    def as_json(self) -> dict[str, object]:
        return {
            "layout": self.layout,
            "check": self.check,
            "case": self.case,
            "figure": self.figure if math.isfinite(self.figure) else str(self.figure),
            "limit": self.limit,
            "where": self.where,
            "passed": self.passed,
        }


def worst(cells: list[Cell], *checks: str) -> Cell | None:
    """The cell closest to (or farthest over) its limit among the named checks; NaN counts as worst."""
    found = [cell for cell in cells if cell.check in checks]
    return max(found, key=_badness, default=None)


def _badness(cell: Cell) -> tuple[float, float]:
    figure = math.inf if math.isnan(cell.figure) else cell.figure
    return (figure / cell.limit if cell.limit else (math.inf if figure else 0.0), figure)
