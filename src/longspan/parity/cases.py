"""Cases: which loss, with which settings and normalisation, a parity check runs. The engine gets `objective()`, the
oracle `terms()`.

Settings carry the names of `Objective`'s keywords. Every main loss stands alone once, every extra term once, and one
case has all of them together, so that a term that is wrong alone cannot hide in a sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from longspan.objective import Objective
from longspan.parity import formulas

ROUTER_TERMS = ("moe_aux", "moe_z")
EXTRAS = ("kl", "entropy", "value")  # settings that are coefficients of token terms beside the main loss


@dataclass(frozen=True, slots=True)
class Case:
    """One objective under one normalisation."""

    name: str
    loss: str
    settings: Mapping[str, object] = field(default_factory=dict)
    normalise: str = "token"

    denominator: float | None = None

    @property
    def uses_value(self) -> bool:
        return self.loss == "value" or "value" in self.settings

    @property
    def uses_teacher(self) -> bool:
        """A second model stands beside the first."""
        return self.loss == "distill_full"

    @property
    def over_batch(self) -> bool:
        """The routers' terms are formed over all samples at once."""
        return self.settings.get("moe_over") == "batch"

    def objective(self) -> Objective:
        return Objective(self.loss, **self.settings)

    def terms(self) -> list[tuple[str, float, Callable[[formulas.Tokens, formulas.Settings], Tensor]]]:
        """(name, coefficient, formula) of every per-token term, the main one first."""
        main = (self.loss, 1.0, formulas.LOSSES[self.loss])
        extra = [
            (name, float(self.settings[name]), formulas.EXTRA_TERMS[name]) for name in EXTRAS if name in self.settings
        ]
        return [main, *extra]

    def draft_terms(self) -> list[tuple[str, float]]:
        """(name, coefficient) of the loss of a multi-token-prediction head."""
        return [("mtp", float(self.settings["mtp"]))] if "mtp" in self.settings else []

    def router_terms(self) -> list[tuple[str, float]]:
        """(name, coefficient) of the terms that routers make, one number a sample or, over_batch, one in all."""
        return [(name, float(self.settings[name])) for name in ROUTER_TERMS if name in self.settings]


PPO = {"clip": 0.2, "clip_high": 0.25, "dual_clip": 3.0}
LOSSES = (
    Case("cross_entropy", "cross_entropy"),
    Case("importance_sampling", "importance_sampling"),
    Case("ppo", "ppo", PPO),
    Case("cispo", "cispo", {"clip": 0.2}),
    Case("dro", "dro", {"beta": 0.1}),
    Case("gspo", "gspo", {"clip": 0.2}),
    Case("reinforce", "reinforce"),
    Case("distill_topk", "distill_topk"),
)
TEACHER = (
    Case("distill_full", "distill_full"),
    Case("distill_reverse", "distill_full", {"direction": "reverse"}, "sample"),
)
VALUE = (Case("value", "value"), Case("value_clip", "value", {"value_clip": 0.2}))
TERMS = (
    Case("kl_k1", "reinforce", {"kl": 1.0, "kl_estimator": "k1"}),
    Case("kl_k2", "reinforce", {"kl": 1.0, "kl_estimator": "k2"}),
    Case("kl_k3", "reinforce", {"kl": 1.0, "kl_estimator": "k3"}),
    Case("entropy", "reinforce", {"entropy": 1.0}),
)
RULES = (
    Case("ppo_sample", "ppo", PPO, "sample"),
    Case("ppo_sample_sum", "ppo", PPO, "sample_sum"),
    Case("ppo_constant", "ppo", PPO, "constant", 37.0),
    Case("ppo_sum", "ppo", PPO, "sum"),
)
ALL = {"kl": 0.1, "entropy": 0.01}
STEP_CASE = Case("steps", "ppo", {**PPO, **ALL}, "sample")
# bf16: a token that rounding takes across a clip's edge moves the gradient's norm by a fifth, and the steps after it go elsewhere
SMOOTH_STEP_CASE = Case("steps", "importance_sampling", ALL, "sample")


def default_cases(*, value_head: bool, moe: bool = False, mtp: bool = False, teacher: bool = False) -> tuple[Case, ...]:
    """Every loss alone, every extra term, every rule, and all terms together."""
    routers = (
        Case("moe_aux", "reinforce", {"moe_aux": 1.0}),
        Case("moe_z", "reinforce", {"moe_z": 1.0}, "sample"),
        Case("moe_batch", "reinforce", {"moe_aux": 1.0, "moe_z": 0.1, "moe_over": "batch"}, "sample"),
    )
    together = {**PPO, **ALL, **({"value": 0.5, "value_clip": 0.2} if value_head else {})}
    values = VALUE if value_head else ()
    drafts = (Case("mtp", "cross_entropy", {"mtp": 0.7}), Case("mtp_sample", "ppo", {**PPO, "mtp": 0.3}, "sample"))
    extra = (*TERMS, *(routers if moe else ()), *(drafts if mtp else ()))
    return (
        *LOSSES,
        *(TEACHER if teacher else ()),
        *values,
        *extra,
        *RULES,
        Case("together", "ppo", together, "sample"),
    )
