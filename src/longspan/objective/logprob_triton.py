"""The row arithmetic of head_rows.py as Triton kernels: one read of the logits forward, one read and one write
backward.

Same contract as head_rows (see its formulas), fp32 logits on CUDA, a program a row. Forward: an online maximum per lane
of a tile [UNROLL, LANES], so that an entry costs 1 + 1/UNROLL exponentials (14.8 -> 10.2 ms at T = 65,536, V = 151,936
on an H200; 9.3 ms is the floor of reading). Backward: the gradient may go over the logits, also in a narrower dtype, as
`GradientSink.space` asks. Columns past V are masked, row offsets are 64-bit: 14,135 rows of 151,936 already pass 2^31.
Top-k entries (few) are gathered and scattered in torch. The only importer of triton.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# triton comes with torch's CUDA builds only, and its launch grid is a subscript on the function

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.objective.head_rows import KLStats, RowGrads, Rows, RowStats, tempered, untempered_

__all__ = ["kl_gradient", "kl_stats", "logits_gradient", "row_stats"]

UNROLL, LANES, STATS_WARPS = 8, 1024, 8  # 32 threads * 8 warps * 4 adjacent f32: 16-byte loads
GRADIENT_BLOCK, GRADIENT_WARPS = 16384, 16
LOWEST = tl.constexpr(-1e30)  # stands for -inf: no inf - inf


@triton.jit
def _temper(z, inverse_temperature, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        z = softcap * (2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0)  # tanh
    return z * inverse_temperature


@triton.jit
def _absorb(m, s, t, z, inside, MASKED: tl.constexpr):
    """A tile z [UNROLL, LANES] into each lane's running maximum m, sum exp(z - m) and sum exp(z - m) (z - m)."""
    new = tl.maximum(m, tl.max(z, 0))
    z = z - new[None, :]
    e = tl.exp(z)
    if MASKED:
        e = tl.where(inside, e, 0.0)
    scale = tl.exp(m - new)
    t = scale * (t + s * (m - new)) + tl.sum(e * z, 0)
    s = scale * s + tl.sum(e, 0)
    return new, s, t


