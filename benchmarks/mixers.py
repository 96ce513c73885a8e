"""Attention mixers on two GPUs of one host: forward and forward+backward, and their errors, through the package.

    python benchmarks/mixers.py            # needs 2 GPUs; --smoke runs on 2 CPU processes

16 query heads, 8 KV heads, head dim 128, bf16; one 64k document and the 64k mix of 23 documents. Efficiency: time of
the same kernel on one GPU (same process and run) / (ranks * time of the mixer). A repeat is the mean of CALLS calls one
after the other, as layers come, on the slower rank. Transports: symmetric (copy engines) and nccl. Beside them, in the
same run: Ulysses written plainly on torch ops and aten FA2, and torch's own context_parallel (dense: one document).
Errors: relative L2 against one GPU's flash kernel on the whole row (two right bf16 results differ by about 3e-3).
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Report, Settings, cu_seqlens, settings, slowest_ms
from torch import Tensor

from longspan.launch import launch, world
from longspan.layout import make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.mixers import Gather, Local, Mixer, Ring, Ulysses
from longspan.mixers.kernels import Kernel
from longspan.mixers.kernels.choose import choose_kernel, describe, self_check
from longspan.mixers.symmetric import Symmetric, symmetric_refusal
from longspan.mixers.transport import Collective
from longspan.mixers.ulysses_overlap import OverlappedUlysses

HEADS, KV_HEADS, HEAD_DIM, RANKS = 16, 8, 128, 2
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """One mixer to time: its layout, and how it attends to this rank's q, k, v."""

    name: str
    kind: str  # index layout
    attend: Run


def entries(group: CPGroup, lengths: tuple[int, ...], kernel: Kernel, where: torch.device) -> list[Entry]:
    """Every mixer and peer that runs on this row."""
    refusal = symmetric_refusal(group, where)
    transports = {"nccl" if where.type == "cuda" else "gloo": Collective()}
    if refusal is None:
        transports["symmetric"] = Symmetric(where)
    elif group.rank == 0:
        print(f"no symmetric memory: {refusal}", flush=True)
    mixers: list[tuple[str, str, Mixer]] = [("ulysses", "contiguous", Ulysses()), ("gather", "zigzag", Gather())]
    for name, transport in transports.items():
        mixers += [(f"ring, {name}", "zigzag", Ring(transport))]
        mixers += [(f"ulysses in {n}, {name}", "contiguous", OverlappedUlysses(transport, n)) for n in (1, 2, 4)]
    found = []
    for name, kind, mixer in mixers:
        prepared = mixer.prepare(make_seqinfo(kind, cu_seqlens(lengths, torch.device("cpu")), group), where)

        def attend(q: Tensor, k: Tensor, v: Tensor, mixer: Mixer = mixer, prepared: Any = prepared) -> Tensor:
            return mixer.attend(q, k, v, prepared, scale=HEAD_DIM**-0.5, kernel=kernel)

        found.append(Entry(name, kind, attend))
    if where.type == "cuda":
        found.append(Entry("peer: plain ulysses, FA2", "contiguous", plain_ulysses(lengths, where)))
    return found


