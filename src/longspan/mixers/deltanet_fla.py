"""The gated delta rule's `DeltaKernel` on fla-core's Triton kernels (CUDA, bf16 and f16). The only file that imports
fla.

Written against fla-core 0.6.0 and its kernel-level functions, in the order of `chunk_gated_delta_rule_fwd` and `_bwd`
of fla/ops/gated_delta_rule/chunk.py, because the exchange between ranks falls between two of them:

    forward   solve the chunks (w, u) | maps: states from [0 | I] with values [u | 0] | exchange | states, outputs
    backward  w, u, states again      | gradients of initial states with none from later | exchange | all gradients

Values widened to [u | 0] give A and B in one scan of D_v + D_k columns; a scan over one long document is bound by its
serial chunks and leaves most SMs idle, so the extra columns run beside it; shorter pieces to fill them lose more than
they gain (deltanet_pieces.py). Chunks start at piece starts. Kernels autotune for a length's order of magnitude: rows
end in `tail` inert tokens, at most one part in eight, so that lengths repeat. Convolution: fla's, over the halo as tokens
of the first document, never over its initial state (bugs B10). With TileLang in fla's place of chunk_bwd_dqkwg, its race
is mended first (deltanet_tile.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.l2norm import l2norm
from fla.ops.common.backends.tilelang import CommonTileLangBackend
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from longspan.layout.travel import sent
from longspan.mixers.deltanet_pieces import Pieces
from longspan.mixers.deltanet_tile import mended

__all__ = ["FlaDeltaKernel"]

CHUNK = 64
SMALLEST = 1024  # tokens; shorter rows are filled up to it


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring pieces as fla takes sequences; tokens count from `start`."""

    first: int  # number of the first piece
    start: int  # its first token
    stop: int
    cu: Tensor  # [n + 1] int64 on the device
    chunks: Tensor  # [chunks, 2] int64 on the device: sequence, chunk of it
    offsets: Tensor  # [n + 1] int64 on the device: chunks before each sequence

    @property
    def num(self) -> int:
        return self.cu.shape[0] - 1

    def names(self) -> dict[str, object]:
        return {"cu_seqlens": self.cu, "chunk_indices": self.chunks}