@triton.jit
def _stats_kernel(
    z_ptr, z_stride, target_ptr, temperature_ptr, logprob_ptr, entropy_ptr, shift_ptr, log_sum_ptr, V, softcap,
    TEMPERED: tl.constexpr, CAPPED: tl.constexpr, UNROLL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * z_stride
    inverse = 1.0 / tl.load(temperature_ptr + row) if TEMPERED else 1.0
    m = tl.full([LANES], LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    t = tl.zeros([LANES], tl.float32)
    tile = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = V // (UNROLL * LANES) * (UNROLL * LANES)
    for start in range(0, whole, UNROLL * LANES):
        z = _temper(tl.load(z_row + start + tile), inverse, softcap, CAPPED)
        m, s, t = _absorb(m, s, t, z, tile < V, False)
    if whole < V:
        inside = whole + tile < V
        z = _temper(tl.load(z_row + whole + tile, mask=inside, other=0.0), inverse, softcap, CAPPED)
        m, s, t = _absorb(m, s, t, tl.where(inside, z, LOWEST), inside, True)
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
    """out may share the bytes of z: entry i of out ends at or before entry i of z and blocks go upwards, so a block's
    stores reach only entries that were read, once every warp has read its part (the barrier)."""
    row = tl.program_id(0).to(tl.int64)
    z_row, out_row = z_ptr + row * z_stride, out_ptr + row * out_stride
    inverse = 1.0 / tl.load(temperature_ptr + row) if TEMPERED else 1.0
    shift, log_sum = tl.load(shift_ptr + row), tl.load(log_sum_ptr + row)
    target, g_target, pulled = tl.load(target_ptr + row), tl.load(g_target_ptr + row), tl.load(g_pulled_ptr + row)
    g_entropy = tl.load(g_entropy_ptr + row) if ENTROPY else 0.0
    entropy = tl.load(entropy_ptr + row) if ENTROPY else 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        raw = tl.load(z_row + column, mask=inside, other=0.0)
        tl.debug_barrier()
        log_p = (_temper(raw, inverse, softcap, CAPPED) - shift) - log_sum
        pull = pulled
        if ENTROPY:
            pull = pulled + g_entropy * (log_p + entropy)
        d = -tl.exp(log_p) * pull
        d = tl.where(column == target, d + g_target, d) * inverse
        if CAPPED:
            tanh = 2.0 * tl.sigmoid(2.0 * raw / softcap) - 1.0
            d = d * (1.0 - tanh * tanh)
        tl.store(out_row + column, d.to(out_ptr.dtype.element_ty), mask=inside)


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
        UNROLL=UNROLL,
        LANES=LANES,
        num_warps=STATS_WARPS,
    )
    if into.topk_logprob is not None and rows.topk_ids is not None:
        chosen = tempered(z.gather(1, rows.topk_ids), rows)
        into.topk_logprob.copy_((chosen - into.shift[:, None] - into.log_sum[:, None]).clamp_(max=0))


def logits_gradient(z: Tensor, rows: Rows, stats: RowStats, *, grads: RowGrads, out: Tensor) -> None:
    """Raw logits z [C, V] -> the gradient with respect to them, into out [C, V]: z, a narrow view of it, or apart."""
    if z.shape[0] == 0:
        return
    zero = torch.zeros_like(stats.logprob)
    on_target = zero if grads.logprob is None else grads.logprob
    pulled = on_target
    chosen = None
    if grads.topk_logprob is not None and rows.topk_ids is not None:
        pulled = pulled + grads.topk_logprob.sum(1)
        chosen = _chosen_gradient(z.gather(1, rows.topk_ids), rows, stats, grads=grads, pulled=pulled)
    _gradient_kernel[(z.shape[0],)](
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
        BLOCK=min(GRADIENT_BLOCK, max(128, triton.next_power_of_2(z.shape[1]))),
        num_warps=GRADIENT_WARPS,
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


# KL of two rows ---------------------------------------------------------------------------------------------


@triton.jit
def _absorb_pair(m, s, u, n, r, a, b, inside, MASKED: tl.constexpr):
    """Tiles a and b [UNROLL, LANES] into each lane's maximum m, sum exp(a - m) and sum exp(a - m) (a - b), and into the
    maximum n and sum exp(b - n)."""
    new, other = tl.maximum(m, tl.max(a, 0)), tl.maximum(n, tl.max(b, 0))
    e, f = tl.exp(a - new[None, :]), tl.exp(b - other[None, :])
    if MASKED:
        e, f = tl.where(inside, e, 0.0), tl.where(inside, f, 0.0)
    scale = tl.exp(m - new)
    s = scale * s + tl.sum(e, 0)
    u = scale * u + tl.sum(e * (a - b), 0)
    r = tl.exp(n - other) * r + tl.sum(f, 0)
    return new, s, u, other, r


@triton.jit
def _kl_stats_kernel(
    a_ptr, a_stride, b_ptr, b_stride, temperature_ptr, kl_ptr, a_shift_ptr, a_log_sum_ptr, b_shift_ptr, b_log_sum_ptr,
    V, a_softcap, b_softcap, TEMPERED: tl.constexpr, A_CAPPED: tl.constexpr, B_CAPPED: tl.constexpr,
    UNROLL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """KL(softmax a || softmax b)."""
    row = tl.program_id(0).to(tl.int64)
    a_row, b_row = a_ptr + row * a_stride, b_ptr + row * b_stride
    inverse = 1.0 / tl.load(temperature_ptr + row) if TEMPERED else 1.0
    m, n = tl.full([LANES], LOWEST, tl.float32), tl.full([LANES], LOWEST, tl.float32)
    s, u, r = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    tile = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = V // (UNROLL * LANES) * (UNROLL * LANES)
    for start in range(0, whole, UNROLL * LANES):
        a = _temper(tl.load(a_row + start + tile), inverse, a_softcap, A_CAPPED)
        b = _temper(tl.load(b_row + start + tile), inverse, b_softcap, B_CAPPED)
        m, s, u, n, r = _absorb_pair(m, s, u, n, r, a, b, tile < V, False)
    if whole < V:
        inside = whole + tile < V
        a = _temper(tl.load(a_row + whole + tile, mask=inside, other=0.0), inverse, a_softcap, A_CAPPED)
        b = _temper(tl.load(b_row + whole + tile, mask=inside, other=0.0), inverse, b_softcap, B_CAPPED)
        a, b = tl.where(inside, a, LOWEST), tl.where(inside, b, LOWEST)
        m, s, u, n, r = _absorb_pair(m, s, u, n, r, a, b, inside, True)
    a_top, b_top = tl.max(m, 0), tl.max(n, 0)
    lane = tl.exp(m - a_top)
    a_sum, b_sum = tl.sum(s * lane, 0), tl.sum(r * tl.exp(n - b_top), 0)
    a_log, b_log = tl.log(a_sum), tl.log(b_sum)
    kl = tl.sum(u * lane, 0) / a_sum - ((a_top - b_top) + (a_log - b_log))
    tl.store(kl_ptr + row, tl.maximum(kl, 0.0))
    tl.store(a_shift_ptr + row, a_top)
    tl.store(a_log_sum_ptr + row, a_log)
    tl.store(b_shift_ptr + row, b_top)
    tl.store(b_log_sum_ptr + row, b_log)


@triton.jit
def _kl_gradient_kernel(
    z_ptr, z_stride, t_ptr, t_stride, out_ptr, out_stride, temperature_ptr, kl_ptr,
    z_shift_ptr, z_log_sum_ptr, t_shift_ptr, t_log_sum_ptr, upstream_ptr, V, z_softcap, t_softcap,
    TEMPERED: tl.constexpr, Z_CAPPED: tl.constexpr, T_CAPPED: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out may share the bytes of z, as in _gradient_kernel."""
    row = tl.program_id(0).to(tl.int64)
    z_row, t_row, out_row = z_ptr + row * z_stride, t_ptr + row * t_stride, out_ptr + row * out_stride
    inverse = 1.0 / tl.load(temperature_ptr + row) if TEMPERED else 1.0
    z_shift, z_log_sum = tl.load(z_shift_ptr + row), tl.load(z_log_sum_ptr + row)
    t_shift, t_log_sum = tl.load(t_shift_ptr + row), tl.load(t_log_sum_ptr + row)
    kl, pull = tl.load(kl_ptr + row), tl.load(upstream_ptr + row) * inverse
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < V
        raw = tl.load(z_row + column, mask=inside, other=0.0)
        raw_t = tl.load(t_row + column, mask=inside, other=0.0)
        tl.debug_barrier()
        log_p = (_temper(raw, inverse, z_softcap, Z_CAPPED) - z_shift) - z_log_sum
        log_q = (_temper(raw_t, inverse, t_softcap, T_CAPPED) - t_shift) - t_log_sum
        d = tl.exp(log_p) * (log_p - log_q - kl) if REVERSE else tl.exp(log_p) - tl.exp(log_q)
        d = d * pull
        if Z_CAPPED:
            tanh = 2.0 * tl.sigmoid(2.0 * raw / z_softcap) - 1.0
            d = d * (1.0 - tanh * tanh)
        tl.store(out_row + column, d.to(out_ptr.dtype.element_ty), mask=inside)


def kl_stats(z: Tensor, ours: Rows, t: Tensor, theirs: Rows, *, reverse: bool, into: KLStats) -> None:
    """As head_rows.kl_stats, in one read of both chunks."""
    if z.shape[0] == 0:
        return
    student, teacher = (z, ours, 0), (t, theirs, 1)
    (a, a_rows, a_side), (b, b_rows, b_side) = (student, teacher) if reverse else (teacher, student)
    _kl_stats_kernel[(z.shape[0],)](
        a,
        a.stride(0),
        b,
        b.stride(0),
        z if ours.temperature is None else ours.temperature.contiguous(),
        into.kl,
        into.shift[a_side],
        into.log_sum[a_side],
        into.shift[b_side],
        into.log_sum[b_side],
        z.shape[1],
        1.0 if a_rows.softcap is None else a_rows.softcap,
        1.0 if b_rows.softcap is None else b_rows.softcap,
        TEMPERED=ours.temperature is not None,
        A_CAPPED=a_rows.softcap is not None,
        B_CAPPED=b_rows.softcap is not None,
        UNROLL=UNROLL // 2,  # two tiles are held at once
        LANES=LANES,
        num_warps=STATS_WARPS,
    )


def kl_gradient(
    z: Tensor, ours: Rows, t: Tensor, theirs: Rows, *, reverse: bool, stats: KLStats, upstream: Tensor, out: Tensor
) -> None:
    """As head_rows.kl_gradient, in one read of both chunks and one write."""
    if z.shape[0] == 0:
        return
    _kl_gradient_kernel[(z.shape[0],)](
        z,
        z.stride(0),
        t,
        t.stride(0),
        out,
        out.stride(0),
        z if ours.temperature is None else ours.temperature.contiguous(),
        stats.kl,
        stats.shift[0],
        stats.log_sum[0],
        stats.shift[1],
        stats.log_sum[1],
        upstream,
        z.shape[1],
        1.0 if ours.softcap is None else ours.softcap,
        1.0 if theirs.softcap is None else theirs.softcap,
        TEMPERED=ours.temperature is not None,
        Z_CAPPED=ours.softcap is not None,
        T_CAPPED=theirs.softcap is not None,
        REVERSE=reverse,
        BLOCK=min(GRADIENT_BLOCK // 2, max(128, triton.next_power_of_2(z.shape[1]))),
        num_warps=GRADIENT_WARPS,
    )
