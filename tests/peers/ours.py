"""What both peers are compared with: our mixers and the plain fp64 formula, on one row cut over two ranks.

q, k, v and the gradient of the output come from a seed on every rank, so nothing is sent to compare.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.launch import world
from longspan.layout import CPGroup, Layout, Mesh, SeqInfo, make_seqinfo
from longspan.mixers import make_mixer, naive
from longspan.mixers.kernels.reference import Reference

HEADS, KV_HEADS, DIM, SCALE = 4, 4, 8, 0.3
MIXERS = (("ring", "zigzag"), ("ring", "contiguous"), ("ulysses", "contiguous"), ("gather", "zigzag"))


@dataclass(frozen=True)
class RowOfTokens:
    """q, k, v and dout [T, H, D], and documents of these lengths."""

    lengths: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(sum(self.lengths))
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        return [torch.randn(sum(self.lengths), n, DIM, generator=generator, dtype=torch.float64) for n in heads]


def formula(row: RowOfTokens, lengths: tuple[int, ...] | None = None) -> list[Tensor]:
    """out, dq, dk, dv of the whole row; lengths: other boundaries."""
    bounds = lengths or row.lengths
    *inputs, dout = row.tensors
    leaves = [x.requires_grad_() for x in inputs]
    out = naive.attention(
        *leaves,
        position=torch.cat([torch.arange(n) for n in bounds]),
        segment=torch.arange(len(bounds)).repeat_interleave(torch.tensor(bounds)),
        scale=SCALE,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def group() -> CPGroup:
    here = world()
    return Mesh(Layout(cp=here.ranks), ranks=here.ranks, rank=here.rank, device=here.device).group(0, here.ranks)


def padded(row: RowOfTokens, index: str, of: CPGroup) -> tuple[SeqInfo, Tensor]:
    """Our cut of the row, and for each local token its place in the unpadded row (-1: a pad)."""
    each = [-(-n // (2 * of.size)) * 2 * of.size if index == "zigzag" else n for n in row.lengths]
    tail = -sum(each) % of.size
    bounds = [*each, *([tail] if tail else [])]
    cu = torch.tensor([0, *bounds]).cumsum(0).int()
    places, start = [], 0
    for real, room in zip(row.lengths, each, strict=True):
        places += [*range(start, start + real), *[-1] * (room - real)]
        start += real
    info = make_seqinfo(index, cu, of)
    return info, torch.tensor([*places, *[-1] * tail])[info.index]


def ours(row: RowOfTokens, mixer: str, index: str, of: CPGroup) -> tuple[Tensor, list[Tensor]]:
    """Places of this rank's real tokens, and their out, dq, dk, dv."""
    info, places = padded(row, index, of)
    real = places >= 0
    local = [torch.where(real[:, None, None], x[places.clamp(min=0)], 0.0) for x in row.tensors]
    leaves = [x.requires_grad_() for x in local[:3]]
    made = make_mixer(Layout(cp=of.size, mixer=mixer, index=index))
    out = made.attend(
        *leaves, made.prepare(info, torch.device("cpu")), scale=SCALE, window=None, sink=None, kernel=Reference()
    )
    return places[real], [x[real] for x in (out.detach(), *torch.autograd.grad(out, leaves, local[3]))]


def distance(found: list[Tensor], want: list[Tensor], places: Tensor) -> list[float]:
    """Relative L2 of out, dq, dk, dv over these places of the row."""
    return [float((a - b[places]).norm() / b[places].norm()) for a, b in zip(found, want, strict=True)]
