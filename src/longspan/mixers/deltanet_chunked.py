"""Gated DeltaNet in chunks (the WY form), exact, on any device, in fp64 or fp32 (bf16 inputs are computed in fp32).

Inside a chunk of C tokens with cumulative log decay G (inclusive) and incoming state S:

    (I + tril(beta_i exp(G_i - G_j) k_i.k_j, -1)) [u | w] = [beta v | beta exp(G) k]          one triangular solve
    r = u - w S        out = exp(G) q S + tril(exp(G_i - G_j) q_i.k_j) r        S' = exp(G_C) S + (exp(G_C - G) k)^T r

so the state after a chunk, and after any run of chunks, is affine in the state before it: S' = A S + B. Documents are
cut into chunks at their own starts, all chunks are solved at once, and the scan over chunks runs for all documents
together. Source: Yang et al. 2024, section 3.3; `torch_chunk_gated_delta_rule` of transformers 5.17 (fp32, no
boundaries). q and k come as unit vectors. Zero-length pieces are allowed. It keeps no state of its own: see
deltanet_state.py for ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ChunkPlan", "affine_maps", "chunk_plan", "chunked", "intra_chunk", "scan", "state_dtype"]

CHUNK = 64  # tokens; on CPU 16 to 64 cost the same within 20 % at head dims 8 to 128


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Where the chunks of a stream lie, step-major: the first chunk of every piece, then every second one, ..."""

    rows: Tensor  # [N, C] int64: token of each slot, T (a row of zeros) where the chunk is shorter
    slots: Tensor  # [T] int64: the slot of each token in the flattened [N * C]
    counts: tuple[int, ...]  # chunks at each step; pieces stand longest first, so these are the first `count` pieces
    order: tuple[int, ...]  # piece numbers, longest first


def chunk_plan(bounds: Sequence[int], chunk: int = CHUNK, device: torch.device | None = None) -> ChunkPlan:
    """bounds [n + 1]: piece i is tokens bounds[i] to bounds[i + 1]."""
    total = bounds[-1]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    chunk = max(1, min(chunk, max(lengths)))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rows, counts, step = [], [], 0
    while active := [i for i in order if lengths[i] > step * chunk]:
        starts = torch.tensor([bounds[i] + step * chunk for i in active])
        ends = torch.tensor([bounds[i + 1] for i in active])
        tokens = starts[:, None] + torch.arange(chunk)
        rows.append(torch.where(tokens < ends[:, None], tokens, total))
        counts.append(len(active))
        step += 1
    table = torch.cat(rows)
    flat = table.flatten()
    slots = torch.empty(total, dtype=torch.int64)
    real = flat < total
    slots[flat[real]] = torch.arange(flat.numel())[real]
    return ChunkPlan(table.to(device), slots.to(device), tuple(counts), tuple(order))


@dataclass(frozen=True, slots=True)
class IntraChunk:
    """What a chunk contributes before any state is known; all [N, H, ...]."""

    u: Tensor  # [N, H, C, D_v]
    w: Tensor  # [N, H, C, D_k]
    reads: Tensor  # [N, H, C, D_k]: exp(G) q / sqrt(D_k)
    scores: Tensor  # [N, H, C, C]: tril(exp(G_i - G_j) q_i.k_j) / sqrt(D_k)
    writes: Tensor  # [N, H, C, D_k]: exp(G_C - G) k
    decay: Tensor  # [N, H, 1, 1]: exp(G_C)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States are fp32, in fp64 fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def intra_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: ChunkPlan) -> IntraChunk:
    """q, k [T, H_k, D_k] unit vectors, v [T, H, D_v], g and beta [T, H]."""
    copies = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(copies, 1), k.repeat_interleave(copies, 1)
    q, k, v = (_chunks(x, plan) for x in (q, k, v))  # [N, H, C, D]
    g, beta = (_chunks(x[:, :, None], plan) for x in (g, beta))  # [N, H, C, 1]
    total = g.cumsum(2)
    size = q.shape[2]
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total - total.transpose(2, 3)).masked_fill(above, float("-inf")).exp()  # exp(G_i - G_j), j <= i
    system = (beta * (k @ k.transpose(2, 3)) * between).tril(-1)  # the solve takes the diagonal as one
    known = torch.cat([beta * v, beta * total.exp() * k], 3)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[3], k.shape[3]], 3)
    scale = q.shape[3] ** -0.5
    last = total[:, :, -1:]
    return IntraChunk(
        u=u,
        w=w,
        reads=q * total.exp() * scale,
        scores=(q @ k.transpose(2, 3)) * between * scale,
        writes=k * (last - total).exp(),
        decay=last.exp(),
    )