def plain_ulysses(lengths: tuple[int, ...], where: torch.device) -> Run:
    """The textbook form: one all-to-all each for q, k, v and out, torch's varlen_attn (FA2) between them."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    from torch.nn.attention.varlen import varlen_attn

    cu, longest, ranks = cu_seqlens(lengths, where), max(lengths), dist.get_world_size()

    def swap(x: Tensor) -> Tensor:  # [T/N, H, D] -> [T, H/N, D]
        sent = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous().flatten(0, 1)
        return all_to_all_single_autograd(sent, None, None, dist.group.WORLD)

    def back(x: Tensor) -> Tensor:
        arrived = all_to_all_single_autograd(x.contiguous(), None, None, dist.group.WORLD)
        return arrived.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return back(varlen_attn(swap(q), swap(k), swap(v), cu, cu, longest, longest, window_size=(-1, 0)))

    return attend


def errors(found: list[Tensor], whole: list[Tensor], index: Tensor) -> dict[str, float]:
    """Relative L2 of this rank's out, dq, dk, dv; the worse rank's."""
    mine = [
        float((a.detach().float() - b[index].float()).norm() / b[index].float().norm())
        for a, b in zip(found, whole, strict=True)
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return dict(zip(("out", "dq", "dk", "dv"), (max(values) for values in zip(*every, strict=True)), strict=True))


def bench_row(asked: Settings, name: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """All mixers on one row; runs on every rank, the result is the same on all."""
    where, rank = world().device, dist.get_rank()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    kernel = choose_kernel(where, dtype, HEAD_DIM)
    if rank == 0:
        print(describe(kernel, where, dtype, HEAD_DIM), flush=True)
    self_check(kernel, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, device=where)
    group = CPGroup(dist.group.WORLD, rank, RANKS, tuple(range(RANKS)))
    generator = torch.Generator(device=where).manual_seed(0)  # the same row on every rank
    shapes = [(sum(lengths), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(s, device=where, dtype=dtype, generator=generator) for s in shapes)
    alone = make_seqinfo("identity", cu_seqlens(lengths, torch.device("cpu")), CPGroup.alone(rank))
    prepared = Local().prepare(alone, where)

    def one_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Local().attend(q, k, v, prepared, scale=HEAD_DIM**-0.5, kernel=kernel)

    rows: list[dict[str, Any]] = []
    whole: list[Tensor] = []
    for entry in [Entry("one GPU", "identity", one_gpu), *entries(group, lengths, kernel, where)]:
        one = entry.kind == "identity"
        index = alone.index if one else make_seqinfo(entry.kind, alone.cu_seqlens, group).index
        local = [x[index.to(where)].contiguous().requires_grad_() for x in (q, k, v)]
        local_dout = dout[index.to(where)].contiguous()

        def both(entry: Entry = entry, local: list[Tensor] = local, dout: Tensor = local_dout) -> list[Tensor]:
            out = entry.attend(*local)
            return [out.detach(), *torch.autograd.grad(out, local, dout)]

        def forward(entry: Entry = entry, local: list[Tensor] = local) -> None:
            with torch.no_grad():
                entry.attend(*local)

        found = both()
        whole = found if one else whole
        row: dict[str, Any] = {"row": name, "mixer": entry.name, "layout": entry.kind, "kernel": kernel.name}
        row |= {f"error_{key}": value for key, value in errors(found, whole, index.to(where)).items()}
        row |= {"forward_ms": slowest_ms(forward, asked.repeats), "both_ms": slowest_ms(both, asked.repeats)}
        rows.append(row)
        if rank == 0:
            print(name, entry.name, statistics.median(row["forward_ms"]), statistics.median(row["both_ms"]), flush=True)
    return rows


def torch_context_parallel(asked: Settings, tokens: int) -> dict[str, Any]:
    """torch.distributed.tensor's ring for SDPA: one dense causal document, load-balanced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    where = world().device
    mesh = init_device_mesh(where.type, (RANKS,))
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (HEADS, HEADS, HEADS)]  # it takes no grouped KV heads

    def inputs() -> list[Tensor]:
        return [torch.randn(s, device=where, dtype=torch.bfloat16) for s in shapes]

    q, k, v = inputs()
    dout = torch.randn(1, HEADS, tokens // RANKS, HEAD_DIM, device=where, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        local = [x.requires_grad_() for x in (q, k, v)]

        def forward() -> None:
            with torch.no_grad():
                F.scaled_dot_product_attention(*local, is_causal=True)

        def both() -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(*local, is_causal=True), local, dout)

        return {"forward_ms": slowest_ms(forward, asked.repeats), "both_ms": slowest_ms(both, asked.repeats)}


def peer_row(asked: Settings) -> list[dict[str, Any]]:
    try:
        found = torch_context_parallel(asked, 65536)
    except (RuntimeError, ValueError, ImportError, AttributeError, NotImplementedError) as error:
        found = {"skipped": f"{type(error).__name__}: {error}"[:200]}
    return [{"row": "64k row", "mixer": "peer: torch context_parallel, 16/16 heads", "kernel": "SDPA flash", **found}]


def run() -> Report:
    asked = settings("attention mixers on two GPUs")
    report = Report("mixers", asked, __doc__ or "")
    for name, lengths in asked.rows.items():
        if not asked.wants(name):
            continue
        rows = launch(bench_row, asked, name, lengths, ranks=RANKS, timeout_s=150)[0]
        alone = statistics.median(rows[0]["forward_ms"]), statistics.median(rows[0]["both_ms"])
        for row in rows:
            ranks = 1 if row["layout"] == "identity" else RANKS
            row["forward_efficiency"] = round(alone[0] / ranks / statistics.median(row["forward_ms"]), 3)
            row["both_efficiency"] = round(alone[1] / ranks / statistics.median(row["both_ms"]), 3)
            report.add(**row)
    if torch.cuda.is_available() and asked.wants("peers"):
        for row in launch(peer_row, asked, ranks=RANKS, timeout_s=120)[0]:
            report.add(**row)
    return report


if __name__ == "__main__":
    run().save(bars=lambda row: (row["row"], row["mixer"], row["median_both_ms"]), unit="ms, forward+backward")
