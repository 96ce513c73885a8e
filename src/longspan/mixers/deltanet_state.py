"""Gated DeltaNet with its tokens cut over ranks: states are passed, tokens stay.

A piece's final state is affine in its initial one, S' = A S + B, so every rank first makes the (A, B) of what it
hands to the right (no outputs: the chunks' solve and a scan), one all-gather shares them [size, H, D_k, D_k + D_v],
and each rank folds the ones to its left into its own initial state. Outputs are then computed once, with the right
initial states. The gradient runs the other way by the same rule: with D = dS of a piece whose final state has no
gradient, dS = A^T dS' + D; again one all-gather, of (A, D), then all gradients once. A rank that holds the start of a
document resets the chain, so its A is never used. Exact: autograd never sees A, which only lets ranks work at once.
Nothing crosses a document; rows without a document that spans ranks do not communicate. Extra work over one device:
one scan each way. Cost of the exchange at 32 heads of 128: 4 MiB a rank, which a prefetch could hide behind the
convolution of the next layer; it is not overlapped here. Source: the affine form is that of Yang et al. 2024
(DeltaNet, sequence parallelism) and fla.ops.cp; the kernels are behind `DeltaKernel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.layout import comm
from longspan.layout.mesh import CPGroup
from longspan.mixers.deltanet_pieces import Pieces

__all__ = ["DeltaBackward", "DeltaForward", "DeltaKernel", "DeltaSaved", "delta_rule"]


class DeltaForward(Protocol):
    """One forward pass over a rank's pieces, in two steps with the exchange between them."""

    def maps(self, pieces: Sequence[int], *, transition: bool) -> tuple[Tensor | None, Tensor]:
        """A [m, H, D_k, D_k] (None without `transition`) and B [m, H, D_k, D_v] of the named pieces."""
        ...

    def outputs(self, initial: Tensor | None) -> Tensor:
        """initial [n, H, D_k, D_v], None: zeros -> [T, H, D_v]."""
        ...

    def kept(self) -> tuple[Tensor, ...]:
        """What the backward pass gets back."""
        ...


