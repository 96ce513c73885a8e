"""The losses. Each maps [T] tensors to a [T] tensor (law 7) and knows no rank, packing, micro-step or denominator.

`loss(out: TokenOut, fields: Fields, options) -> [T]`; lower is better. Masks are not seen here: objective/evaluate.py
gives every loss inputs that are 0 outside its mask and multiplies the result by the term's weights, so a penalty that
is not zero at advantage 0 (dro) stays out of masked tokens.

Sources: cross_entropy, importance_sampling, ppo, cispo, dro follow Tinker (tinker-docs.thinkingmachines.ai/losses) with
`logprobs` named `old_logprob`; dual clip: Ye et al. 2019 (arXiv:1912.09729) eq. 5; cispo: MiniMax-M1
(arXiv:2506.13585) eq. 4;
gspo: Zheng et al. 2025 (arXiv:2507.18071) eq. 7, 13, 14; KL estimators: J. Schulman, "Approximating KL divergence",
2020;
value clip: PPO2 (openai/baselines). Does not do: group advantages (rl/), routers' auxiliary losses and MTP (models/).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.objective.teacher import DIRECTIONS
from longspan.objective.tokens import Fields, TokenOut

__all__ = [
    "CISPO",
    "DRO",
    "GSPO",
    "KL_ESTIMATORS",
    "LOSSES",
    "PPO",
    "DistillFull",
    "DistillTopK",
    "Loss",
    "NoOptions",
    "Options",
    "Value",
    "cispo",
    "cross_entropy",
    "distill_full",
    "distill_topk",
    "dro",
    "entropy_bonus",
    "gspo",
    "importance_sampling",
    "is_finite",
    "kl_loss",
    "ppo",
    "reinforce",
    "value_loss",
]


def is_finite(number: object) -> bool:
    """Whether it is a number at all, and a finite one."""
    try:
        return math.isfinite(number)  # pyright: ignore[reportArgumentType]  (that is the question)
    except (TypeError, OverflowError):
        return False


def _positive(loss: str, option: str, number: float | None) -> None:
    if number is not None and not (is_finite(number) and number > 0):
        raise UserError(
            f"loss {loss!r}: {option}={number!r} must be a finite number above 0. Give for example {option}=0.2."
        )


# Options ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoOptions:
    """A loss without settings."""


@dataclass(frozen=True, slots=True)
class PPO:
    """The ratio is clipped to [1 - clip, 1 + clip_high]."""

    clip: float = 0.2  # below 1
    clip_high: float | None = None  # above 1; None: the same as clip
    dual_clip: float | None = None  # c > 1: where advantage < 0 the loss is at most -c * advantage; None: off

    def __post_init__(self) -> None:
        _positive("ppo", "clip", self.clip)
        _positive("ppo", "clip_high", self.clip_high)
        if self.dual_clip is not None and not (is_finite(self.dual_clip) and self.dual_clip > 1):
            raise UserError(
                f"loss 'ppo': dual_clip={self.dual_clip!r} must be a number above 1. Give dual_clip=3.0, or None for "
                "off."
            )


@dataclass(frozen=True, slots=True)
class CISPO:
    """The stopped ratio is clipped to [1 - clip, 1 + clip_high]; clip=1 is no lower bound."""

    clip: float = 0.2
    clip_high: float | None = None  # None: the same as clip

    def __post_init__(self) -> None:
        _positive("cispo", "clip", self.clip)
        _positive("cispo", "clip_high", self.clip_high)


@dataclass(frozen=True, slots=True)
class GSPO:
    """The sequence ratio is clipped to [1 - clip, 1 + clip_high]. The paper ran 3e-4 and 4e-4."""

    clip: float = 3e-4
    clip_high: float | None = None  # None: the same as clip

    def __post_init__(self) -> None:
        _positive("gspo", "clip", self.clip)
        _positive("gspo", "clip_high", self.clip_high)


@dataclass(frozen=True, slots=True)
class DRO:
    """Strength of the quadratic penalty on logprob - old_logprob."""

    beta: float = 0.05

    def __post_init__(self) -> None:
        _positive("dro", "beta", self.beta)


@dataclass(frozen=True, slots=True)
class Value:
    """clip: the value moves at most this far from old_value before the squared error stops falling; None: off."""

    clip: float | None = None

    def __post_init__(self) -> None:
        _positive("value", "clip", self.clip)


@dataclass(frozen=True, slots=True)
class DistillTopK:
    """topk: how many columns of teacher_ids and teacher_logprob are used, from the first; None: all."""

    topk: int | None = None

    def __post_init__(self) -> None:
        if self.topk is not None and not (isinstance(self.topk, int) and self.topk > 0):
            raise UserError(
                f"loss 'distill_topk': topk={self.topk!r} must be a whole number above 0, or None for all columns."
            )


@dataclass(frozen=True, slots=True)
class DistillFull:
    """direction: "forward" is KL(teacher || student), "reverse" KL(student || teacher)."""

    direction: str = "forward"

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise UserError(
                f"loss 'distill_full': direction={self.direction!r} is unknown. Use 'forward', KL(teacher || student), "
                "or 'reverse'."
            )


Options = NoOptions | PPO | CISPO | GSPO | DRO | Value | DistillTopK | DistillFull


# Ratio losses -----------------------------------------------------------------------------------------------


def cross_entropy(out: TokenOut, fields: Fields, options: NoOptions) -> Tensor:
    """-logprob (Tinker: -sum(weights * logprobs))."""
    return -out.logprob


def reinforce(out: TokenOut, fields: Fields, options: NoOptions) -> Tensor:
    """-advantage * logprob: the policy gradient without a ratio."""
    return -fields["advantage"] * out.logprob


def importance_sampling(out: TokenOut, fields: Fields, options: NoOptions) -> Tensor:
    """-exp(logprob - old_logprob) * advantage (Tinker). Unclipped."""
    return -torch.exp(out.logprob - fields["old_logprob"]) * fields["advantage"]


def _outside(log_ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """Tokens where min(r A, clip(r) A) takes the clipped side strictly: their gradient is zero.  -> [T] bool"""
    ratio = torch.exp(log_ratio.detach())
    return ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))


def _clipped_surrogate(log_ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, low, high) A). The clipped side is chosen before exp: 0 * inf never enters the gradient."""
    outside = _outside(log_ratio, advantage, low=low, high=high) | (advantage == 0)
    bound = torch.where(
        advantage > 0, torch.full_like(advantage, high), torch.full_like(advantage, low)
    )  # two floats would give fp32
    ratio = torch.exp(torch.where(outside, 0.0, log_ratio))
    return -torch.where(outside, bound * advantage, ratio * advantage)


