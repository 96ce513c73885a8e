"""The oracle's own losses and normalisation, written from the formulas, one sample at a time. Imports nothing of
objective/.

Every loss maps the [L] tensors of one sample to a [L] tensor; the batch loss is sum over samples and tokens of weight
* loss. Notation: logp, old, ref, A, H, V are the sample's log-probs, old log-probs, reference log-probs, advantages,
entropies, values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the model says of one sample: everything a formula may read."""

    logprob: Tensor  # [L] log-prob of the target under the tempered distribution
    entropy: Tensor  # [L]
    log_softmax: Tensor  # [L, V]
    mask: Tensor  # [L] 0/1
    value: Tensor | None  # [L] value head, where the case has a value term
    fields: Mapping[str, Tensor]  # [L, ...]
    teacher: Tensor | None = None  # [L, V] a second model's log-softmax at the same temperatures


Settings = Mapping[str, object]


def cross_entropy(t: Tokens, s: Settings) -> Tensor:
    return -t.logprob


def reinforce(t: Tokens, s: Settings) -> Tensor:
    return -t.fields["advantage"] * t.logprob


def importance_sampling(t: Tokens, s: Settings) -> Tensor:
    return -torch.exp(t.logprob - t.fields["old_logprob"]) * t.fields["advantage"]


def clip_bounds(s: Settings) -> tuple[float, float]:
    low = s.get("clip", 0.2)
    high = s.get("clip_high")
    return 1.0 - low, 1.0 + (low if high is None else high)


def ppo(t: Tokens, s: Settings) -> Tensor:
    """-min(r A, clip(r) A); dual clip: where A < 0 no lower than c A, so the loss is at most -c A."""
    advantage = t.fields["advantage"]
    ratio = torch.exp(t.logprob - t.fields["old_logprob"])
    return _clipped(ratio, advantage, s)


def _clipped(ratio: Tensor, advantage: Tensor, s: Settings) -> Tensor:
    low, high = clip_bounds(s)
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if s.get("dual_clip") is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, s["dual_clip"] * advantage), objective)
    return -objective


def cispo(t: Tokens, s: Settings) -> Tensor:
    """-stop(clip(r)) A logp (MiniMax-M1, eq. 4)."""
    low, high = clip_bounds(s)
    ratio = torch.exp(t.logprob - t.fields["old_logprob"]).clamp(low, high).detach()
    return -ratio * t.fields["advantage"] * t.logprob


def dro(t: Tokens, s: Settings) -> Tensor:
    """-(logp A - beta/2 (logp - old)^2)."""
    difference = t.logprob - t.fields["old_logprob"]
    return -(t.logprob * t.fields["advantage"] - 0.5 * s.get("beta", 0.05) * difference**2)


def gspo(t: Tokens, s: Settings) -> Tensor:
    """PPO on the sequence ratio exp(mean over trained tokens of logp - old), token form (GSPO, eq. 11-14)."""
    difference = (t.logprob - t.fields["old_logprob"]) * t.mask
    mean = difference.sum() / t.mask.sum().clamp(min=1)
    ratio = torch.exp(mean.detach() + t.logprob - t.logprob.detach())
    return _clipped(ratio, t.fields["advantage"], s)


def value(t: Tokens, s: Settings) -> Tensor:
    """(V - R)^2 / 2, with PPO's value clip when a bound is set: the worse of V and old + clip(V - old)."""
    assert t.value is not None
    target = t.fields["return"]
    loss = (t.value - target) ** 2
    if s.get("value_clip") is not None:
        old = t.fields["old_value"]
        clipped = old + (t.value - old).clamp(-s["value_clip"], s["value_clip"])
        loss = torch.maximum(loss, (clipped - target) ** 2)
    return 0.5 * loss


def distill_topk(t: Tokens, s: Settings) -> Tensor:
    """Forward KL on the teacher's top k: sum_k p_k (log p_k - logq_k)."""
    teacher = t.fields["teacher_logprob"]
    student = t.log_softmax.gather(1, t.fields["teacher_ids"])
    return (teacher.exp() * (teacher - student)).sum(-1)


def distill_full(t: Tokens, s: Settings) -> Tensor:
    """KL of whole next-token distributions: sum_v q (log q - log p), or in reverse sum_v p (log p - log q)."""
    assert t.teacher is not None
    first, second = (t.log_softmax, t.teacher) if s.get("direction") == "reverse" else (t.teacher, t.log_softmax)
    return (first.exp() * (first - second)).sum(-1)


def kl(t: Tokens, s: Settings) -> Tensor:
    """Schulman's estimators of KL(policy || reference) at a sampled token, d = logp - ref."""
    d = t.logprob - t.fields["ref_logprob"]
    return {"k1": d, "k2": 0.5 * d * d, "k3": torch.exp(-d) + d - 1.0}[s.get("kl_estimator", "k3")]


def entropy(t: Tokens, s: Settings) -> Tensor:
    return -t.entropy


