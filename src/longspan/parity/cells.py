"""What a parity check finds: cells (one figure of one check of one layout) and the limits they are held to.

Limits are DESIGN.md's table. A cell names where its worst figure stands: "sample 2, position 17" or a parameter's name.

bf16 is held to a ratio of errors, so to figures of which a ratio can be taken. The root mean square of n rounding errors moves by
1/sqrt(2n) between two runs of the same arithmetic, a ratio of two by 1/sqrt(n): log-probs are compared by the root mean square over tokens,
not by the largest of them, and gradients of parameters with at least 1,024 elements (3 %; smaller ones are fp32's and fp64's to
check). Several calls against one: a micro-step's gradient is rounded to bf16 (2^-9) before it is added in fp32. Four parts, each
at most about three times as large as their sum, and the one call's own rounding: sqrt(4 * 9 + 1) * 2^-9 = 1.2e-2.
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
    spread: bool = False  # log-probs: the root mean square over tokens, not the largest
    least: int = 1  # elements of the smallest parameter that is looked at


LIMITS = {
    "float64": Limits(logprob=1e-8, gradient=1e-8, metric=1e-8, weights=1e-8, calls=1e-12, leak=0.0, zero=1e-10),
    "float32": Limits(logprob=1e-5, gradient=1e-5, metric=1e-5, weights=1e-5, calls=1e-5, leak=0.0, zero=1e-4),
}
LIMITS["bfloat16"] = replace(LIMITS["float32"], calls=1.2e-2, spread=True, least=1024)  # the others become ratios
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