def _bounds(options: PPO | CISPO | GSPO) -> tuple[float, float]:
    return 1.0 - options.clip, 1.0 + (options.clip if options.clip_high is None else options.clip_high)


def _over_dual(log_ratio: Tensor, advantage: Tensor, dual_clip: float | None) -> Tensor:
    if dual_clip is None:
        return torch.zeros_like(advantage, dtype=torch.bool)
    return (advantage < 0) & (torch.exp(log_ratio.detach()) > dual_clip)


def ppo(out: TokenOut, fields: Fields, options: PPO) -> Tensor:
    """-min(r A, clip(r) A) with r = exp(logprob - old_logprob) (Tinker); where A < 0 at most -dual_clip * A."""
    log_ratio, advantage = out.logprob - fields["old_logprob"], fields["advantage"]
    low, high = _bounds(options)
    if options.dual_clip is None:
        return _clipped_surrogate(log_ratio, advantage, low=low, high=high)
    over = _over_dual(log_ratio, advantage, options.dual_clip)
    surrogate = _clipped_surrogate(torch.where(over, 0.0, log_ratio), advantage, low=low, high=high)
    return torch.where(over, -options.dual_clip * advantage, surrogate)


def ppo_clipped(out: TokenOut, fields: Fields, options: PPO) -> Tensor:
    """Tokens whose gradient the clip (or the dual clip) stops.  -> [T] bool"""
    log_ratio, advantage = out.logprob - fields["old_logprob"], fields["advantage"]
    low, high = _bounds(options)
    return _outside(log_ratio, advantage, low=low, high=high) | _over_dual(log_ratio, advantage, options.dual_clip)


def cispo(out: TokenOut, fields: Fields, options: CISPO) -> Tensor:
    """-stop(clip(r)) * logprob * advantage (Tinker; MiniMax-M1 eq. 4): every token keeps a gradient."""
    low, high = _bounds(options)
    ratio = torch.exp(out.logprob.detach() - fields["old_logprob"]).clamp(low, high)
    return -ratio * out.logprob * fields["advantage"]


def cispo_clipped(out: TokenOut, fields: Fields, options: CISPO) -> Tensor:
    """Tokens whose ratio is held at a bound.  -> [T] bool"""
    low, high = _bounds(options)
    ratio = torch.exp(out.logprob.detach() - fields["old_logprob"])
    return (ratio < low) | (ratio > high)


def dro(out: TokenOut, fields: Fields, options: DRO) -> Tensor:
    """-(logprob * advantage - beta / 2 * (logprob - old_logprob)^2) (Tinker)."""
    difference = out.logprob - fields["old_logprob"]
    return -(out.logprob * fields["advantage"] - 0.5 * options.beta * difference.square())


