"""LoRA beside megatron-core's fused and cut linears: one pair of factors a Hugging Face linear, under peft's names.

Column (q, k, v; gate, up): A whole on every rank, B's rows cut over tp. A's small output, r numbers a token, is what
meets over tp: its gradient is summed there; under sequence parallelism A runs on a rank's own rows and its output is
gathered. Row (o, down): A's columns cut, B whole; the product is added before the linear's own sum over tp.
Tokens of other adapters are zeroed before A, as in models/lora.py. `Routing.ids` is set by every layer before it runs.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional

from longspan.engine.megatron.collectives import sum_gradient
from longspan.layout import CPGroup
from longspan.mixers.collectives import all_gather
from longspan.models.lora import Routing

__all__ = ["Adapters", "fuse"]


class Factors(nn.Module):
    """This rank's parts of the adapters of one Hugging Face linear."""

    def __init__(self, source: LoraLayer, *, tp: int, column: bool) -> None:
        super().__init__()
        self.scaling: Mapping[str, float] = dict(source.scaling)
        down, up = {}, {}
        for name, a in source.lora_A.items():
            rank, inputs = a.weight.shape
            outputs, dtype = source.lora_B[name].weight.shape[0], a.weight.dtype
            down[name] = nn.Linear(inputs if column else inputs // tp, rank, bias=False, dtype=dtype)
            up[name] = nn.Linear(rank, outputs // tp if column else outputs, bias=False, dtype=dtype)
        self.lora_A, self.lora_B = nn.ModuleDict(down), nn.ModuleDict(up)


class Adapters(nn.Module):
    """The adapters of one megatron-core linear. sources: Hugging Face's linears that it is made of, in order."""

    def __init__(
        self,
        sources: Mapping[str, nn.Module],
        routing: Routing,
        *,
        kind: Literal["column", "row"],
        tp: CPGroup,
        rows: CPGroup | None,
    ) -> None:
        super().__init__()
        self.routing, self.tp, self.rows, self.column = routing, tp, rows, kind == "column"
        cut = tp.size if self.column else 1
        self.widths = {name: source.out_features // cut for name, source in sources.items()}
        for name, source in sources.items():
            if isinstance(source, LoraLayer):
                self.add_module(name, Factors(source, tp=tp.size, column=self.column))

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [T, 1, I] (column under sequence parallelism: this rank's rows) -> [T, 1, O] of every source, in order."""
        shared = self.column and self.rows is not None
        ids = self._ids(x.shape[0], shared=shared)
        tokens = x.shape[0] * (self.rows.size if shared and self.rows is not None else 1)
        found = []
        for name, width in self.widths.items():
            total = x.new_zeros(tokens, 1, width)
            factors = getattr(self, name, None)
            for adapter in factors.lora_A if isinstance(factors, Factors) else ():
                number = self.routing.names.index(adapter)
                low = functional.linear(
                    torch.where((ids == number)[:, None, None], x, 0.0), factors.lora_A[adapter].weight
                )
                if self.column:
                    low = all_gather(low, self.rows) if self.rows is not None else sum_gradient(low, self.tp)
                total = total + functional.linear(low, factors.lora_B[adapter].weight) * factors.scaling[adapter]
            found.append(total)
        return found

    def _ids(self, rows: int, *, shared: bool) -> Tensor:
        """[rows] adapter of each row of x; pads belong to none."""
        ids = self.routing.ids
        assert ids is not None, "the layer sets routing.ids before it runs"
        size = self.rows.size if shared and self.rows is not None else 1
        ids = functional.pad(ids, (0, rows * size - len(ids)), value=-1)
        return ids if not shared or self.rows is None else ids[self.rows.rank * rows : (self.rows.rank + 1) * rows]


def fuse(parts: Sequence[Tensor], form: Literal["one", "qkv", "stack"], groups: int) -> Tensor:
    """Outputs [T, 1, O] of the sources as the fused linear lays them out; groups: key-value heads of this rank."""
    if form != "qkv":
        return torch.cat(list(parts), -1)
    return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], -1).flatten(-2)
