"""Rollouts: the embedded sampler (`transformers` forward passes with a KV cache) and how ranks share the prompts."""

from longspan.rl.rollout.draw import draw, uniforms
from longspan.rl.rollout.embedded import EmbeddedSampler
from longspan.rl.rollout.share import Sampling, assign, cut, sample_shared

__all__ = ["EmbeddedSampler", "Sampling", "assign", "cut", "draw", "sample_shared", "uniforms"]