def make_span(bounds: Sequence[int], device: torch.device, *, first: int = 0) -> Span:
    """bounds: of the pieces, in tokens of the row."""
    counts = [-(-(end - start) // CHUNK) for start, end in pairwise(bounds)]
    chunks = [(sequence, chunk) for sequence, count in enumerate(counts) for chunk in range(count)]
    offsets = list(accumulate(counts, initial=0))
    cu = [bound - bounds[0] for bound in bounds]
    on_device = [sent(torch.tensor(x), device) for x in (cu, chunks, offsets)]
    return Span(first, bounds[0], bounds[-1], *on_device)


class FlaDeltaKernel:
    """One rank's pieces."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        tokens = pieces.bounds[-1]
        self.tail = padded(tokens) - tokens
        self.num = pieces.num
        self.whole = make_span([*pieces.bounds, *([tokens + self.tail] if self.tail else [])], device)
        self.sources = spans(pieces.bounds, pieces.sources, device)
        self.targets = spans(pieces.bounds, pieces.targets, device)
        self.documents = [pieces.bounds[i] for i in range(1, pieces.num) if not pieces.carried[i]]
        self.reach = int(pieces.positions[0])  # tokens of the first document that lie to the left
        self.tokens, self.device = tokens, device
        self.convolved: dict[int, Span] = {}  # by kernel width

    def unit(self, x: Tensor) -> Tensor:
        return l2norm(x.contiguous())

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[1]
        if width not in self.convolved:
            halo = width - 1
            before = halo - min(self.reach, halo)  # rows of the halo that the first document does not see
            starts = [before, *(start + halo for start in self.documents), self.tokens + halo]
            bounds = sorted({0, *starts, self.tokens + halo + self.tail})
            self.convolved[width] = make_span(bounds, self.device)
        span = self.convolved[width]
        out, _ = causal_conv1d(x[None], weight, activation="silu", **span.names())
        return out[0, width - 1 :]

    def forward(self, inputs: Sequence[Tensor]) -> "_Forward":
        return _Forward(self, inputs)

    def backward(
        self, gradient: Tensor, inputs: Sequence[Tensor], initial: Tensor | None, kept: Sequence[Tensor]
    ) -> "_Backward":
        mend_tile_kernel()
        return _Backward(self, gradient, inputs, initial, kept)

    def states(self, some: Tensor | None) -> Tensor | None:
        """[n, ...] -> one more for the tail's own sequence, where there is a tail."""
        if some is None or not self.tail:
            return some
        return torch.cat([some, some.new_zeros(1, *some.shape[1:])])


class _Forward:
    def __init__(self, kernel: FlaDeltaKernel, inputs: Sequence[Tensor]) -> None:
        self.kernel = kernel
        self.q, self.k, self.v, g, beta = (x.contiguous()[None] for x in inputs)
        names = kernel.whole.names()
        self.g = chunk_local_cumsum(g, chunk_size=CHUNK, scale=RCP_LN2, **names)  # base 2
        self.w, self.u, self.inverse = chunk_gated_delta_rule_fwd_intra(
            k=self.k, v=self.v, g=self.g, beta=beta, chunk_size=CHUNK, **names
        )

    def maps(self, pieces: Sequence[int], *, transition: bool) -> tuple[Tensor | None, Tensor]:
        assert sum(span.num for span in self.kernel.sources) == len(pieces)
        finals = torch.cat([self._finals(span, transition=transition) for span in self.kernel.sources])
        value_dim = self.v.shape[3]
        return (finals[..., value_dim:] if transition else None), finals[..., :value_dim]

    def _finals(self, span: Span, *, transition: bool) -> Tensor:
        """[n, H, D_k, D_v + D_k], without `transition` [n, H, D_k, D_v]."""
        k, w, u, g = (x[:, span.start : span.stop] for x in (self.k, self.w, self.u, self.g))
        heads, key_dim, value_dim = u.shape[2], k.shape[3], u.shape[3]
        start = None
        if transition:
            u = torch.nn.functional.pad(u, (0, key_dim))
            start = torch.eye(key_dim, value_dim + key_dim, device=u.device).roll(value_dim, 1)  # [0 | I]
            start = start.expand(span.num, heads, -1, -1).contiguous()
        _, _, final = chunk_gated_delta_rule_fwd_h(
            k=k,
            w=w,
            u=u,
            g=g,
            initial_state=start,
            output_final_state=True,
            chunk_size=CHUNK,
            save_new_value=False,
            chunk_offsets=span.offsets,
            **span.names(),
        )
        return final

    def outputs(self, initial: Tensor | None) -> Tensor:
        whole = self.kernel.whole
        states, values, _ = chunk_gated_delta_rule_fwd_h(
            k=self.k,
            w=self.w,
            u=self.u,
            g=self.g,
            initial_state=self.kernel.states(initial),
            output_final_state=False,
            chunk_size=CHUNK,
            chunk_offsets=whole.offsets,
            **whole.names(),
        )
        scale = self.k.shape[3] ** -0.5
        out = chunk_fwd_o(
            q=self.q, k=self.k, v=values, h=states, g=self.g, scale=scale, chunk_size=CHUNK, **whole.names()
        )
        return out[0].to(self.v.dtype)

    def kept(self) -> tuple[Tensor, ...]:
        return self.g, self.inverse


class _Backward:
    def __init__(
        self,
        kernel: FlaDeltaKernel,
        gradient: Tensor,
        inputs: Sequence[Tensor],
        initial: Tensor | None,
        kept: Sequence[Tensor],
    ) -> None:
        self.kernel = kernel
        self.q, self.k, self.v, _, self.beta = (x.contiguous()[None] for x in inputs)
        self.g, self.inverse = kept
        self.gradient = gradient.contiguous()[None]
        self.initial = kernel.states(initial)
        self.scale = self.k.shape[3] ** -0.5
        whole = kernel.whole
        self.w, u = recompute_w_u_fwd(k=self.k, v=self.v, beta=self.beta, A=self.inverse, g=self.g, **whole.names())
        self.states, self.values, _ = chunk_gated_delta_rule_fwd_h(
            k=self.k,
            w=self.w,
            u=u,
            g=self.g,
            initial_state=self.initial,
            output_final_state=False,
            chunk_size=CHUNK,
            chunk_offsets=whole.offsets,
            **whole.names(),
        )
        self.dv = chunk_bwd_dv_local(
            q=self.q, k=self.k, g=self.g, do=self.gradient, scale=self.scale, chunk_size=CHUNK, **whole.names()
        )

    def _scan(self, span: Span, initial: Tensor | None, final: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Backwards over the chunks of `span`: gradients of states, of the initial states, of values."""
        parts = (x[:, span.start : span.stop] for x in (self.q, self.k, self.w, self.g, self.gradient, self.dv))
        q, k, w, g, gradient, dv = parts
        return chunk_gated_delta_rule_bwd_dhu(
            q=q,
            k=k,
            w=w,
            g=g,
            h0=initial,
            dht=final,
            do=gradient,
            dv=dv,
            scale=self.scale,
            chunk_size=CHUNK,
            chunk_offsets=span.offsets,
            **span.names(),
        )

    def state_gradients(self, pieces: Sequence[int]) -> Tensor:
        assert self.initial is not None and sum(span.num for span in self.kernel.targets) == len(pieces)
        found = [self._scan(s, self.initial[s.first : s.first + s.num], None)[1] for s in self.kernel.targets]
        return torch.cat([gradient for gradient in found if gradient is not None])

    def gradients(self, final: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        whole = self.kernel.whole
        dstates, _, dvalues = self._scan(whole, self.initial, self.kernel.states(final))
        dq, dk, dw, dg = chunk_bwd_dqkwg(
            q=self.q,
            k=self.k,
            v=self.values,
            w=self.w,
            g=self.g,
            h=self.states,
            dv=dvalues,
            do=self.gradient,
            dh=dstates,
            scale=self.scale,
            chunk_size=CHUNK,
            **whole.names(),
        )
        dk_more, dv, dbeta, dg_more = prepare_wy_repr_bwd(
            k=self.k,
            v=self.v,
            beta=self.beta,
            g=self.g,
            A=self.inverse,
            dw=dw,
            du=dvalues,
            **whole.names(),
        )
        dg = chunk_local_cumsum(dg + dg_more, chunk_size=CHUNK, reverse=True, **whole.names())
        found = (dq, dk + dk_more, dv, dg, dbeta)
        wanted = (self.q, self.k, self.v, self.g, self.beta)
        dq, dk, dv, dg, dbeta = (x[0].to(like.dtype) for x, like in zip(found, wanted, strict=True))
        return dq, dk, dv, dg, dbeta


@cache
def mend_tile_kernel() -> None:
    """Put fla's TileLang kernel without its race in place, where fla would take that kernel; for the whole process."""
    backend = CommonTileLangBackend()
    if backend.is_available() and backend.is_enabled():
        from fla.ops.common.backends.tilelang import chunk_bwd  # imports TileLang

        chunk_bwd.chunk_bwd_dqkwg_tilelang = mended(chunk_bwd).chunk_bwd_dqkwg_tilelang


def spans(bounds: Sequence[int], pieces: Sequence[int], device: torch.device) -> list[Span]:
    """Runs of neighbouring numbers in `pieces` (ascending)."""
    runs: list[list[int]] = []
    for piece in pieces:
        if runs and runs[-1][-1] == piece - 1:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [make_span(bounds[run[0] : run[-1] + 2], device, first=run[0]) for run in runs]


def padded(tokens: int) -> int:
    """The next length of a ladder of sixteen steps an octave."""
    step = max(SMALLEST, 2 ** (math.floor(math.log2(tokens)) - 4)) if tokens > SMALLEST else SMALLEST
    return -(-tokens // step) * step
