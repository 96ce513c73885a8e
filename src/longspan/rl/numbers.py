"""Numbers of a round made from plain lists: rewards, responses, and the metrics of several optimizer steps in one
line."""

from collections.abc import Mapping, Sequence

import numpy as np

from longspan.rl.task import Rollout

__all__ = ["merge_updates", "reward_numbers"]


def reward_numbers(rewards: Sequence[Sequence[float]], groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Mean and spread of the rewards, share of groups that carry a signal, and response lengths."""
    flat = np.concatenate([np.asarray(group, dtype=np.float64) for group in rewards])
    rollouts = [rollout for group in groups for rollout in group]
    return {
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
        "reward/mixed_groups": float(np.mean([max(group) > min(group) for group in rewards])),
        "response/tokens_mean": float(np.mean([len(rollout.ids) for rollout in rollouts])),
        "response/finished": float(np.mean([rollout.finished for rollout in rollouts])),
    }


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One dict for the optimizer steps of a round: tok/ and time/ add up, mem/ and */max take the largest, the rest
    is the mean weighted by tok/trained; lr and step are the last. One update stays as it is."""
    if len(updates) == 1:
        return dict(updates[0])
    trained = [numbers["tok/trained"] for numbers in updates]
    merged = {}
    for name in updates[-1]:
        values = [numbers[name] for numbers in updates]
        if name in ("lr", "step"):
            merged[name] = values[-1]
        elif name.startswith(("tok/", "time/")):
            merged[name] = sum(values)
        elif name.startswith("mem/") or name.endswith("max"):
            merged[name] = max(values)
        else:
            merged[name] = float(np.average(values, weights=trained if sum(trained) else None))
    return merged
