"""Recurrent layers (Gated DeltaNet) of a packed row over ranks: `state` keeps tokens where they are, `heads` shares
out the heads.

    state: a halo for the convolution from the left, states passed between ranks (deltanet_state.py); any cp.
    heads: one all-to-all turns [T_local, all heads] into [T, some heads]; whole documents of those heads; one back.

Both take what a layer's projections make of this rank's tokens and return the rule's output for them, before its norm
and gate. Token order is what a recurrence needs, so the row is `contiguous`; boundaries come from SeqInfo alone (law
6). Traffic a layer, forward, of T_local tokens: heads moves (2 H_k D_k + 2 H D_v + 2 H) numbers a token; state moves
3 tokens of the convolution's channels and one [H, D_k, D_k + D_v] map a rank, whatever T_local is. So `auto` is
`state`: forward and backward of one 64k document, 16/32 heads of 128, take 28.21 ms on one H200, on two 16.97 (state)
and 23.84 (heads).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from longspan.errors import UserError
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo
from longspan.mixers.collectives import all_to_all
from longspan.mixers.conv import with_halo
from longspan.mixers.deltanet_choose import choose_delta_kernel
from longspan.mixers.deltanet_pieces import Pieces, cut_pieces, whole_pieces
from longspan.mixers.deltanet_state import DeltaKernel, DeltaSaved, delta_rule
from longspan.mixers.precision import accumulator

__all__ = ["DeltaShape", "DeltaWeights", "LinearPrepared", "gated_delta", "heads_refusal", "prepare_linear"]

LINEARS = ("state", "heads")


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads and head dims of one layer, or of a rank's share of it."""

    key_heads: int  # H_k
    value_heads: int  # H, a multiple of H_k; value head h reads key head h // (H / H_k)
    key_dim: int  # D_k
    value_dim: int  # D_v

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of q, k and v in the convolution."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Live parameters that the recurrence itself uses."""

    conv: Tensor  # [C, K]
    log_decay: Tensor  # [H], A_log
    step_bias: Tensor  # [H], dt_bias


@dataclass(frozen=True, slots=True, eq=False)
class LinearPrepared:
    """One row, made once per micro-step and used by every recurrent layer."""

    how: str  # "state" | "heads"
    pieces: Pieces
    group: CPGroup
    kernel: DeltaKernel
    slots: dict[int, DeltaSaved] | None  # by layer, under selective recomputation: the rule is never run twice

    def slot(self, layer: int) -> DeltaSaved | None:
        return None if self.slots is None else self.slots.setdefault(layer, DeltaSaved())


def heads_refusal(size: int, shape: DeltaShape) -> str | None:
    """Why `size` ranks cannot share out this layer's heads; None when they can."""
    if not _heads_fit(size, shape):
        sizes = ", ".join(str(n) for n in range(1, shape.value_heads + 1) if _heads_fit(n, shape))
        return (
            f"linear='heads' at cp={size} needs value heads divisible by {size}, and key heads that divide it or that "
            f"it divides; got {shape.value_heads} value and {shape.key_heads} key heads. Use cp in ({sizes}) or "
            "linear='state'."
        )
    return None


def _heads_fit(size: int, shape: DeltaShape) -> bool:
    return shape.value_heads % size == 0 and (shape.key_heads % size == 0 or size % shape.key_heads == 0)


def prepare_linear(
    info: SeqInfo, device: torch.device, *, how: str, dtype: torch.dtype, selective: bool = False
) -> LinearPrepared:
    """The pieces, kernel and index tensors of this rank.

    dtype: of the layers' activations; it decides the kernel. selective: outputs are kept for the recomputation.
    """
    if how not in LINEARS:
        raise UserError(f"linear={how!r} is unknown. Use one of {', '.join(map(repr, LINEARS))}.")
    shared = how == "heads" and info.size > 1
    pieces = cut_pieces(info)  # refuses an order that is not contiguous
    if shared:
        pieces = whole_pieces(info)
    kernel = choose_delta_kernel(device, dtype).make(pieces, device)
    return LinearPrepared("heads" if shared else "state", pieces, info.group, kernel, {} if selective else None)