class DeltaBackward(Protocol):
    """One backward pass, likewise."""

    def state_gradients(self, pieces: Sequence[int]) -> Tensor:
        """[m, H, D_k, D_v]: gradient of the named pieces' initial states if no final state had one."""
        ...

    def gradients(self, final: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """final [n, H, D_k, D_v], the gradient of the final states, None: zeros -> dq, dk, dv, dg, dbeta."""
        ...


class DeltaKernel(Protocol):
    """Convolution and gated delta rule of one rank's pieces on one device; made once per micro-step.

    inputs: q, k [T, H_k, D_k] unit vectors; v [T, H, D_v]; g, beta [T, H]. T counts `tail` inert tokens at the end,
    which belong to no piece: kernels that compile for each length want few different ones.
    """

    tail: int

    def unit(self, x: Tensor) -> Tensor:
        """x [T, H, D] / sqrt(|x|^2 + 1e-6), in the dtype that `forward` wants for q and k; differentiable."""
        ...

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [K - 1 + T, C] halo first, weight [C, K] -> silu of the convolution [T, C]; differentiable."""
        ...

    def forward(self, inputs: Sequence[Tensor]) -> DeltaForward: ...

    def backward(
        self, gradient: Tensor, inputs: Sequence[Tensor], initial: Tensor | None, kept: Sequence[Tensor]
    ) -> DeltaBackward: ...


class DeltaSaved:
    """What one layer's rule keeps between its first forward and its recomputation: outputs, states and the rest."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, ...] | None = None

    def put(self, kept: tuple[Tensor, ...]) -> None:
        self._kept = kept

    def take(self) -> tuple[Tensor, ...] | None:
        """Handed over once; None on a first forward."""
        kept, self._kept = self._kept, None
        return kept


def delta_rule(
    inputs: Sequence[Tensor],  # q, k, v, g, beta of this rank's tokens
    *,
    pieces: Pieces,
    group: CPGroup,
    kernel: DeltaKernel,
    saved: DeltaSaved | None = None,
) -> Tensor:
    """[T_local, H, D_v], differentiable in every input. Collective when `pieces.exchanged`.

    saved: of selective recomputation; what the first forward kept is used instead of computing it again.
    """
    return _StatePassing.apply(_Setup(pieces, group, kernel, saved), *inputs)


@dataclass(frozen=True, slots=True, eq=False)
class _Setup:
    pieces: Pieces
    group: CPGroup
    kernel: DeltaKernel
    saved: DeltaSaved | None


class _StatePassing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, setup: _Setup, *inputs: Tensor) -> Tensor:
        kept = setup.saved.take() if setup.saved is not None else None
        if kept is None:
            pieces = setup.pieces
            work = setup.kernel.forward(inputs)
            states, transitions = _incoming(work, pieces, setup.group, inputs)
            out = work.outputs(_spread(states, pieces.targets, pieces.num))
            none = out.new_empty(0)
            few = (none if x is None else x for x in (states, transitions))
            kept = (out, *few, *work.kept())
            if setup.saved is not None:
                setup.saved.put((out.detach(), *kept[1:]))
        ctx.setup = setup
        ctx.save_for_backward(*inputs, *kept[1:])
        return kept[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pieces, group = ctx.setup.pieces, ctx.setup.group
        saved = ctx.saved_tensors  # read once: under checkpointing a second read is an error
        *inputs, states, transitions = saved[:7]
        initial = _spread(states if states.numel() else None, pieces.targets, pieces.num)
        work = ctx.setup.kernel.backward(gradients[0], inputs, initial, saved[7:])
        final = _returning(work, pieces, group, transitions if transitions.numel() else None, inputs)
        return None, *work.gradients(_spread(final, pieces.sources, pieces.num))


def _incoming(
    work: DeltaForward, pieces: Pieces, group: CPGroup, inputs: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Initial states of `pieces.targets` and the A of `pieces.sources`. Collective."""
    sources, targets = pieces.sources, pieces.targets
    a, b = None, None
    if sources:
        a, b = work.maps(sources, transition=any(pieces.carried[i] for i in sources))
    entering = _exchange_forward(a, b, pieces, group, inputs) if pieces.exchanged else None
    if not targets:
        return None, a
    state, states = entering, []
    for piece in range(pieces.num):
        if pieces.carried[piece]:
            assert state is not None
            states.append(state)
        if pieces.carried[piece + 1] and piece + 1 < pieces.num:
            state = _step(sources.index(piece), a, b, state if pieces.carried[piece] else None)
    return torch.stack(states), a


def _returning(
    work: DeltaBackward, pieces: Pieces, group: CPGroup, a: Tensor | None, inputs: Sequence[Tensor]
) -> Tensor | None:
    """Gradients of the final states of `pieces.sources`."""
    sources, targets = pieces.sources, pieces.targets
    d = work.state_gradients(targets) if targets else None
    gradient = _exchange_backward(a, d, pieces, group, inputs) if pieces.exchanged else None
    if not sources:
        return None
    finals = []
    for piece in reversed(range(pieces.num)):
        if pieces.carried[piece + 1]:
            assert gradient is not None
            finals.append(gradient)
        if pieces.carried[piece]:
            later = gradient if pieces.carried[piece + 1] else None
            gradient = _step_back(a, d, later, source=piece, pieces=pieces)
    return torch.stack(finals[::-1])


def _exchange_forward(
    a: Tensor | None, b: Tensor | None, pieces: Pieces, group: CPGroup, inputs: Sequence[Tensor]
) -> Tensor | None:
    """The state that enters this rank. Every rank sends the map of its whole run: [H, D_k, D_k + D_v]."""
    rank = pieces.rank
    sent = _empty_map(inputs)
    key_dim = sent.shape[1]
    if pieces.crossed[rank + 1]:
        first = max(
            i for i in range(pieces.num) if i == 0 or not pieces.carried[i]
        )  # where the leaving document begins
        state, chain = None, None
        for piece in range(first, pieces.num):
            at = pieces.sources.index(piece)
            state = _step(at, a, b, state)
            if pieces.through[rank]:
                chain = a[at] if chain is None else a[at] @ chain
        sent[..., key_dim:] = state
        if chain is not None:
            sent[..., :key_dim] = chain
    maps = comm.all_gather(sent[None], group)  # [H, D_k, D_k + D_v] -> [size, H, D_k, D_k + D_v]
    if not pieces.crossed[rank]:
        return None
    start = rank - 1
    while pieces.through[start]:
        start -= 1
    state = maps[start, ..., key_dim:]
    for other in range(start + 1, rank):
        state = maps[other, ..., :key_dim] @ state + maps[other, ..., key_dim:]
    return state


def _exchange_backward(
    a: Tensor | None, d: Tensor | None, pieces: Pieces, group: CPGroup, inputs: Sequence[Tensor]
) -> Tensor | None:
    """The gradient of the state that leaves this rank. Sent: the A of its whole run and the D of what enters."""
    rank = pieces.rank
    sent = _empty_map(inputs)
    key_dim = sent.shape[1]
    if pieces.crossed[rank]:
        last = next(i for i in range(1, pieces.num + 1) if i == pieces.num or not pieces.carried[i]) - 1
        gradient, chain = None, None
        for piece in reversed(range(last + 1)):
            gradient = _step_back(a, d, gradient, source=piece, pieces=pieces)
            if pieces.through[rank]:
                at = pieces.sources.index(piece)
                chain = a[at] if chain is None else chain @ a[at]
        sent[..., key_dim:] = gradient
        if chain is not None:
            sent[..., :key_dim] = chain
    maps = comm.all_gather(sent[None], group)  # [H, D_k, D_k + D_v] -> [size, H, D_k, D_k + D_v]
    if not pieces.crossed[rank + 1]:
        return None
    stop = rank + 1
    while pieces.through[stop]:
        stop += 1
    gradient = maps[stop, ..., key_dim:]
    for other in reversed(range(rank + 1, stop)):
        gradient = maps[other, ..., :key_dim].transpose(-1, -2) @ gradient + maps[other, ..., key_dim:]
    return gradient


def _step(at: int, a: Tensor | None, b: Tensor | None, state: Tensor | None) -> Tensor:
    """State after source number `at`; state None: it starts from zero."""
    assert b is not None
    if state is None:
        return b[at]
    assert a is not None
    return a[at] @ state + b[at]


def _step_back(a: Tensor | None, d: Tensor | None, gradient: Tensor | None, *, source: int, pieces: Pieces) -> Tensor:
    """Gradient of the state before piece `source`; gradient None: none arrives at the state after it."""
    assert d is not None
    own = d[pieces.targets.index(source)]
    if gradient is None:
        return own
    assert a is not None
    return a[pieces.sources.index(source)].transpose(-1, -2) @ gradient + own


def _empty_map(inputs: Sequence[Tensor]) -> Tensor:
    """[H, D_k, D_k + D_v] zeros in the dtype of states: f32, in f64 f64."""
    _, k, v, *_ = inputs
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    return v.new_zeros(v.shape[1], k.shape[2], k.shape[2] + v.shape[2], dtype=dtype)


def _spread(states: Tensor | None, pieces: Sequence[int], num: int) -> Tensor | None:
    """States of some pieces -> [num, ...] with zeros elsewhere; only the few that exist are kept between the passes."""
    if states is None:
        return None
    if len(pieces) == num:
        return states
    whole = states.new_zeros(num, *states.shape[1:])
    for place, piece in enumerate(pieces):
        whole[piece] = states[place]
    return whole
