"""Mixture-of-experts blocks in a megatron-core layer: the project's exact experts in place of megatron-core's MoELayer.

Why not MoELayer: its auxiliary losses are per micro-batch and multiplied by token counts, its router cannot replay
recorded routes, and its dispatcher needs CUDA. Hugging Face's block with the project's dropless experts
(models/experts.py) already has per-sample losses, records, replay and expert parallelism. Experts spread over data
ranks; tensor-parallel ranks repeat the block on all tokens (cost: tp times the expert FLOPs and weights a rank).
"""

from typing import Any

from torch import Tensor, nn

from longspan.engine.megatron.collectives import gather_whole, keep_own, pad_rows
from longspan.layout import CPGroup
from longspan.models.adapter import Context

__all__ = ["Block", "ExpertMLP"]


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
