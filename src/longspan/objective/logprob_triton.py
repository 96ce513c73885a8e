"""The row arithmetic of head_rows.py as Triton kernels: one read of the logits forward, one read and one write
backward.

Same contract as head_rows (see its formulas), fp32 logits on CUDA. Forward: a program a row runs over the vocabulary
with an online maximum. Backward: a program a (row, block of the vocabulary). Columns past V are masked, row offsets
are 64-bit: 14,135 rows of 151,936 already pass 2^31. Top-k entries (few) are gathered and scattered in torch. The only
importer of triton.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# triton comes with torch's CUDA builds only, and its launch grid is a subscript on the function

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.objective.head_rows import RowGrads, Rows, RowStats, tempered, untempered_

__all__ = ["logits_gradient", "row_stats"]

STATS_BLOCK, GRADIENT_BLOCK, WARPS = 4096, 8192, 8
LOWEST = tl.constexpr(-1e30)  # stands for -inf: no inf - inf


@triton.jit
def _temper(z, inverse_temperature, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)  # tanh
    return z * inverse_temperature


@triton.jit
def _stats_kernel(
    z_ptr, z_stride, target_ptr, temperature_ptr, logprob_ptr, entropy_ptr, shift_ptr, log_sum_ptr, V, softcap,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * z_stride
    inverse = 1.0 / tl.load(temperature_ptr + row) if TEMPERED else 1.0
    m = tl.full([BLOCK], LOWEST, tl.float32)  # running maximum of each lane
    s = tl.zeros([BLOCK], tl.float32)  # sum exp(z - m)
    t = tl.zeros([BLOCK], tl.float32)  # sum exp(z - m) (z - m)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        z = _temper(tl.load(z_row + column, mask=inside, other=0.0), inverse, softcap, CAPPED)
        z = tl.where(inside, z, LOWEST)
        new = tl.maximum(m, z)
        scale, e = tl.exp(m - new), tl.where(inside, tl.exp(z - new), 0.0)
        t = scale * (t + s * (m - new)) + e * (z - new)
        s = scale * s + e
        m = new
    top = tl.max(m, 0)
    lane = tl.exp(m - top)
    total = tl.sum(s * lane, 0)
    moment = tl.sum(lane * (t + s * (m - top)), 0)
    target = tl.load(target_ptr + row)
    z_target = _temper(tl.load(z_row + target), inverse, softcap, CAPPED)
    log_sum = tl.log(total)
    tl.store(logprob_ptr + row, tl.minimum(z_target - top - log_sum, 0.0))
    tl.store(entropy_ptr + row, tl.maximum(log_sum - moment / total, 0.0))
    tl.store(shift_ptr + row, top)
    tl.store(log_sum_ptr + row, log_sum)


@triton.jit
def _gradient_kernel(
    z_ptr, z_stride, out_ptr, out_stride, target_ptr, temperature_ptr, entropy_ptr, shift_ptr, log_sum_ptr,
    g_target_ptr, g_pulled_ptr, g_entropy_ptr, V, softcap,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    raw = tl.load(z_ptr + row * z_stride + column, mask=inside, other=0.0)
    inverse = 1.0 / tl.load(temperature_ptr + row) if TEMPERED else 1.0
    z = _temper(raw, inverse, softcap, CAPPED)
    log_p = (z - tl.load(shift_ptr + row)) - tl.load(log_sum_ptr + row)
    pull = tl.load(g_pulled_ptr + row)
    if ENTROPY:
        pull += tl.load(g_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    d = -tl.exp(log_p) * pull
    d = tl.where(column == tl.load(target_ptr + row), d + tl.load(g_target_ptr + row), d) * inverse
    if CAPPED:
        tanh = 2.0 * tl.sigmoid(2.0 * raw / softcap) - 1.0
        d = d * (1.0 - tanh * tanh)
    tl.store(out_ptr + row * out_stride + column, d.to(out_ptr.dtype.element_ty), mask=inside)


def row_stats(z: Tensor, rows: Rows, into: RowStats) -> None:
    """Statistics of raw logits z [C, V] into `into`. z keeps its values."""
    if z.shape[0] == 0:
        return
    _stats_kernel[(z.shape[0],)](
        z,
        z.stride(0),
        rows.targets.contiguous(),
        z if rows.temperature is None else rows.temperature.contiguous(),
        into.logprob,
        into.entropy,
        into.shift,
        into.log_sum,
        z.shape[1],
        1.0 if rows.softcap is None else rows.softcap,
        TEMPERED=rows.temperature is not None,
        CAPPED=rows.softcap is not None,
        BLOCK=_block(z.shape[1], STATS_BLOCK),
        num_warps=WARPS,
    )
    if into.topk_logprob is not None and rows.topk_ids is not None:
        chosen = tempered(z.gather(1, rows.topk_ids), rows)
        into.topk_logprob.copy_((chosen - into.shift[:, None] - into.log_sum[:, None]).clamp_(max=0))


def logits_gradient(z: Tensor, rows: Rows, stats: RowStats, *, grads: RowGrads, out: Tensor) -> None:
    """Raw logits z [C, V] -> the gradient with respect to them, into out [C, V] (z itself, or bf16)."""
    if z.shape[0] == 0:
        return
    zero = torch.zeros_like(stats.logprob)
    on_target = zero if grads.logprob is None else grads.logprob
    pulled = on_target
    chosen = None
    if grads.topk_logprob is not None and rows.topk_ids is not None:
        pulled = pulled + grads.topk_logprob.sum(1)
        chosen = _chosen_gradient(z.gather(1, rows.topk_ids), rows, stats, grads=grads, pulled=pulled)
    block = _block(z.shape[1], GRADIENT_BLOCK)
    _gradient_kernel[(z.shape[0], triton.cdiv(z.shape[1], block))](
        z,
        z.stride(0),
        out,
        out.stride(0),
        rows.targets.contiguous(),
        z if rows.temperature is None else rows.temperature.contiguous(),
        stats.entropy,
        stats.shift,
        stats.log_sum,
        on_target.contiguous(),
        pulled.contiguous(),
        zero if grads.entropy is None else grads.entropy.contiguous(),
        z.shape[1],
        1.0 if rows.softcap is None else rows.softcap,
        TEMPERED=rows.temperature is not None,
        CAPPED=rows.softcap is not None,
        ENTROPY=grads.entropy is not None,
        BLOCK=block,
        num_warps=WARPS,
    )
    if chosen is not None and rows.topk_ids is not None:
        out.scatter_(1, rows.topk_ids, chosen.to(out.dtype))


def _chosen_gradient(z: Tensor, rows: Rows, stats: RowStats, *, grads: RowGrads, pulled: Tensor) -> Tensor:
    """The whole gradient at the top-k entries, raw logits z [C, K], in fp32: q_k - p_k must not be rounded apart.

    An id that a row names twice gets the sum in both places.
    """
    assert grads.topk_logprob is not None and rows.topk_ids is not None
    ids = rows.topk_ids
    log_p = tempered(z, rows) - stats.shift[:, None] - stats.log_sum[:, None]
    pull = pulled[:, None].expand_as(log_p)
    if grads.entropy is not None:
        pull = pull + grads.entropy[:, None] * (log_p + stats.entropy[:, None])
    same = (ids[:, :, None] == ids[:, None, :]).to(z.dtype)  # [C, K, K]
    d = (same * grads.topk_logprob[:, None, :]).sum(2) - torch.exp(log_p) * pull
    if grads.logprob is not None:
        d = d + torch.where(ids == rows.targets[:, None], grads.logprob[:, None], 0.0)
    return untempered_(d, z, rows)


def _block(vocab: int, largest: int) -> int:
    """Columns a program reads at once: a power of two, no wider than the vocabulary needs."""
    return min(largest, max(128, triton.next_power_of_2(vocab)))
