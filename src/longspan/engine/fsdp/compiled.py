"""Compiling decoder layers, and what they keep for backward.

Each layer is compiled by itself around an opaque attention op (models/attention_bridge.py). Without a checkpoint around it, a compiled
layer keeps what the partitioner is told to; q, k, v and attention's output are among it, so attention never runs twice:

    selective  the inputs of each compiled piece (budget 0): everything between is recomputed, but down_proj does not run again
    none       the outputs of matrix products too: only elementwise work, reductions and casts are recomputed, fused into backward

Measured on one H200, Qwen3-1.7B's shape, 64k tokens: selective 35.2k tok/s and 61 GiB against 33.3k and 33 GiB with a checkpoint a layer.

The blocks of a vision tower have a checkpoint around them under "selective", too, that keeps attention's output: without it one of Qwen3-VL
keeps its fused q, k, v, and q and k rotated beside them. An image has four patches a token: a 64k row of which half is images peaked at
124 GiB on one H200 where the memory model, which counts the checkpoints, says 84 (benchmarks/results/step_models.json).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.engine.config import EngineConfig
from longspan.engine.fsdp.host import CHECKPOINT
from longspan.models.adapter import Adapter, tower_blocks

__all__ = ["KEEPS", "PLAIN", "backend_of", "checkpoint_tower", "compile_keeping", "compile_layers", "keeps_of"]

PLAIN = "plain"  # torch's own partition, of what has a checkpoint around it
# Compiled q, k and v want gradients that are contiguous as [1, H, T, D], and copy what is not. torch 2.13 would want the strides of q, k
# and v where T is fixed, which it is until a second length comes. FlashAttention 4 and Ulysses write heads first; behind the other
# kernels, ring and gather each gradient is copied once.
TANGENTS = {"guess_tangent_strides_as_outputs": False}
# inductor's choice of tiles: by timing, one step further than by itself (a 64k row's elementwise work 144 -> 128 ms on an H200, about
# 30 s more at the first call, kept in its cache), or by rule, so that every machine adds in the same order
TIMED, FIXED = {"coordinate_descent_tuning": True}, {"deterministic": True}
# recompute policy -> settings of torch's partitioner; a policy that is not here has a checkpoint around each layer
KEEPS: dict[str, dict[str, Any]] = {
    "selective": {"activation_memory_budget": 0.0},
    "none": {"aggressive_recomputation": True, "ban_recompute_reductions": False},
}
# of one `forward`: kinds of layers (Qwen3.5 has two) x with gradients and without x lengths fixed and free, and a few engines; past
# the limit, 8 by itself, dynamo runs a layer as it is, which keeps everything
VARIANTS = 64


def keeps_of(config: EngineConfig) -> dict[str, Any] | None:
    """What compiled layers keep by themselves; None where a checkpoint stands around each layer, or nothing is compiled."""
    return KEEPS.get(config.recompute) if config.compile and "checkpoints" not in config.offload else None


def compile_layers(adapter: Adapter, config: EngineConfig) -> None:
    """Compile every unit of the model; under "selective" with a checkpoint around each block of a tower."""
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, VARIANTS)
    alone = keeps_of(config) is not None
    tower = tower_blocks(adapter) if alone and config.recompute == "selective" else []
    checkpoint_tower(tower)
    for unit in adapter.units():
        policy = config.recompute if alone and unit not in tower else PLAIN
        unit.compile(backend=backend_of(policy, deterministic=config.deterministic))


def checkpoint_tower(blocks: Sequence[nn.Module]) -> None:
    """A checkpoint around each block."""
    for block in blocks:
        assert isinstance(block, GradientCheckpointingLayer), type(block)
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(checkpoint, **CHECKPOINT)


@cache
def backend_of(policy: str, *, deterministic: bool) -> Callable[..., Any]:
    """One object for each: layers of the same shape share their code, those of other engines of the process too."""
    return partial(compile_keeping, ({PLAIN: {}} | KEEPS)[policy], FIXED if deterministic else TIMED)


def compile_keeping(
    keep: dict[str, Any], how: dict[str, Any], graph: torch.fx.GraphModule, inputs: Sequence[Tensor]
) -> Callable[..., Any]:
    """inductor with settings of its own (`how`) and of the partitioner (`keep`)."""
    with functorch_config.patch(**TANGENTS, **keep):
        return compile_fx(graph, list(inputs), config_patches=how)