LOSSES: dict[str, Callable[[Tokens, Settings], Tensor]] = {
    "cross_entropy": cross_entropy,
    "reinforce": reinforce,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "value": value,
    "distill_topk": distill_topk,
    "distill_full": distill_full,
}
EXTRA_TERMS = {"kl": kl, "entropy": entropy, "value": value}


def term_mask(t: Mapping[str, Tensor], mask: Tensor, term: str) -> Tensor:
    """A sample's own mask for a term (field "<term>_mask"), else its mask."""
    return t.get(f"{term}_mask", mask).double()


def token_weights(masks: Sequence[Tensor], rule: str, denominator: float | None = None) -> list[Tensor]:
    """One weight per token of each sample, from the rule's definition over the whole batch.

    token: 1 / trained tokens. sample: 1 / (own trained tokens * samples that train).
    sample_sum: 1 / samples that train. constant: 1 / denominator. sum: 1. A denominator stands for the batch's count.
    """
    tokens = sum(float(mask.sum()) for mask in masks)
    samples = sum(1 for mask in masks if mask.sum() > 0)
    weights = []
    for mask in masks:
        own = float(mask.sum())
        if own == 0:
            weights.append(torch.zeros(mask.shape, dtype=torch.float64))
        elif rule == "token":
            weights.append(mask.double() / (denominator or tokens))
        elif rule == "sample":
            weights.append(mask.double() / own / (denominator or samples))
        elif rule == "sample_sum":
            weights.append(mask.double() / (denominator or samples))
        elif rule == "constant":
            assert denominator is not None
            weights.append(mask.double() / denominator)
        else:
            assert rule == "sum" and denominator is None, rule
            weights.append(mask.double())
    return weights


def metrics(seen: Sequence[tuple[Tokens, Tensor]], loss: str, settings: Settings) -> dict[str, float]:
    """The engine's documented metrics of one call, over all tokens at once. seen: each sample with its main term's
    weights.
    """
    trained = [weight > 0 for _, weight in seen]
    weight = torch.cat([w[m] for (_, w), m in zip(seen, trained, strict=True)]).double()

    def gather(name: str) -> Tensor:
        columns = [
            (t.fields[name] if name in t.fields else {"logprob": t.logprob, "entropy": t.entropy}[name])
            for t, _ in seen
        ]
        return torch.cat([column.detach()[m] for column, m in zip(columns, trained, strict=True)]).double()

    def mean(x: Tensor, w: Tensor = weight) -> float:
        return float((w * x).sum() / w.sum()) if float(w.sum()) else 0.0

    logprob = gather("logprob")
    out = {
        "tok/trained": float(len(weight)),
        "tok/weight_sum": float(weight.sum()),
        "logprob/mean": mean(logprob),
        "entropy/mean": mean(gather("entropy")),
    }
    if all("old_logprob" in t.fields for t, _ in seen):
        gap = gather("old_logprob") - logprob
        ones = torch.ones_like(gap)
        out |= {
            "kl/old_mean": mean(gap),
            "ratio/mean": mean(torch.exp(-gap)),
            "ratio/max": float(torch.exp(-gap).max()) if len(gap) else 0.0,
            "logprob/gap_mean": mean(gap.abs(), ones),
            "logprob/gap_max": float(gap.abs().max()) if len(gap) else 0.0,
            "logprob/gap_share_0.5": mean((gap.abs() > 0.5).double(), ones),
        }
        ordered = gap.abs().sort().values
        for label, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            out[f"logprob/gap_{label}"] = float(ordered[math.ceil(share * len(gap)) - 1]) if len(gap) else 0.0
    if loss in CLIPPED:
        shares = [CLIPPED[loss](t, settings)[m].double() for (t, _), m in zip(seen, trained, strict=True)]
        out["ratio/clip_share"] = mean(torch.cat(shares))
    return out


def _ppo_clipped(t: Tokens, s: Settings) -> Tensor:
    low, high = clip_bounds(s)
    ratio, advantage = torch.exp(t.logprob.detach() - t.fields["old_logprob"]), t.fields["advantage"]
    held = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return held if s.get("dual_clip") is None else held | ((advantage < 0) & (ratio > s["dual_clip"]))


def _cispo_clipped(t: Tokens, s: Settings) -> Tensor:
    low, high = clip_bounds(s)
    ratio = torch.exp(t.logprob.detach() - t.fields["old_logprob"])
    return (ratio < low) | (ratio > high)


def _gspo_clipped(t: Tokens, s: Settings) -> Tensor:
    low, high = clip_bounds(s)
    difference = (t.logprob.detach() - t.fields["old_logprob"]) * t.mask
    ratio, advantage = torch.exp(difference.sum() / t.mask.sum().clamp(min=1)), t.fields["advantage"]
    return ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))


# Which tokens a loss's clip stops: what ratio/clip_share counts.
CLIPPED = {"ppo": _ppo_clipped, "cispo": _cispo_clipped, "gspo": _gspo_clipped}
