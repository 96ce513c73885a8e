"""Moves tokens from one layout of a stream to another on the same ranks; differentiable (the gradient goes back).

One uneven all-to-all. Each side knows both index vectors, so nothing but the tokens travels. Both layouts must cover
the same (padded) stream: a stream padded for zigzag can be laid out contiguously, not always the other way round.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.layout.comm import all_to_all
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo
from longspan.layout.travel import sent

__all__ = ["relayout"]


def relayout(x: Tensor, from_info: SeqInfo, to_info: SeqInfo) -> Tensor:
    """[..., T_local] -> [..., T_local]: this rank's tokens under from_info -> under to_info. Collective."""
    if from_info.num_tokens != to_info.num_tokens or from_info.group.ranks != to_info.group.ranks:
        raise UserError(
            f"relayout needs one stream on the same ranks: {from_info.num_tokens} tokens on {from_info.group.ranks} "
            f"against {to_info.num_tokens} on {to_info.group.ranks}. Pad the stream for both layouts first."
        )
    if from_info.size == 1:
        return x
    route = _route(from_info, to_info, x.device)
    back = Route(send=route.receive, receive=route.send, pick=route.place, place=route.pick)
    moved = _Move.apply(x.movedim(-1, 0), route, back, from_info.group)
    return moved.movedim(0, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One rank's side of the exchange."""

    send: list[int]  # rows to each rank
    receive: list[int]  # rows from each rank
    pick: Tensor  # [T_local] int64 device: local row of each row sent, by target
    place: Tensor  # [T_local] int64 device: local row of each row received, by source


def _route(old: SeqInfo, new: SeqInfo, device: torch.device) -> Route:
    owner = torch.empty(new.num_tokens, dtype=torch.long)  # rank of each token under `new`
    row = torch.empty(new.num_tokens, dtype=torch.long)  # its row there
    for rank, index in enumerate(new.indices):
        owner[index] = rank
        row[index] = torch.arange(index.numel())
    target = owner[old.index]
    incoming = [index[owner[index] == new.rank] for index in old.indices]
    return Route(
        send=torch.bincount(target, minlength=old.size).tolist(),
        receive=[part.numel() for part in incoming],
        pick=sent(target.argsort(stable=True), device),
        place=sent(row[torch.cat(incoming)], device),
    )


def _move(x: Tensor, route: Route, group: CPGroup) -> Tensor:
    moved = all_to_all(x.index_select(0, route.pick), group, receive=route.receive, send=route.send)
    out = torch.empty_like(moved)
    out[route.place] = moved
    return out


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, back: Route, group: CPGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        return _move(x, route, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _move(grads[0], ctx.back, ctx.group), None, None, None
