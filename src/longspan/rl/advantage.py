"""Advantages, on the CPU, in fp64: GRPO and RLOO over groups, GAE over the trainable tokens of one sample.

Groups are found by id, wherever their members stand and however many there are (a failed rollout shifts nothing). A
group of one has no baseline: its advantage is 0. GAE (Schulman et al. 2016, eq. 16) runs over trainable tokens only:
tool output in the middle of a response neither decays a reward nor is a step of the recursion; the result equals GAE
on the row with the masked tokens cut out.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.typed import typed

__all__ = ["ADVANTAGES", "gae", "group_members", "grpo", "grpo_unscaled", "rloo"]

Rewards = Tensor | np.ndarray | Sequence[float]  # [rows]
Groups = np.ndarray | Sequence[Hashable | None]  # [rows]; a tensor's items are equal to none but themselves
STD_EPS = 1e-4  # added to the standard deviation, as DeepSeekMath's GRPO and trl do


def group_members(groups: Groups) -> list[list[int]]:
    """Row numbers of each group, in order of first appearance; a row without a group (None) is a group of its own."""
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(("row", row) if group is None else ("group", group), []).append(row)
    return list(members.values())


@typed
def grpo(rewards: Rewards, groups: Groups) -> list[float]:
    """(r - mean) / (std + 1e-4) within each group, with the sample standard deviation (n - 1)."""
    return _by_group(rewards, groups, lambda r: (r - r.mean()) / (r.std() + STD_EPS))


@typed
def grpo_unscaled(rewards: Rewards, groups: Groups) -> list[float]:
    """r - mean within each group (Dr. GRPO, Liu et al. 2025: no division by the standard deviation)."""
    return _by_group(rewards, groups, lambda r: r - r.mean())


@typed
def rloo(rewards: Rewards, groups: Groups) -> list[float]:
    """r minus the mean of the others of its group (Ahmadian et al. 2024)."""
    return _by_group(rewards, groups, lambda r: r - (r.sum() - r) / (len(r) - 1))


def _by_group(rewards: Rewards, groups: Groups, rule: Callable[[Tensor], Tensor]) -> list[float]:
    if len(rewards) != len(groups):
        raise UserError(f"{len(rewards)} rewards and {len(groups)} groups: give one group id (or None) for each reward")
    values = torch.as_tensor(rewards, dtype=torch.float64, device="cpu").detach()
    if values.ndim != 1:
        raise UserError(f"rewards of shape {list(values.shape)} are not one number a row. Give one dimension")
    if not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).nonzero()[0])
        raise UserError(
            f"the reward of row {row} (group {groups[row]!r}) is {values[row].item()}: drop a rollout whose reward failed"
        )
    advantages = torch.zeros_like(values)
    for rows in group_members(groups):
        if len(rows) > 1:
            advantages[rows] = rule(values[rows])
    return advantages.tolist()


ADVANTAGES: dict[str, Callable[[Rewards, Groups], list[float]]] = {
    "grpo": grpo,
    "grpo_unscaled": grpo_unscaled,
    "rloo": rloo,
}


@typed
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantage and return of every token of one sample, 0 where mask is 0.

    rewards, values, mask: [L]; the value of token t is the state's before its target is chosen. A reward that lands
    on a masked token (the end of a tool's output) belongs to the last trainable token before it; one before the first
    trainable token was caused by nothing and is an error.
    """
    rewards, values = rewards.double(), values.double()
    trained = (mask > 0).nonzero()[:, 0]
    owner = torch.cumsum((mask > 0).long(), 0) - 1  # [L] which trainable token a reward belongs to
    if bool(((owner < 0) & (rewards != 0)).any()):
        where = int(((owner < 0) & (rewards != 0)).nonzero()[0])
        raise UserError(
            f"reward {rewards[where].item()} at token {where} comes before the first trainable token of the sample"
        )
    advantage, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    if len(trained) == 0:
        return advantage, returns
    earned = torch.zeros(len(trained), dtype=torch.float64).index_add(0, owner.clamp(min=0), rewards)
    value = values[trained]
    running, result = torch.zeros((), dtype=torch.float64), torch.zeros_like(value)
    for t in range(len(trained) - 1, -1, -1):
        after = value[t + 1] if t + 1 < len(trained) else 0.0
        running = earned[t] + gamma * after - value[t] + gamma * lam * running
        result[t] = running
    advantage[trained], returns[trained] = result, result + value
    return advantage, returns
