"""Numbers of a round made from plain lists: rewards, responses, and the metrics of several optimizer steps in one
line."""

from collections.abc import Mapping, Sequence

import numpy as np

from longspan.rl.task import Rollout

__all__ = ["first_gap", "merge_updates", "reward_numbers", "step_numbers"]

GAP = {
    "gap/mean": "logprob/gap_mean",
    "gap/p99": "logprob/gap_p99",
    "gap/p99.9": "logprob/gap_p99.9",
    "gap/max": "logprob/gap_max",
    "gap/share>0.5": "logprob/gap_share_0.5",
}


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


def step_numbers(metrics: Mapping[str, float], report: Mapping[str, float]) -> dict[str, float]:
    """Metrics of forward_backward and the report of optim_step; the engine's own count of steps gets a name of its
    own.
    """
    return {("optimizer/step" if name == "step" else name): value for name, value in {**metrics, **report}.items()}


def first_gap(numbers: Mapping[str, float]) -> dict[str, float]:
    """Before the first update of a round, the distance to old_logprob is the one between sampler and trainer."""
    return {name: numbers[source] for name, source in GAP.items() if source in numbers}


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One dict for the optimizer steps of a round: tok/ and time/ add up, mem/ and */max take the largest, the rest
    is the mean weighted by tok/trained; lr and optimizer/step are the last. One update stays as it is."""
    if len(updates) == 1:
        return dict(updates[0])
    trained = [numbers["tok/trained"] for numbers in updates]
    merged = {}
    for name in updates[-1]:
        values = [numbers[name] for numbers in updates]
        if name in ("lr", "optimizer/step"):
            merged[name] = values[-1]
        elif name.startswith(("tok/", "time/")):
            merged[name] = sum(values)
        elif name.startswith("mem/") or name.endswith("max"):
            merged[name] = max(values)
        else:
            merged[name] = float(np.average(values, weights=trained if sum(trained) else None))
    return merged
