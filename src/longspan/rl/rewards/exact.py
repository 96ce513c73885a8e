"""Exact match on token ids: right is right to the last token, the end token included."""

from collections.abc import Sequence

from longspan.typed import typed

__all__ = ["exact_match"]


@typed
def exact_match(response: Sequence[int], answer: Sequence[int]) -> float:
    """1.0 when the sampled ids are the answer's ids, end token included; a response cut before its end token is
    wrong."""
    return float(tuple(response) == tuple(answer))
