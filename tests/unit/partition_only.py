"""In place of inductor: torch's partition of a layer without code for it, which would take a minute."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

__all__ = ["partition_only"]


def partition_only(
    graph: torch.fx.GraphModule, inputs: Sequence[Tensor], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """compile_fx's signature; its settings are for code alone."""
    return lookup_backend("aot_eager_decomp_partition")(graph, inputs)
