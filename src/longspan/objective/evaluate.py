"""From [T] outputs to the weighted sum that backward starts from, and its metrics: sum over terms of c * sum(w * loss).

The one place where losses meet weights. Nothing divides here: weights come from token_weights, ranks add by SUM.
Loss inputs are 0 outside a term's mask (weight 0) and results are dropped there, so masked tokens add exactly 0 to the
loss and to every gradient, whatever stands in them, for every loss and for callables too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.objective.head_loss import ChunkLoss, HeadLoss
from longspan.objective.objective import OUTPUTS, Objective, Term
from longspan.objective.stats import Stats
from longspan.objective.tokens import Fields, TokenOut

__all__ = ["chunk_loss", "evaluate", "evaluate_one_pass", "record", "token_losses", "weighted_sum"]


def token_losses(
    objective: Objective, out: TokenOut, fields: Fields, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Term name -> loss [T], exactly 0 where the term's weight is 0. weights: term name -> [T]."""
    return {term.name: _term_loss(term, out, fields, weights[term.name]) for term in objective.token_terms}


def _term_loss(term: Term, out: TokenOut, fields: Fields, weight: Tensor) -> Tensor:
    assert term.fn is not None, "model terms are evaluated in the model"
    trained = weight != 0
    loss = _called(term, out.where(trained), fields.where(trained))
    if not isinstance(loss, Tensor) or loss.shape != weight.shape:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(
            f"loss {term.name!r} returned {got}; a loss maps [T] tensors to one loss a token, here "
            f"{list(weight.shape)}. Return the "
            f"unreduced losses: no mean(), no sum(), no mask; normalise= does the rest.{_absent(out)}"
        )
    if not loss.is_floating_point():
        raise UserError(f"loss {term.name!r} returned {loss.dtype}; a loss is real: return a float for each token.")
    if not loss.requires_grad and _differentiable(term, out) and bool(trained.any()):
        raise UserError(
            f"loss {term.name!r} does not require a gradient: it would train nothing. Return a function of out's "
            "tensors without detach(), no_grad() or item()."
        )
    return torch.where(trained, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))


def _called(term: Term, out: TokenOut, fields: Fields) -> object:
    """What the loss returns; where it met an output that this call did not compute, the error says so."""
    assert term.fn is not None
    try:
        return term.fn(out, fields)
    except (TypeError, AttributeError) as error:
        absent = _absent(out)
        if not absent or "NoneType" not in str(error):
            raise
        raise UserError(f"loss {term.name!r} failed: {error}.{absent}") from error


def _absent(out: TokenOut) -> str:
    """A sentence on the outputs that are None in this call."""
    names = [name for name in OUTPUTS if getattr(out, name) is None]
    if not names:
        return ""
    head = " with EngineConfig(value_head=True)" if names[0] == "value" else ""
    return (
        f" This call did not compute {', '.join(f'out.{name}' for name in names)}: a callable declares what it reads, "
        f"as in Objective(fn, uses=({names[0]!r},)){head}."
    )


def _differentiable(term: Term, out: TokenOut) -> bool:
    """Something that the term reads has a gradient here. (The second evaluation of a one-pass term has none.)"""
    seen = [getattr(out, use) for use in term.uses]
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in seen)


def weighted_sum(objective: Objective, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """sum over token terms of coefficient * sum(weight * loss), a scalar in the weights' dtype (fp64)."""
    sums = [term.coefficient * (weights[term.name] * losses[term.name]).sum() for term in objective.token_terms]
    return torch.stack(sums).sum()


@torch.no_grad()
def record(
    stats: Stats,
    objective: Objective,
    out: TokenOut,
    *,
    fields: Fields,
    weights: Mapping[str, Tensor],
    losses: Mapping[str, Tensor],
) -> None:
    """Adds this micro-step's metrics. Means use the main term's weights; distributions count its trained tokens."""
    for term in objective.token_terms:
        stats.term(term.name, weights[term.name] * losses[term.name], term.coefficient)
    main = objective.token_terms[0]
    weight = weights[main.name]
    trained = weight != 0
    seen, given = out.where(trained), fields.where(trained)
    stats.sum("tok/trained", trained)
    stats.sum("tok/weight_sum", weight)
    stats.mean("logprob/mean", seen.logprob, weight)
    if seen.entropy is not None:
        stats.mean("entropy/mean", seen.entropy, weight)
    if "old_logprob" in given:
        gap = given["old_logprob"] - seen.logprob
        stats.mean("kl/old_mean", gap, weight)
        stats.mean("ratio/mean", torch.exp(-gap), weight)
        stats.max("ratio/max", torch.exp(-gap), trained)
        stats.distribution("logprob/gap", gap, trained)
        stats.mean("logprob/gap_share_0.5", (gap.abs() > 0.5).double(), trained)
    if main.clipped is not None:
        stats.mean("ratio/clip_share", main.clipped(seen, given).double(), weight)


def evaluate(
    objective: Objective,
    out: TokenOut,
    *,
    fields: Fields,
    weights: Mapping[str, Tensor],
    stats: Stats,
) -> Tensor:
    """One micro-step on one rank: the scalar to call backward on, its metrics added to `stats`."""
    losses = token_losses(objective, out, fields, weights)
    record(stats, objective, out, fields=fields, weights=weights, losses=losses)
    return weighted_sum(objective, losses, weights)


def chunk_loss(objective: Objective, fields: Fields, weights: Mapping[str, Tensor]) -> ChunkLoss:
    """What head_loss calls on each chunk: the terms that the head can form, weights and coefficients included."""
    terms = [term for term in objective.token_terms if term.in_head]

    def of_chunk(out: TokenOut, where: Tensor | slice) -> Tensor:
        given = fields.take(where)
        own = {term.name: weights[term.name][where] for term in terms}
        parts = [term.coefficient * own[term.name] * _term_loss(term, out, given, own[term.name]) for term in terms]
        return torch.stack(parts).sum(0)

    return of_chunk


def evaluate_one_pass(
    objective: Objective,
    formed: HeadLoss,
    out: TokenOut,
    *,
    fields: Fields,
    weights: Mapping[str, Tensor],
    stats: Stats,
) -> Tensor:
    """Like evaluate, where head_loss formed the head's terms already: adds the others (value) and the metrics.

    out: its log-probs are formed.logprob, without gradient.
    """
    losses = token_losses(objective, out, fields, weights)
    record(stats, objective, out, fields=fields, weights=weights, losses=losses)
    rest = [term for term in objective.token_terms if not term.in_head]
    return torch.stack([formed.total, *(t.coefficient * (weights[t.name] * losses[t.name]).sum() for t in rest)]).sum()