def _sequence_log_ratio(out: TokenOut, fields: Fields) -> Tensor:
    """Mean over the sample's trained tokens of logprob - old_logprob, at every token, without gradient.  -> [T]"""
    segments = out.need_segments("gspo")
    return segments.expand(segments.mean(out.logprob.detach() - fields["old_logprob"]))


def gspo(out: TokenOut, fields: Fields, options: GSPO) -> Tensor:
    """PPO's clip on the sequence ratio s = exp(mean(logprob - old_logprob)), in the paper's token form (eq. 13, 14).

    s_t = stop(s) * p_t / stop(p_t): with one advantage a sample, value and gradient are those of the sequence form
    (eq. 5) under any rule of token_weights; with advantages per token only this form is defined. Needs no collective
    in backward.
    """
    low, high = _bounds(options)
    log_ratio = _sequence_log_ratio(out, fields) + out.logprob - out.logprob.detach()
    return _clipped_surrogate(log_ratio, fields["advantage"], low=low, high=high)


def gspo_clipped(out: TokenOut, fields: Fields, options: GSPO) -> Tensor:
    """Tokens of samples whose sequence ratio is clipped.  -> [T] bool"""
    low, high = _bounds(options)
    return _outside(_sequence_log_ratio(out, fields), fields["advantage"], low=low, high=high)


# Values and teachers ----------------------------------------------------------------------------------------


def value_loss(out: TokenOut, fields: Fields, options: Value) -> Tensor:
    """(V - return)^2 / 2; with a clip the larger of it and the same of old_value + clip(V - old_value)."""
    value, target = out.need_value("value"), fields["return"]
    loss = (value - target).square()
    if options.clip is None:
        return 0.5 * loss
    old = fields["old_value"]
    held = (old + (value - old).clamp(-options.clip, options.clip) - target).square()
    return 0.5 * torch.maximum(loss, held)


def distill_topk(out: TokenOut, fields: Fields, options: DistillTopK) -> Tensor:
    """Forward KL on the teacher's top k: sum_k q_k (log q_k - log p_k). Entries with teacher_ids < 0 are absent."""
    student, teacher = out.need_topk("distill_topk"), fields["teacher_logprob"]  # [T, K]
    present = fields["teacher_ids"] >= 0
    if options.topk is not None:
        student, teacher, present = (x[:, : options.topk] for x in (student, teacher, present))
    teacher = torch.where(present, teacher, 0.0)
    return torch.where(present, torch.exp(teacher) * (teacher - student), 0.0).sum(-1)


def distill_full(out: TokenOut, fields: Fields, options: DistillFull) -> Tensor:
    """KL between the student's and a teacher's whole distributions, formed in the head (objective/teacher.py)."""
    return out.need_teacher_kl("distill_full")


# Terms beside the main loss ---------------------------------------------------------------------------------


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    return torch.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_loss(out: TokenOut, fields: Fields, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) at the sampled token, d = logprob - ref_logprob, differentiated as it stands.

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d. The gradient of k1 has expectation 0 on-policy: it measures, it does not
    hold.
    """
    return KL_ESTIMATORS[estimator](out.logprob - fields["ref_logprob"])


def entropy_bonus(out: TokenOut, fields: Fields) -> Tensor:
    """-entropy: a positive coefficient raises the entropy."""
    return -out.need_entropy("entropy")


# The table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """One named loss: its function, its settings and what it reads."""

    fn: Callable[..., Tensor]  # (out, fields, options) -> [T]
    options: type[Options]
    fields: tuple[str, ...]  # sample fields it reads
    clipped: Callable[..., Tensor] | None = None  # (out, fields, options) -> [T] bool: what ratio/clip_share counts
    token_wise: bool = True  # False: a token's loss reads other tokens (segments), so the one-pass head cannot form it
    uses: tuple[str, ...] = ("logprob",)  # what it reads of TokenOut


RATIO = ("advantage", "old_logprob")
TEACHER = ("teacher_ids", "teacher_logprob")

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, NoOptions, ()),
    "importance_sampling": Loss(importance_sampling, NoOptions, RATIO),
    "ppo": Loss(ppo, PPO, RATIO, clipped=ppo_clipped),
    "cispo": Loss(cispo, CISPO, RATIO, clipped=cispo_clipped),
    "dro": Loss(dro, DRO, RATIO),
    "gspo": Loss(gspo, GSPO, RATIO, clipped=gspo_clipped, token_wise=False),
    "reinforce": Loss(reinforce, NoOptions, ("advantage",)),
    "value": Loss(value_loss, Value, ("return",), uses=("value",)),
    "distill_topk": Loss(distill_topk, DistillTopK, TEACHER, uses=("topk_logprob",)),
    "distill_full": Loss(distill_full, DistillFull, (), uses=("teacher_kl",)),
}
