"""What every attention mixer is (`Mixer`), and the one autograd function under all of them.

q [T_local, H, D], k [T_local, H_kv, D], v [T_local, H_kv, Dv] -> out [T_local, H, Dv]. `prepare` turns a SeqInfo into
device tensors once per micro-step; `attend` runs in every layer and never waits for the device.
Saved for backward: q, k, v, out, lse. Backward gives each kernel call the GLOBAL out and lse (FlashAttention-2,
alg. 2), so that blocks are independent and their gradients only add.
A sink is one more logit per head with value 0: out' = out * sigmoid(lse - sink), lse' = logaddexp(lse, sink).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from longspan.layout.seqinfo import SeqInfo
from longspan.mixers.blocks import Call, select
from longspan.mixers.kernels import Kernel
from longspan.mixers.merge import PartialSoftmax, Sum
from longspan.mixers.precision import accumulator
from longspan.mixers.transport import Ahead

__all__ = ["AnySize", "AttentionCache", "ByWindow", "Mixer", "Prepared", "Saved", "SizeCheck", "Work", "core_attention"]

SizeCheck = Callable[[int], str | None]  # cp size -> why it does not work, None when it does


@dataclass(frozen=True, slots=True)
class Work:
    """How one layer attends."""

    kernel: Kernel
    scale: float
    window: int | None  # keys at or before position - window are hidden


class Prepared(Protocol):
    """One row's attention, ready on the device: which calls, and how keys travel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """out [T_local, H, Dv] (dtype of q or wider) and lse [H, T_local] over all keys of the row."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the local q, k, v, in their dtypes."""
        ...


class Mixer(Protocol):
    """Lets the tokens of one row meet across the ranks that share it. Stateless."""

    @property
    def name(self) -> str:
        """Its key in MIXERS."""
        ...

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """The check of CP sizes for a model with these heads."""
        ...

    def prepare(self, info: SeqInfo, device: torch.device) -> Any:  # Any: each mixer takes back only its own
        """Index tensors and blocks of one row, on the device. For one micro-step: `attend` may change it (overlapped
        Ulysses notes there what the next layer's backward sends for this one's)."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: Any,  # Any: what this mixer's `prepare` gave
        *,
        scale: float,
        kernel: Kernel,
        window: int | None = None,
        sink: Tensor | None = None,  # [H]
        saved: "Saved | None" = None,
    ) -> Tensor:
        """Causal attention of the row's tokens; differentiable in q, k, v, sink. Collective."""
        ...


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ByWindow(Generic[T]):
    """A row's calls by window: the first layer with a new window makes them."""

    make: Callable[[int | None], T]
    _made: dict[int | None, T] = field(default_factory=dict)

    def __call__(self, window: int | None) -> T:
        if window not in self._made:
            self._made[window] = self.make(window)
        return self._made[window]


Park = Callable[[Tensor], Callable[[], Tensor]]  # puts a tensor away; the function brings it back, once


