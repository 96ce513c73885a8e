"""How ranks share the sampling: prompts are cut into batches of equal prompt length, batches are dealt to ranks,
rollouts are gathered.

Equal lengths need no padding, so a rollout's log-probs do not depend on its neighbours' lengths. The cut knows no
ranks: the same batches run on 1 rank or on 8, with the same shapes. Every rank ends with the same rollouts, in the
order prompt by prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layout import CPGroup
from longspan.rl.rollout.draw import uniforms
from longspan.rl.task import Prompt, Rollout

__all__ = ["Sampler", "Sampling", "assign", "cut", "sample_shared"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """num: responses a prompt. temperature: 0 is greedy. max_new_tokens: limit of a response, end token included.
    prompts_per_batch: prompts that one forward pass of the sampler holds. seed, stream: choose the random numbers."""

    num: int
    temperature: float
    max_new_tokens: int
    prompts_per_batch: int
    seed: int
    stream: int


class Sampler(Protocol):
    """Samples on this rank's device alone: no collective inside."""

    def sample(self, prompts: Sequence[Prompt], uniform: Tensor, sampling: Sampling) -> list[list[Rollout]]:
        """`sampling.num` rollouts of each prompt; uniform [prompts, num, max_new_tokens]; prompts have one length."""
        ...


def cut(lengths: Sequence[int], prompts_per_batch: int) -> list[list[int]]:
    """Positions of the prompts of each batch: one length a batch, at most `prompts_per_batch` prompts."""
    by_length: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        by_length.setdefault(length, []).append(position)
    batches = []
    for length in sorted(by_length):
        members = by_length[length]
        batches += [members[start : start + prompts_per_batch] for start in range(0, len(members), prompts_per_batch)]
    return batches


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Batches of each rank: the costliest first, each to the rank with the least so far."""
    loads, shares = [0.0] * ranks, [[] for _ in range(ranks)]
    for batch in sorted(range(len(costs)), key=lambda batch: (-costs[batch], batch)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[rank] += costs[batch]
        shares[rank].append(batch)
    return shares


def sample_shared(
    sampler: Sampler, prompts: Sequence[Prompt], numbers: Sequence[int], sampling: Sampling, group: CPGroup
) -> list[list[Rollout]]:
    """Rollouts of every prompt, the same on every rank. `numbers[i]` is prompt i's number in its stream."""
    batches = cut([len(prompt.input_ids) for prompt in prompts], sampling.prompts_per_batch)
    costs = [float(len(batch) * len(prompts[batch[0]].input_ids)) for batch in batches]
    mine: dict[int, list[Rollout]] = {}
    for batch in assign(costs, group.size)[group.rank]:
        members = batches[batch]
        noise = [
            uniforms(sampling.seed, sampling.stream, numbers[position], sampling.num, sampling.max_new_tokens)
            for position in members
        ]
        rollouts = sampler.sample([prompts[position] for position in members], torch.stack(noise), sampling)
        mine |= dict(zip(members, rollouts, strict=True))
    shares = [mine]
    if group.group is not None:
        shares = [{} for _ in range(group.size)]
        dist.all_gather_object(shares, mine, group=group.group)
    gathered = {position: found for share in shares for position, found in share.items()}
    return [gathered[position] for position in range(len(prompts))]
