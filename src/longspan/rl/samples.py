"""Rollouts to training samples. The mask comes from recorded lengths, never from ids: a pad, an end or a placeholder
id inside a response is a plain token that the policy chose. Only sampled tokens are trained on; a response cut at the
limit gets no end token.

The shift is made here, once, on the whole trajectory: with prompt p[0..P) and response r[0..R), input = (p + r)[:-1],
target = (p + r)[1:], and the mask is 1 on the R positions whose target is a response token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.data import Sample
from longspan.errors import UserError
from longspan.rl.task import Prompt, Rollout
from longspan.typed import typed

__all__ = ["answer_sample", "on_response", "rollout_sample", "with_field"]


@typed
def rollout_sample(prompt: Prompt, rollout: Rollout, *, advantage: float, temperature: float, group: str) -> Sample:
    """The sample of one rollout, with its advantage, the sampler's log-probs as old_logprob, and the temperature if
    not 1."""
    count = len(rollout.ids)
    fields = {
        "advantage": on_response(prompt, torch.full((count,), advantage, dtype=torch.float64)),
        "old_logprob": on_response(prompt, torch.tensor(rollout.logprobs, dtype=torch.float64)),
    }
    if temperature != 1.0:
        fields["temperature"] = torch.full((len(prompt.input_ids) + count - 1,), temperature, dtype=torch.float64)
    return _sample(prompt, rollout.ids, fields, group)


@typed
def answer_sample(prompt: Prompt) -> Sample:
    """The supervised sample of a prompt with its right answer."""
    if not prompt.answer:
        raise UserError(f"prompt {prompt.id!r} has no answer to train on. Give Prompt(answer=...) with its end token")
    return _sample(prompt, prompt.answer, {}, prompt.id)


def on_response(prompt: Prompt, values: Tensor) -> Tensor:
    """[R] numbers of the response placed on the sample's [P + R - 1] positions, 0 elsewhere."""
    return torch.cat([values.new_zeros(len(prompt.input_ids) - 1), values])


def with_field(sample: Sample, name: str, values: Tensor) -> Sample:
    """A copy of the sample with one more field (or another value of it)."""
    fields = {**sample.fields, name: values}
    return Sample(
        sample.input_ids,
        sample.target_ids,
        sample.mask,
        fields=fields,
        media=sample.media,
        group=sample.group,
        adapter=sample.adapter,
    )


def _sample(prompt: Prompt, response: Sequence[int], fields: dict[str, Tensor], group: str) -> Sample:
    ids = torch.tensor([*prompt.input_ids, *response], dtype=torch.int64)
    mask = on_response(prompt, torch.ones(len(response)))
    return Sample(ids[:-1], ids[1:], mask, fields=fields, media=prompt.media, group=group)
