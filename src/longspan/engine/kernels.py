"""The attention kernel of a run: chosen, named on stderr, and checked at start on the run's own head dims.

A kernel can be silently wrong at one head dim (flash-attn-4 4.0.0b36 at 72 and 80 on Hopper: dQ off by its own size), so
output, LSE and gradients are compared with the definition before the first step, for the decoder and for the vision
tower. The reference kernel is the definition and is not compared with itself. A kernel that is wrong on one rank stops
all. On a GPU the check compiles what the run needs anyway.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longspan.engine.config import EngineConfig
from longspan.errors import UserError
from longspan.layout import Mesh
from longspan.mixers.kernels import Kernel
from longspan.mixers.kernels.choose import choose_kernel, describe, self_check
from longspan.mixers.kernels.reference import Reference
from longspan.models.adapter import Adapter

__all__ = ["AttentionShape", "attention_shapes", "start_kernel"]

WINDOW = 48  # tokens: of the check's ragged case, whatever the model's window is


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one kind of attention layer of a model."""

    where: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


def attention_shapes(adapter: Adapter) -> Iterator[AttentionShape]:
    """The decoder's and, where there is one, the vision tower's."""
    window = WINDOW if adapter.windowed else None
    yield AttentionShape("decoder", adapter.num_heads, adapter.num_kv_heads, adapter.head_dim, window)
    if adapter.reader is not None:
        vision = adapter.model.config.vision_config
        yield AttentionShape(
            "vision tower", vision.num_heads, vision.num_heads, vision.hidden_size // vision.num_heads, None
        )


def start_kernel(config: EngineConfig, adapter: Adapter, mesh: Mesh, dtype: torch.dtype) -> Kernel:
    """The kernel that the config asks for, checked. Collective: raises UserError on every rank if it is wrong on one."""
    kernel = choose_kernel(mesh.device, dtype, adapter.head_dim, config.kernel, deterministic=config.deterministic)
    if isinstance(kernel, Reference):
        return kernel
    if mesh.rank == 0:
        print(describe(kernel, mesh.device, dtype, adapter.head_dim), file=sys.stderr, flush=True)
    for rank, problem in enumerate(mesh.gather_objects(_problem(kernel, adapter, mesh.device, dtype))):
        if problem is not None:
            raise UserError(f"rank {rank}: {problem}")
    return kernel


def _problem(kernel: Kernel, adapter: Adapter, device: torch.device, dtype: torch.dtype) -> str | None:
    for shape in attention_shapes(adapter):
        try:
            self_check(
                kernel,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype=dtype,
                device=device,
                window=shape.window,
            )
        except UserError as error:
            return f"{shape.where}: {error}"
    return None