def _hold(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


class Saved:
    """One attention's out and lse, kept between a layer's first forward and its recomputation."""

    def __init__(self, park: Park = _hold) -> None:
        self._park = park
        self._kept: tuple[Callable[[], Tensor], Tensor] | None = None
        self.ahead = Ahead()  # what the recomputation sends for backward

    def put(self, out: Tensor, lse: Tensor) -> None:
        """Keeps the results of the first forward; lse is small and stays where it is."""
        self._kept = (self._park(out), lse)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The results kept, handed over once; None on a first forward."""
        kept, self._kept = self._kept, None
        return None if kept is None else (kept[0](), kept[1])


class AttentionCache:
    """The `Saved` slots of one micro-step under selective recomputation, one per attention layer.

    The first forward of a layer fills its slot; the recomputation empties it instead of attending again.
    """

    def __init__(self) -> None:
        self._slots: dict[int | str, Saved] = {}
        self.park: Park = _hold  # a backend that keeps checkpoints on the host puts its own here

    def slot(self, layer: int | str) -> Saved:
        """The slot of a layer, the same one at every call."""
        return self._slots.setdefault(layer, Saved(self.park))


class AnySize:
    """Of mixers that run at every CP size and attend by what they prepared alone."""

    __slots__ = ()

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """Every size works."""
        return lambda size: None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: Prepared,
        *,
        scale: float,
        kernel: Kernel,
        window: int | None = None,
        sink: Tensor | None = None,
        saved: Saved | None = None,
    ) -> Tensor:
        """See Mixer."""
        return core_attention(prepared, q, k, v, work=Work(kernel, scale, window), sink=sink, saved=saved)


def core_attention(
    prepared: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    work: Work,
    sink: Tensor | None = None,
    saved: Saved | None = None,
) -> Tensor:
    """The attention of `prepared`, with its gradient."""
    return _Attention.apply(q, k, v, sink, prepared, work, saved)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        prepared: Prepared,
        work: Work,
        saved: Saved | None,
    ) -> Tensor:
        kept = saved.take() if saved is not None else None
        if kept is None:
            out, lse = prepared.forward(q, k, v, work)
            if sink is not None:
                out, lse = _add_sink(out, lse, sink)
            out = out.to(q.dtype)
            if saved is not None:
                saved.put(out.detach(), lse)
        else:
            out, lse = kept
        ctx.save_for_backward(q, k, v, out, lse, *([] if sink is None else [sink]))
        ctx.prepared, ctx.work = prepared, work
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        dout = grads[0].contiguous()
        dq, dk, dv = ctx.prepared.backward(dout, q, k, v, out, lse, ctx.work)
        dsink = _sink_gradient(dout, out, lse, sinks[0]) if sinks else None
        return dq, dk, dv, dsink, None, None, None


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    logit = sink.to(lse.dtype)[:, None]  # [H, 1]
    share = torch.sigmoid(lse - logit)  # [H, T]
    return out.to(lse.dtype) * share.T[..., None], torch.logaddexp(lse, logit)


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The sink's value is 0, so its score gradient is -p_sink * delta with delta = dout . out."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T  # [H, T]
    return -((sink.to(lse.dtype)[:, None] - lse).exp() * delta).sum(-1).to(sink.dtype)


def run_forward(total: PartialSoftmax, calls: Sequence[Call], q: Tensor, k: Tensor, v: Tensor, work: Work) -> None:
    """Runs the calls and merges their outputs into `total`."""
    for call in calls:
        out, lse = work.kernel.forward(
            select(q, call.q_rows),
            select(k, call.k_rows),
            select(v, call.k_rows),
            call.block,
            scale=work.scale,
            window=work.window,
        )
        total.add(call.q_rows, out, lse, fresh=call.fresh)


@dataclass(frozen=True, slots=True, eq=False)
class Upstream:
    """What every backward call reads on the query side."""

    dout: Tensor  # [T_local, H, Dv]
    q: Tensor
    out: Tensor  # global
    lse: Tensor  # [H, T_local], global


def run_backward(
    sums: tuple[Sum, Sum, Sum], calls: Sequence[Call], side: Upstream, k: Tensor, v: Tensor, work: Work
) -> None:
    """Runs the calls' backward and adds to the sums of dq, dk, dv."""
    for call in calls:
        parts = work.kernel.backward(
            select(side.dout, call.q_rows),
            select(side.q, call.q_rows),
            select(k, call.k_rows),
            select(v, call.k_rows),
            select(side.out, call.q_rows),
            select(side.lse.T, call.q_rows).T.contiguous() if call.q_rows is not None else side.lse,
            call.block,
            scale=work.scale,
            window=work.window,
        )
        for total, part, rows in zip(sums, parts, (call.q_rows, call.k_rows, call.k_rows), strict=True):
            total.add(rows, part)


def partial_softmax(q: Tensor, v: Tensor) -> PartialSoftmax:
    """An empty result for queries q and values v."""
    assert accumulator(q.dtype) == accumulator(v.dtype), (q.dtype, v.dtype)
    return PartialSoftmax(q.shape[0], q.shape[1], v.shape[2], like=q)