def gated_delta(
    mixed: Tensor,  # [T_local, C]: q, k and v of all heads, before the convolution
    b: Tensor,  # [T_local, H], logit of beta
    a: Tensor,  # [T_local, H], input of the decay
    weights: DeltaWeights,
    *,
    shape: DeltaShape,
    prepared: LinearPrepared,
    layer: int,
) -> Tensor:
    """[T_local, H, D_v]. Collective on the row's group. layer: its number in the model."""
    if prepared.how == "heads":
        return _by_heads(mixed, b, a, weights, shape=shape, prepared=prepared, layer=layer)
    return _layer(mixed, b, a, weights, shape=shape, prepared=prepared, layer=layer)


def _by_heads(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    *,
    shape: DeltaShape,
    prepared: LinearPrepared,
    layer: int,
) -> Tensor:
    """The convolution's channels, b and a travel together; each rank uses its own heads' slices of the weights."""
    group = prepared.group
    if reason := heads_refusal(group.size, shape):
        raise UserError(reason)
    size, tokens = group.size, mixed.shape[0]
    own = DeltaShape(max(1, shape.key_heads // size), shape.value_heads // size, shape.key_dim, shape.value_dim)
    sent = torch.cat([_shares(mixed, size, shape), b.reshape(tokens, size, -1), a.reshape(tokens, size, -1)], 2)
    # [T/N, N, c] -> [N, T/N, c] -> [T, c]: block j goes to rank j, blocks arrive in token order
    whole = all_to_all(sent.transpose(0, 1).reshape(size * tokens, -1), group)
    mixed, b, a = whole.split([sum(own.channels), own.value_heads, own.value_heads], 1)
    heads = slice(group.rank * own.value_heads, (group.rank + 1) * own.value_heads)
    conv = _shares(weights.conv.t(), size, shape)[:, group.rank].t()
    mine = DeltaWeights(conv, weights.log_decay[heads], weights.step_bias[heads])
    out = _layer(mixed, b, a, mine, shape=own, prepared=prepared, layer=layer)
    back = all_to_all(out.reshape(size * tokens, -1), group)  # [T, H/N * D] -> [T, H/N * D]: block j is rank j's heads
    back = back.reshape(size, tokens, own.value_heads, own.value_dim).transpose(0, 1)
    return back.reshape(tokens, shape.value_heads, shape.value_dim)


def _shares(x: Tensor, size: int, shape: DeltaShape) -> Tensor:
    """[T, C] -> [T, size, C / size]: channels of each rank's value heads and of the key heads they read."""
    q, k, v = x.split(shape.channels, 1)
    tokens, copies = x.shape[0], max(1, size // shape.key_heads)
    q, k = (
        part.reshape(tokens, shape.key_heads, shape.key_dim).repeat_interleave(copies, 1).reshape(tokens, size, -1)
        for part in (q, k)
    )
    return torch.cat([q, k, v.reshape(tokens, size, -1)], 2)


def _layer(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    *,
    shape: DeltaShape,
    prepared: LinearPrepared,
    layer: int,
) -> Tensor:
    """mixed [T, C], b, a [T, H] -> [T, H, D_v]. The kernel's tail of inert tokens is added and taken off here."""
    kernel, pieces = prepared.kernel, prepared.pieces
    group = CPGroup.alone() if prepared.how == "heads" else prepared.group
    mixed = with_halo(mixed, weights.conv.shape[1], group, crossed=pieces.exchanged, tail=kernel.tail)
    b, a = (functional.pad(x, (0, 0, 0, kernel.tail)) for x in (b, a))
    tokens = b.shape[0]
    q, k, v = kernel.convolve(mixed, weights.conv).split(shape.channels, 1)
    wide = accumulator(mixed.dtype)  # f32 as transformers does: exp(A_log) overflows f16
    g = -weights.log_decay.to(wide).exp() * functional.softplus(a.to(wide) + weights.step_bias)
    inputs = (
        kernel.unit(q.reshape(tokens, shape.key_heads, shape.key_dim)),
        kernel.unit(k.reshape(tokens, shape.key_heads, shape.key_dim)),
        v.reshape(tokens, shape.value_heads, shape.value_dim).contiguous(),  # a view keeps q and k unnormed alive
        g,
        b.sigmoid(),
    )
    out = delta_rule(inputs, pieces=pieces, group=group, kernel=kernel, saved=prepared.slot(layer))
    return out[: tokens - kernel.tail]
