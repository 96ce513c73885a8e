"""Reward functions: plain functions of a response and what is known of its prompt."""

from longspan.rl.rewards.exact import exact_match

__all__ = ["exact_match"]
