"""The kernel as its definition: softmax(q k^T * scale) v, segment by segment, any device.

f64 and f32 compute in their own dtype, bf16 and f16 in f32. GQA folds the query heads of a KV head into rows, so
keys are never repeated. Queries run in chunks, so that the scores stay below SCORES elements; a chunk of a causal
or windowed block reads only the keys that it can see. Backward recomputes the probabilities from lse
(FlashAttention-2, alg. 2), so a block of a larger softmax works as well. Not fast: no tiling over keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.mixers.kernels import Block
from longspan.mixers.precision import accumulator

__all__ = ["Reference"]

SCORES = 1 << 24  # elements of one score matrix: 64 MiB in f32


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows q0:q1 of the queries against rows k0:k1 of the keys, with the visibility of each pair."""

    q0: int
    q1: int
    k0: int
    k1: int
    hidden: Tensor | None  # [q1-q0, k1-k0] bool, None when every pair is visible


@dataclass(frozen=True, slots=True)
class Reference:
    """See the file's head."""

    name: str = "reference"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        wide = accumulator(q.dtype)
        groups = q.shape[1] // k.shape[1]
        out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=wide, device=q.device)
        for piece in _pieces(block, q.shape[1], window, q.device):
            rows = slice(piece.q0, piece.q1)
            scores = _scores(q[rows], k[piece.k0 : piece.k1], piece, groups, scale)  # [H_kv, G, q, k]
            piece_lse = torch.logsumexp(scores, -1)  # [H_kv, G, q]
            probs = _probs(scores, piece_lse)
            values = v[piece.k0 : piece.k1].to(wide).transpose(0, 1)  # [H_kv, k, Dv]
            piece_out = (probs.flatten(1, 2) @ values).unflatten(1, (groups, -1))  # [H_kv, G, q, Dv]
            out[rows] = piece_out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
            lse[:, rows] = piece_lse.flatten(0, 1)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulator(q.dtype)
        groups = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        delta = (dout.to(wide) * out.to(wide)).sum(-1)  # [Tq, H]
        for piece in _pieces(block, q.shape[1], window, q.device):
            rows, keys = slice(piece.q0, piece.q1), slice(piece.k0, piece.k1)
            scores = _scores(q[rows], k[keys], piece, groups, scale)
            probs = _probs(scores, lse[:, rows].unflatten(0, (-1, groups))).flatten(1, 2)  # [H_kv, G*q, k]
            dout_rows = _fold(dout[rows], groups).to(wide)  # [H_kv, G*q, Dv]
            dprobs = dout_rows @ v[keys].to(wide).permute(1, 2, 0)
            dscores = probs * (dprobs - _fold(delta[rows, :, None], groups)) * scale
            dq_rows = dscores @ k[keys].to(wide).transpose(0, 1)  # [H_kv, G*q, D]
            dq[rows] = dq_rows.unflatten(1, (groups, -1)).permute(2, 0, 1, 3).flatten(1, 2)
            dk[keys] += (dscores.transpose(1, 2) @ _fold(q[rows], groups).to(wide)).transpose(0, 1)
            dv[keys] += (probs.transpose(1, 2) @ dout_rows).transpose(0, 1)
        return dq, dk, dv


def _fold(x: Tensor, groups: int) -> Tensor:
    """[q, H, D] -> [H_kv, G*q, D]: the query heads of one KV head become rows."""
    return x.unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, piece: Piece, groups: int, scale: float) -> Tensor:
    wide = accumulator(q.dtype)
    scores = (_fold(q, groups).to(wide) @ k.to(wide).permute(1, 2, 0)) * scale
    scores = scores.unflatten(1, (groups, -1))
    return scores if piece.hidden is None else scores.masked_fill(piece.hidden, float("-inf"))


def _probs(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows without keys: there both are -inf and the difference would be NaN."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()


def _pieces(block: Block, heads: int, window: int | None, device: torch.device) -> Iterator[Piece]:
    lens_q = _lengths(block.lens_q, block.cu_q)
    lens_k = _lengths(block.lens_k, block.cu_k)
    first_q = first_k = 0
    for len_q, len_k, offset in zip(lens_q, lens_k, block.offset or (0,) * len(lens_q), strict=True):
        step = max(1, SCORES // max(1, heads * len_k))
        for start in range(0, len_q, step):
            stop = min(start + step, len_q)
            last = min(len_k, stop + len_k - len_q) if block.kind == "causal" else len_k
            first = 0 if window is None else min(max(0, start + offset - window + 1), len_k)
            if last <= first:
                continue
            hidden = _hidden(block.kind, window, start, stop, first, last, len_k - len_q, offset, device)
            yield Piece(first_q + start, first_q + stop, first_k + first, first_k + last, hidden)
        first_q, first_k = first_q + len_q, first_k + len_k


def _hidden(
    kind: str,
    window: int | None,
    start: int,
    stop: int,
    first: int,
    last: int,
    diagonal: int,
    offset: int,
    device: torch.device,
) -> Tensor | None:
    if kind == "full" and window is None:
        return None
    query = torch.arange(start, stop, device=device)[:, None]
    key = torch.arange(first, last, device=device)[None]
    hidden = torch.zeros(stop - start, last - first, dtype=torch.bool, device=device)
    if kind == "causal":
        hidden = key > query + diagonal
    if window is not None:
        hidden = hidden | (key <= query + offset - window)
    return hidden


def _lengths(lens: tuple[int, ...] | None, cu: Tensor) -> tuple[int, ...]:
    return tuple(cu.diff().tolist()) if lens is None else lens
