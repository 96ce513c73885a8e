"""One token from logits, by inverse distribution function: the token whose slice of [0, 1) holds the given uniform
number.

The uniform number of a token depends on (seed, stream, prompt number, sample number, position) alone: the same
weights give the same rollouts on any number of ranks and in any order, and logits that differ by rounding give the
same token unless a slice's edge lies between: about one token in a million in fp32. Distribution and log-prob are
fp64 from the model's logits.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["draw", "uniforms"]


def uniforms(seed: int, stream: int, prompt: int, samples: int, tokens: int) -> Tensor:
    """[samples, tokens] f64 in [0, 1) for one prompt; a longer row starts with the shorter one's numbers."""
    rows = [np.random.default_rng([seed, stream, prompt, number]).random(tokens) for number in range(samples)]
    return torch.from_numpy(np.stack(rows))


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probs [B] f64 from logits [B, V]; temperature 0 takes the largest logit (log-prob at
    1)."""
    logprobs = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        edges = logprobs.exp().cumsum(-1)
        total = edges[:, -1:].contiguous()
        last = torch.searchsorted(edges, total)[
            :, 0
        ]  # of the tokens with any probability, where rounding reaches total
        wanted = uniform.to(logits.device)[:, None] * total
        tokens = torch.minimum(torch.searchsorted(edges, wanted, right=True)[:, 0], last)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
