"""One weight per token: the only division of the engine (law `normalise_once`).

The rule is applied once on the CPU, over the whole batch, before anything is packed or cut. From here on there are
only sums. With m = the term's 0/1 mask, L_s = its trained tokens in sample s:

    "token"        m / sum of L_s
    "sample"       m / L_s / number of samples with a trained token     (mean over samples of the per-sample mean)
    "sample_sum"   m / number of samples with a trained token           (mean over samples of the per-sample sum)
    "constant"     m / denominator
    "sum"          m

A denominator given by the caller replaces the count (total tokens, or samples), so that k calls add up to one call.
Nothing trained: every weight is 0, and no 0/0 arises. A sample without a trained token weighs 0 and is not counted.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.objective.losses import is_finite
from longspan.objective.objective import Objective

__all__ = ["NORMALISE", "Denominator", "over_batch", "over_samples", "term_masks", "token_weights"]

NORMALISE = ("token", "sample", "sample_sum", "constant", "sum")
Denominator = float | Mapping[str, float] | None


def token_weights(
    samples: Sequence[Sample],
    objective: Objective,
    normalise: str = "token",
    *,
    denominator: Denominator = None,
    by_adapter: bool = False,
) -> dict[str, list[Tensor]]:
    """Term name -> one [L] fp64 CPU tensor a sample.

    denominator: a number for every term, or a dict by term name that names every term.
    by_adapter: the samples of each LoRA adapter are normalised alone, as if each adapter had its own call.
    """
    _check_rule(normalise, denominator)
    denominators = _denominators(objective, denominator)
    if not samples:
        return {term: [] for term in denominators}
    parts = _parts(samples) if by_adapter else [list(range(len(samples)))]
    weights: dict[str, list[Tensor]] = {}
    made: dict[tuple[str, float | None], list[Tensor]] = {}  # by mask and denominator: terms of one kind share theirs
    for term, own in denominators.items():
        masked = any(f"{term}_mask" in sample.fields for sample in samples)
        key = (term if masked else "", own)
        if key not in made:
            masks = term_masks(samples, term)
            found: list[Tensor] = [torch.empty(0)] * len(samples)
            for part in parts:
                for number, weight in zip(part, _rule([masks[n] for n in part], normalise, own), strict=True):
                    found[number] = weight
            made[key] = found
        weights[term] = made[key]
    return weights


def over_samples(weights: Sequence[Tensor]) -> list[Tensor]:
    """A term that is one number a sample: every token carries the sum of its sample's weights, [L] each."""
    return [values.sum().expand(len(values)) for values in weights]


def over_batch(weights: Sequence[Tensor]) -> list[Tensor]:
    """A term that is one number for the batch, as a mean over tokens: every token of a sample that weighs carries
    W L_s / n, with W the sum of all weights and n the tokens of those samples. (The parts divide by their sample's
    L_s.)"""
    counted = [len(values) if bool(values.any()) else 0 for values in weights]
    each = sum(float(values.sum()) for values in weights) / max(sum(counted), 1)
    return [torch.full_like(values, each * length) for values, length in zip(weights, counted, strict=True)]


def term_masks(samples: Sequence[Sample], term: str) -> list[Tensor]:
    """The term's 0/1 masks, [L] fp64 each: the field "<term>_mask" where a sample has it, else the sample's mask."""
    name = f"{term}_mask"
    masks = [sample.fields.get(name, sample.mask) for sample in samples]
    whole = torch.cat([mask.double().flatten() for mask in masks])
    if not _zero_or_one(whole) or any(mask.dim() != 1 for mask in masks):
        number = next(n for n, mask in enumerate(masks) if mask.dim() != 1 or not _zero_or_one(mask))
        raise UserError(
            f"sample {number}: field {name!r} of shape {list(masks[number].shape)} must be [L] of 0 and 1; it says which "
            "tokens the "
            f"term {term!r} trains. Scale a term by its coefficient, and tokens by their advantage."
        )
    return list(whole.split([len(sample) for sample in samples]))


def _zero_or_one(mask: Tensor) -> bool:
    return not bool(((mask != 0) & (mask != 1)).any())


def _rule(masks: list[Tensor], normalise: str, denominator: float | None) -> list[Tensor]:
    """The rule over masks that are normalised together."""
    if normalise == "sum":
        return masks
    sizes, whole = [len(mask) for mask in masks], torch.cat(masks)
    lengths = torch.from_numpy(np.add.reduceat(whole.numpy(), np.cumsum([0, *sizes[:-1]])))  # exact: sums of ones
    if denominator is None:
        denominator = float(lengths.sum() if normalise == "token" else (lengths > 0).sum())
    if normalise == "sample":
        whole = whole / lengths.clamp(min=1.0).repeat_interleave(torch.tensor(sizes))
    return list((whole / max(denominator, _TINY)).split(sizes))


_LEAST = 1e-30  # of a caller's denominator: weights of 1e30 still fit fp32
_TINY = 1e-300  # 0 / tiny is 0: a batch without a trained token has all weights 0


def _parts(samples: Sequence[Sample]) -> list[list[int]]:
    """Sample numbers by adapter, in order of first appearance."""
    parts: dict[str | None, list[int]] = {}
    for number, sample in enumerate(samples):
        parts.setdefault(sample.adapter, []).append(number)
    return list(parts.values())


def _check_rule(normalise: str, denominator: Denominator) -> None:
    if normalise not in NORMALISE:
        raise UserError(f"normalise={normalise!r} is not a rule. Use one of {', '.join(map(repr, NORMALISE))}.")
    if normalise == "constant" and denominator is None:
        raise UserError(
            "normalise='constant' divides by a number of yours: give denominator=, a number or a dict by term."
        )
    if normalise == "sum" and denominator is not None:
        raise UserError(
            f"normalise='sum' divides by nothing, but denominator={denominator!r} was given. Use normalise='constant'."
        )


def _denominators(objective: Objective, denominator: Denominator) -> dict[str, float | None]:
    """One denominator a term; None: count it."""
    names = [term.name for term in objective.terms]
    if denominator is None:
        return dict.fromkeys(names)
    if not isinstance(denominator, Mapping):
        return dict.fromkeys(names, _number("denominator", denominator))
    if set(denominator) != set(names):
        raise UserError(
            f"denominator= names the terms {sorted(denominator)}, but the objective has {sorted(names)}. Name each "
            "term once: a "
            "term left to its own count would weigh differently in each call."
        )
    return {name: _number(f"denominator[{name!r}]", denominator[name]) for name in names}


def _number(name: str, value: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and is_finite(value) and value >= _LEAST):
        raise UserError(
            f"{name}={value!r} must be a finite number above 0, {_LEAST} or more: the tokens (or samples) of the whole "
            "step."
        )
    return float(value)