def scan(intra: IntraChunk, plan: ChunkPlan, initial: Tensor) -> tuple[Tensor, Tensor]:
    """initial [n, H, D_k, D_v] -> out [T, H, D_v], final states [n, H, D_k, D_v]."""
    state = initial[list(plan.order)]
    outputs, finals, first = [], [], 0
    for count in plan.counts:
        chunks = slice(first, first + count)
        finals.append(state[count:])
        state = state[:count]
        residual = intra.u[chunks] - intra.w[chunks] @ state
        outputs.append(intra.reads[chunks] @ state + intra.scores[chunks] @ residual)
        state = intra.decay[chunks] * state + intra.writes[chunks].transpose(2, 3) @ residual
        first += count
    finals.append(state)
    final = torch.cat(finals[::-1])
    back = sorted(range(len(plan.order)), key=lambda i: plan.order[i])
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [N, H, C, D] -> [N * C, H, D]
    return out[plan.slots], final[back]


def affine_maps(intra: IntraChunk, plan: ChunkPlan, pieces: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A [m, H, D_k, D_k] and B [m, H, D_k, D_v] of the named pieces (ascending): a final state is A S + B."""
    key_dim, value_dim = intra.w.shape[3], intra.u.shape[3]
    zero = intra.u.new_zeros(key_dim, value_dim)
    start = torch.cat([zero, torch.eye(key_dim, dtype=zero.dtype, device=zero.device)], 1)
    chosen = sorted((plan.order.index(piece), number) for number, piece in enumerate(pieces))  # longest first
    state = start.expand(len(chosen), intra.u.shape[1], key_dim, value_dim + key_dim)
    finals, first = [], 0
    for count in plan.counts:
        rows = [first + place for place, _ in chosen if place < count]
        finals.append(state[len(rows) :])
        state = state[: len(rows)]
        wide = functional.pad(intra.u[rows], (0, key_dim))  # the map's own values are zero
        residual = wide - intra.w[rows] @ state
        state = intra.decay[rows] * state + intra.writes[rows].transpose(2, 3) @ residual
        first += count
    finals.append(state)
    both = torch.cat(finals[::-1])[sorted(range(len(chosen)), key=lambda i: chosen[i][1])]
    return both[..., value_dim:], both[..., :value_dim]


def chunked(
    q: Tensor,  # [T, H_k, D_k], unit vectors
    k: Tensor,  # [T, H_k, D_k], unit vectors
    v: Tensor,  # [T, H, D_v]
    g: Tensor,  # [T, H]
    beta: Tensor,  # [T, H]
    bounds: Sequence[int],
    *,
    initial: Tensor | None = None,  # [n, H, D_k, D_v]
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # [T, H, D_v] in v's dtype, final states [n, H, D_k, D_v]
    """A packed stream on one device, differentiable in every tensor by autograd."""
    plan = chunk_plan(bounds, chunk, v.device)
    if initial is None:
        shape = (len(bounds) - 1, v.shape[1], k.shape[2], v.shape[2])
        initial = v.new_zeros(shape, dtype=state_dtype(v.dtype))
    out, final = scan(intra_chunk(q, k, v, g, beta, plan), plan, initial)
    return out.to(v.dtype), final


def _chunks(x: Tensor, plan: ChunkPlan) -> Tensor:
    """[T, H, D] -> [N, H, C, D], zeros in the slots that hold no token."""
    x = x.to(state_dtype(x.dtype))
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded[plan.rows].transpose(1, 2)
