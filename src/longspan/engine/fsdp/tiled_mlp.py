"""The MLP of very long rows, a tile of tokens at a time, forward and backward.

hidden [1, T, E] -> [1, T, E]. A whole MLP holds T x M values of gate, up, their product and the gradients of all three: 36 GiB of
one layer at 512k tokens and M = 6,144 in bf16. Here they exist for one tile only. Backward runs a tile forward again and then its
backward; weight gradients of the tiles add up in fp32 (fp64 for fp64) and leave in the weight's dtype, rounded once.
Tokens do not meet in an MLP, so the numbers are those of the whole one up to the order of the sums in weight gradients.

Two functions, so that a checkpoint around the layer stops recomputing before the MLP: `_Hold` saves the input before anything is
computed and does all of backward; `_Compute` saves nothing and hands the gradient of its output to `_Hold` as it is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.adapter import Adapter

__all__ = ["TiledMLP", "tile_mlps"]

CHILDREN = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class TiledMLP(nn.Module):
    """A gated MLP of transformers with the same children and parameter names."""

    def __init__(self, source: nn.Module, tile: int) -> None:
        super().__init__()
        for name, child in source.named_children():
            self.add_module(name, child)
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) if x.shape[1] <= self.tile else _tiled(x, self)

    def whole(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiles(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.tile):
            yield slice(start, min(start + self.tile, tokens))


def tile_mlps(adapter: Adapter, tile: int) -> int:
    """Replace the gated MLPs of the model's units; says how many there were."""
    found = [
        (parent, name, child)
        for unit in adapter.units()
        for parent in unit.modules()
        for name, child in parent.named_children()
        if {grandchild for grandchild, _ in child.named_children()} == CHILDREN
    ]
    for parent, name, child in found:
        setattr(parent, name, TiledMLP(child, tile))
    return len(found)


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: TiledMLP, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mlp = mlp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), mlp, dout = ctx.saved_tensors, ctx.mlp, grads[0]
        # those of now: FSDP has gathered them for this layer's backward
        trained = [p for p, wanted in zip(mlp.parameters(), ctx.needs_input_grad[2:], strict=True) if wanted]
        sums = [
            torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device) for p in trained
        ]
        dx = torch.empty_like(x)
        for part in mlp.tiles(x.shape[1]):
            with torch.enable_grad():
                piece = x[:, part].detach().requires_grad_()
                out = mlp.whole(piece)
            dpiece, *dweights = torch.autograd.grad(out, [piece, *trained], dout[:, part])
            dx[:, part] = dpiece
            for total, dweight in zip(sums, dweights, strict=True):
                total += dweight
        left = iter(total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        return dx, None, *(next(left) if wanted else None for wanted in ctx.needs_input_grad[2:])


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: TiledMLP) -> Tensor:
        out = torch.empty_like(x)
        for part in mlp.tiles(x.shape[1]):
            out[:, part] = mlp.whole(x[:, part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _in_tiles(x: Tensor, mlp: TiledMLP) -> Tensor:
    return _Compute.apply(_Hold.apply(x, mlp, *mlp.parameters()), mlp)


# torch.compile does not look inside: it would unroll the loop over tiles
_tiled: Callable[[Tensor, TiledMLP], Tensor] = torch.compiler.disable(_in_tiles)
