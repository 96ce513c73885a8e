"""The kernel as its definition: softmax(q k^T * scale) v, segment by segment, any device.

f64 and f32 compute in their own dtype, bf16 and f16 in f32. GQA folds the query heads of a KV head into rows, so
keys are never repeated. Segments of equal lengths run as one batched matmul (256 short rows: one call, not 256).
Queries run in chunks, so that the scores stay below SCORES elements; a chunk of a causal or windowed block reads only
the keys that it can see. Backward recomputes the probabilities from lse (FlashAttention-2, alg. 2), so a block of a
larger softmax works as well. Not fast: no tiling over keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.mixers.kernels import Block
from longspan.mixers.precision import accumulator

__all__ = ["Reference"]

SCORES = 1 << 20  # elements of one score matrix, 4 MiB in f32: larger ones measure no faster on a CPU


@dataclass(frozen=True, slots=True)
class Piece:
    """B equal runs of queries against B equal runs of keys, with the visibility of each pair."""

    queries: Tensor  # [B, q] int64: rows of q
    keys: Tensor  # [B, k] int64: rows of k and v
    hidden: Tensor | None  # [q, k] bool, None when every pair is visible


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
        lse = torch.full((q.shape[0], q.shape[1]), float("-inf"), dtype=wide, device=q.device)
        for piece in _pieces(block, q.shape[1], window, q.device):
            scores = _scores(q[piece.queries], k[piece.keys], piece, groups, scale)  # [B, H_kv, G*q, k]
            piece_lse = torch.logsumexp(scores, -1, keepdim=True)  # [B, H_kv, G*q, 1]
            values = v[piece.keys].to(wide).transpose(1, 2)  # [B, H_kv, k, Dv]
            out[piece.queries] = _unfold(_probs(scores, piece_lse) @ values, groups).to(q.dtype)
            lse[piece.queries] = _unfold(piece_lse, groups)[..., 0]
        return out, lse.t().contiguous()

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
        lse_rows = lse.t()  # [Tq, H]
        for piece in _pieces(block, q.shape[1], window, q.device):
            rows, keys = piece.queries, piece.keys
            scores = _scores(q[rows], k[keys], piece, groups, scale)
            probs = _probs(scores, _fold(lse_rows[rows][..., None], groups))  # [B, H_kv, G*q, k]
            dout_rows = _fold(dout[rows], groups).to(wide)  # [B, H_kv, G*q, Dv]
            dprobs = dout_rows @ v[keys].to(wide).permute(0, 2, 3, 1)
            dscores = probs * (dprobs - _fold(delta[rows][..., None], groups)) * scale
            # queries and keys of a piece are distinct rows, so plain index assignment and addition are exact
            dq[rows] = _unfold(dscores @ k[keys].to(wide).transpose(1, 2), groups)
            dk[keys] += (dscores.transpose(2, 3) @ _fold(q[rows], groups).to(wide)).transpose(1, 2)
            dv[keys] += (probs.transpose(2, 3) @ dout_rows).transpose(1, 2)
        return dq, dk, dv


def _fold(x: Tensor, groups: int) -> Tensor:
    """[B, q, H, D] -> [B, H_kv, G*q, D]: the query heads of one KV head become rows."""
    return x.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold(x: Tensor, groups: int) -> Tensor:
    """[B, H_kv, G*q, D] -> [B, q, H, D]."""
    return x.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, piece: Piece, groups: int, scale: float) -> Tensor:
    """[B, H_kv, G*q, k]"""
    wide = accumulator(q.dtype)
    scores = (_fold(q, groups).to(wide) @ k.to(wide).permute(0, 2, 3, 1)) * scale
    if piece.hidden is None:
        return scores
    return scores.unflatten(2, (groups, -1)).masked_fill(piece.hidden, float("-inf")).flatten(2, 3)


def _probs(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 in rows without keys: there both are -inf and the difference would be NaN."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()


def _pieces(block: Block, heads: int, window: int | None, device: torch.device) -> Iterator[Piece]:
    """The block's segments, those of equal lengths together, long ones in chunks of queries."""
    lens_q, lens_k = _lengths(block.lens_q, block.cu_q), _lengths(block.lens_k, block.cu_k)
    alike: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    first_q = first_k = 0
    for len_q, len_k, offset in zip(lens_q, lens_k, block.offset or (0,) * len(lens_q), strict=True):
        shape = (len_q, len_k, 0 if window is None else offset)
        alike.setdefault(shape, []).append((first_q, first_k))
        first_q, first_k = first_q + len_q, first_k + len_k
    for (len_q, len_k, offset), firsts in alike.items():
        if len_q == 0 or len_k == 0:
            continue
        together = max(1, SCORES // (heads * len_q * len_k))
        step = max(1, SCORES // (heads * len_k))
        for low in range(0, len(firsts), together):
            starts = torch.tensor(firsts[low : low + together], device=device)  # [B, 2]
            for start in range(0, len_q, step):
                stop = min(start + step, len_q)
                last = min(len_k, stop + len_k - len_q) if block.kind == "causal" else len_k
                first = 0 if window is None else min(max(0, start + offset - window + 1), len_k)
                if last > first:
                    yield Piece(
                        starts[:, :1] + torch.arange(start, stop, device=device),
                        starts[:, 1:] + torch.arange(first, last, device=device),
                        _hidden(block.kind, window, start, stop, first, last, len_k - len_q, offset, device),
                    )


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
