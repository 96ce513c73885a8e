"""Row arithmetic of the LM head on one chunk of logits [C, V], in plain torch: statistics forward, dlogits backward.

Works on blocks of rows so that temporaries stay at a fraction of the chunk. With z the logits after bias, soft cap and
temperature, m their row maximum and s = sum exp(z - m):
    logprob = (z_y - m) - log s   (<= 0 by construction)      entropy = log s - sum p (z - m)
    dz = g_y [onehot(y) - p] + sum_k g_k [onehot(k) - p] - g_e p (log p + entropy)
KL of two rows of logits with distributions p (student, differentiated) and q (teacher):
    forward: sum q (log q - log p)   dz = g (p - q)          reverse: sum p (log p - log q)   dz = g p (log p - log q - KL)
The same arithmetic as Triton kernels: logprob_triton.py. This file does no matmul and knows no gradient of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "KLStats",
    "RowGrads",
    "RowStats",
    "Rows",
    "blocks",
    "kl_gradient",
    "kl_stats",
    "logits_gradient",
    "row_stats",
    "row_stats_buffers",
    "tempered",
    "untempered_",
]

BLOCK_BYTES = 2**20  # temporaries of one block of rows: a few times this


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the rows of a chunk are asked for."""

    targets: Tensor  # [C] int64, inside the vocabulary
    temperature: Tensor | None  # [C], logits dtype
    softcap: float | None
    topk_ids: Tensor | None  # [C, K] int64, inside the vocabulary

    def take(self, part: slice) -> "Rows":
        return Rows(
            self.targets[part],
            None if self.temperature is None else self.temperature[part],
            self.softcap,
            None if self.topk_ids is None else self.topk_ids[part],
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowStats:
    """Per-row results, logits dtype. shift and log_sum are what backward needs to form p again."""

    logprob: Tensor  # [C]
    entropy: Tensor  # [C]
    shift: Tensor  # [C] m
    log_sum: Tensor  # [C] log s
    topk_logprob: Tensor | None  # [C, K]

    def take(self, part: slice) -> "RowStats":
        topk = None if self.topk_logprob is None else self.topk_logprob[part]
        return RowStats(self.logprob[part], self.entropy[part], self.shift[part], self.log_sum[part], topk)


@dataclass(frozen=True, slots=True, eq=False)
class RowGrads:
    """Upstream gradients of a chunk's results; None: that result was not used."""

    logprob: Tensor | None  # [C]
    entropy: Tensor | None  # [C]
    topk_logprob: Tensor | None  # [C, K]

    def take(self, part: slice) -> "RowGrads":
        logprob, entropy, topk = (
            None if x is None else x[part] for x in (self.logprob, self.entropy, self.topk_logprob)
        )
        return RowGrads(logprob, entropy, topk)


@dataclass(frozen=True, slots=True, eq=False)
class KLStats:
    """What backward keeps of a chunk's pairs of rows. A row's log-softmax is (z - shift) - log_sum, z tempered."""

    kl: Tensor  # [C]
    shift: Tensor  # [2, C] row maxima of student and teacher
    log_sum: Tensor  # [2, C]

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> "KLStats":
        return cls(like.new_empty(rows), like.new_empty(2, rows), like.new_empty(2, rows))

    def take(self, part: slice) -> "KLStats":
        return KLStats(self.kl[part], self.shift[:, part], self.log_sum[:, part])


def row_stats_buffers(rows: int, topk: int | None, like: Tensor) -> RowStats:
    """Empty results for `rows` rows."""
    logprob, entropy, shift, log_sum = (like.new_empty(rows) for _ in range(4))
    return RowStats(logprob, entropy, shift, log_sum, None if topk is None else like.new_empty(rows, topk))


def blocks(z: Tensor) -> list[slice]:
    step = max(1, BLOCK_BYTES // max(1, z.shape[1] * z.element_size()))
    return [slice(a, min(a + step, z.shape[0])) for a in range(0, z.shape[0], step)]


def row_stats(z: Tensor, rows: Rows, into: RowStats) -> None:
    """Statistics of raw logits z [C, V] (bias added) into `into`. z keeps its values."""
    for part in blocks(z):
        _block_stats(z[part], rows.take(part), into.take(part))


def tempered(z: Tensor, rows: Rows) -> Tensor:
    """softcap * tanh(z / softcap) / temperature, out of place where there is something to do."""
    if rows.softcap is not None:
        z = torch.tanh(z / rows.softcap) * rows.softcap
    return z if rows.temperature is None else z / rows.temperature[:, None]


def _block_stats(z: Tensor, rows: Rows, into: RowStats) -> None:
    z = tempered(z, rows)
    shift = z.amax(1)
    z = z - shift[:, None]
    exp = torch.exp(z)
    total = exp.sum(1)
    log_sum = torch.log(total)
    into.shift.copy_(shift)
    into.log_sum.copy_(log_sum)
    into.logprob.copy_(z.gather(1, rows.targets[:, None])[:, 0] - log_sum)
    into.entropy.copy_((log_sum - exp.mul_(z).sum(1) / total).clamp_(min=0))
    if into.topk_logprob is not None and rows.topk_ids is not None:
        into.topk_logprob.copy_(z.gather(1, rows.topk_ids) - log_sum[:, None])


def logits_gradient(z: Tensor, rows: Rows, stats: RowStats, *, grads: RowGrads, out: Tensor) -> None:
    """Raw logits z [C, V] -> the gradient with respect to them, into out [C, V] (z itself, or a narrower dtype)."""
    for part in blocks(z):
        out[part] = _block_gradient(z[part], rows.take(part), stats.take(part), grads.take(part))


def _block_gradient(z: Tensor, rows: Rows, stats: RowStats, grads: RowGrads) -> Tensor:
    log_p = (tempered(z, rows) - stats.shift[:, None]).sub_(stats.log_sum[:, None])
    p = torch.exp(log_p)
    pulled = torch.zeros_like(stats.logprob)  # total upstream gradient on log-probs: each pulls -p
    if grads.logprob is not None:
        pulled = pulled + grads.logprob
    if grads.topk_logprob is not None:
        pulled = pulled + grads.topk_logprob.sum(1)
    if grads.entropy is None:
        d = p.mul_(-pulled[:, None])
    else:
        d = log_p.add_(stats.entropy[:, None]).mul_(grads.entropy[:, None]).add_(pulled[:, None]).mul_(p).neg_()
    if grads.logprob is not None:
        d.scatter_add_(1, rows.targets[:, None], grads.logprob[:, None])
    if grads.topk_logprob is not None and rows.topk_ids is not None:
        d.scatter_add_(1, rows.topk_ids, grads.topk_logprob)
    return untempered_(d, z, rows)


def untempered_(d: Tensor, z: Tensor, rows: Rows) -> Tensor:
    """Gradient with respect to tempered(z) -> with respect to raw z, in place in d."""
    if rows.temperature is not None:
        d.div_(rows.temperature[:, None])
    if rows.softcap is not None:
        d.mul_(1 - torch.tanh(z / rows.softcap).square())
    return d


def kl_stats(z: Tensor, ours: Rows, t: Tensor, theirs: Rows, *, reverse: bool, into: KLStats) -> None:
    """KL of raw student logits z and teacher logits t, both [C, V], into `into`. Both keep their values."""
    for part in blocks(z):
        own = into.take(part)
        log_p = _log_softmax(z[part], ours.take(part), own, 0)
        log_q = _log_softmax(t[part], theirs.take(part), own, 1)
        over, other = (log_p, log_q) if reverse else (log_q, log_p)
        own.kl.copy_((torch.exp(over) * (over - other)).sum(1))


def _log_softmax(z: Tensor, rows: Rows, into: KLStats, side: int) -> Tensor:
    z = tempered(z, rows)
    shift = z.amax(1)
    z = z - shift[:, None]
    log_sum = torch.log(torch.exp(z).sum(1))
    into.shift[side].copy_(shift)
    into.log_sum[side].copy_(log_sum)
    return z.sub_(log_sum[:, None])


def kl_gradient(
    z: Tensor, ours: Rows, t: Tensor, theirs: Rows, *, reverse: bool, stats: KLStats, upstream: Tensor, out: Tensor
) -> None:
    """upstream [C] times dKL / dz, raw student logits, into out [C, V]: z itself, or a narrower view of its rows."""
    for part in blocks(z):
        own, g, rows = stats.take(part), upstream[part], ours.take(part)
        log_p, log_q = (
            (tempered(x[part], side.take(part)) - own.shift[number, :, None]).sub_(own.log_sum[number, :, None])
            for number, (x, side) in enumerate(((z, ours), (t, theirs)))
        )
        p = torch.exp(log_p)
        pull = p * (log_p - log_q - own.kl[:, None]) if reverse else p - torch.exp(log_q)
        out[part] = untempered_(pull.mul_(g[:, None]), z[part], rows)
