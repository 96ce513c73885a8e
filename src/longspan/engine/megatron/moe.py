"""Mixture-of-experts blocks in a megatron-core layer: the project's exact experts in place of megatron-core's MoELayer.

Why not MoELayer: its auxiliary losses are per micro-batch and multiplied by token counts, its router cannot replay
recorded routes, and its dispatcher needs CUDA. Hugging Face's block with the project's dropless experts
(models/experts.py) already has per-sample losses, records, replay and expert parallelism. Experts spread over data
ranks; tensor-parallel ranks repeat the block on all tokens (cost: tp times the expert FLOPs and weights a rank). With etp = tp
each has its columns of every expert: router and shared experts are repeated, the experts' outputs are summed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from longspan.engine.megatron.collectives import gather_whole, keep_own, pad_rows, sum_gradient, sum_parts
from longspan.layout import CPGroup
from longspan.models.adapter import Context
from longspan.models.experts import expert_modules

__all__ = ["COLUMNS", "Block", "ExpertMLP", "cut_columns"]

COLUMNS = {
    "gate_up_proj": (1, 2),
    "down_proj": (2, 1),
}  # dim of an expert's columns, and how many runs of them there are


class Block(nn.Module):
    """A Hugging Face block behind the keyword that router hooks read (models/moe.py)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *, longspan: Context) -> Tensor:
        """[1, T, E] -> [1, T, E]."""
        return self.block(hidden)


class ExpertMLP(nn.Module):
    """The `mlp` of a layer: [T, 1, E] -> [T, 1, E]. The layer sets `context` before each call."""

    def __init__(self, *, blocks: dict[int, Block], rows: CPGroup | None, **_: object) -> None:
        super().__init__()
        self.blocks, self.rows = blocks, rows
        self.inner: Block | None = None
        self.context: Context | None = None

    def set_layer_number(self, number: int) -> None:
        """Called by megatron-core with the layer's number, from 1 over all pipeline stages."""
        self.inner = self.blocks[number - 1]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        assert self.inner is not None and self.context is not None, "the layer hands over its context"
        real, rows = self.context.info.num_local, hidden.shape[0]
        whole = hidden if self.rows is None else gather_whole(hidden, self.rows)[:real]
        out = self.inner(whole.transpose(0, 1), longspan=self.context).transpose(0, 1)
        return (out if self.rows is None else keep_own(pad_rows(out, rows * self.rows.size), self.rows)), None


def cut_columns(model: nn.Module, group: CPGroup) -> None:
    """Give each rank of `group` its columns of every expert: gate and up rows, down's inputs. Once, while building.

    All ranks route all tokens; an expert's output is then a part of a sum, and so are the gradients of what it read.
    """

    def enter(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, experts, scores = args
        return sum_gradient(hidden, group), experts, sum_gradient(scores, group)

    def leave(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return sum_parts(out, group)

    for module in expert_modules(model).values():
        for name, (dim, runs) in COLUMNS.items():
            whole = getattr(module, name)
            mine = [run.chunk(group.size, dim)[group.rank] for run in whole.detach().chunk(runs, dim)]
            module.register_parameter(name, nn.Parameter(torch.cat(mine, dim), requires_grad=whole.requires_grad))
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
