"""Compiling decoder layers, and what they keep for backward.

Each layer is compiled by itself around an opaque attention op (models/attention_bridge.py). Under recompute="selective" a compiled
layer needs no checkpoint around it: the partitioner is told to keep only the inputs of each compiled piece (budget 0), so q, k, v,
attention's output and the residual stream stay, everything between is recomputed, and neither attention nor down_proj runs
twice. Measured on one H200, Qwen3-1.7B's shape, 64k tokens: 35.2k tok/s and 61 GiB against 33.3k and 33 GiB with a checkpoint a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

from longspan.models.adapter import Adapter

__all__ = ["compile_layers"]


def compile_layers(adapter: Adapter, *, keep_inputs_only: bool) -> None:
    """Compile every unit of the model. One backend object for all: layers of the same shape share their code."""
    for unit in adapter.units():
        unit.compile(backend=inputs_only if keep_inputs_only else "inductor")


def inputs_only(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """inductor, with a partitioner that keeps a piece's inputs and recomputes the rest."""
    with functorch_config.patch(activation_memory_budget=0.0):
        return compile_fx(graph, list(inputs))
