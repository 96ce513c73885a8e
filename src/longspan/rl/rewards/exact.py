"""Exact match on token ids: right is right to the last token, the end token included."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from longspan.typed import typed

__all__ = ["exact_match"]

Ids = Tensor | np.ndarray | Sequence[int]  # [L] whole numbers


@typed
def exact_match(response: Ids, answer: Ids) -> float:
    """1.0 when the sampled ids are the answer's ids, end token included; a response cut before its end token is
    wrong."""
    return float(tuple(response) == tuple(answer))
