"""The collectives of this package, on dim 0, without autograd: the one place that calls torch.distributed for tokens.

Groups of one copy nothing and call nothing. One code for gloo and NCCL: both have all_to_all_single, the single-tensor
all-gather and reduce-scatter, and batched p2p (gloo of torch 2.13 checked in bf16, f32 and f64; no fallback needed).
Differentiable forms: mixers/collectives.py.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.layout.mesh import CPGroup

__all__ = ["all_gather", "all_to_all", "reduce_scatter", "rotate"]

# torch 2.13 renamed both and warns at the old names, which are the only ones torch 2.11 has
RENAMED = torch.__version__ >= "2.13"  # TorchVersion compares as a version, not as text
gather_single = dist.all_gather_single if RENAMED else dist.all_gather_into_tensor
scatter_single = dist.reduce_scatter_single if RENAMED else dist.reduce_scatter_tensor


def all_to_all(x: Tensor, group: CPGroup, *, receive: list[int] | None = None, send: list[int] | None = None) -> Tensor:
    """[sum(send), ...] -> [sum(receive), ...]: send[i] rows go to rank i, receive[i] come from it. None: even."""
    if group.size == 1:
        return x
    rows = x.shape[0] if receive is None else sum(receive)
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group.group)
    return out


def all_gather(x: Tensor, group: CPGroup) -> Tensor:
    """[n, ...] -> [N * n, ...], rank order."""
    if group.size == 1:
        return x
    out = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    gather_single(out, x.contiguous(), group=group.group)
    return out


def reduce_scatter(x: Tensor, group: CPGroup) -> Tensor:
    """[N * n, ...] -> [n, ...]: the sum over ranks of the r-th part. Sums in the dtype of x."""
    if group.size == 1:
        return x
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    scatter_single(out, x.contiguous(), group=group.group)
    return out


class Rotation:
    """Tensors on their way to another rank of the group; `wait` gives what arrived."""

    def __init__(self, tensors: tuple[Tensor, ...], group: CPGroup, hops: int) -> None:
        target = group.ranks[(group.rank + hops) % group.size]
        source = group.ranks[(group.rank - hops) % group.size]
        self._sent = [x.contiguous() for x in tensors]  # kept alive until the send is done
        self._received = tuple(torch.empty_like(x) for x in self._sent)
        ops = [dist.P2POp(dist.isend, x, target, group.group) for x in self._sent]
        ops += [dist.P2POp(dist.irecv, x, source, group.group) for x in self._received]
        self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors of the rank `hops` before this one."""
        for work in self._works:
            work.wait()
        return self._received


def rotate(tensors: tuple[Tensor, ...], group: CPGroup, *, hops: int = 1) -> Rotation:
    """Starts sending `tensors` to rank + hops and receiving those of rank - hops (same shapes on all ranks)."""
    assert hops % group.size, "a rotation by a full turn sends nothing"
    return Rotation(tensors, group, hops)
