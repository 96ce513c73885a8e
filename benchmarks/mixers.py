"""Attention mixers on two GPUs of one host: forward and forward+backward, and their errors, through the package.

    python benchmarks/mixers.py            # needs 2 GPUs; --smoke runs on 2 CPU processes

16 query heads, 8 KV heads, head dim 128, bf16; one 64k document and the 64k mix of 23 documents. Efficiency: time of
the same kernel on one GPU (same process and run) / (ranks * time of the mixer). A repeat is the mean of CALLS calls one
after the other, as layers come, on the slower rank. Transports: symmetric (copy engines) and nccl. Beside them, in the
same run: Ulysses written plainly on torch ops and aten FA2, torch's own context_parallel (dense: one document), and
the schedules of axolotl-ringmaster (peer_ringmaster.py; --only peers) where that package is installed.
Errors: relative L2 against one GPU's flash kernel on the whole row (two right bf16 results differ by about 3e-3).
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Report, Settings, cu_seqlens, settings, slowest_ms
from torch import Tensor

from longspan.errors import RankError
from longspan.launch import launch, world
from longspan.layout import make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.mixers import Gather, Local, Mixer, Ring, Ulysses
from longspan.mixers.gather_overlap import OverlappedGather
from longspan.mixers.kernels import Kernel
from longspan.mixers.kernels.choose import choose_kernel, describe, self_check
from longspan.mixers.symmetric import Symmetric, symmetric_refusal
from longspan.mixers.transport import Collective
from longspan.mixers.ulysses_overlap import OverlappedUlysses, keep_output

HEADS, KV_HEADS, HEAD_DIM, RANKS = 16, 8, 128, 2
PEER_FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, NotImplementedError, AssertionError)
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """One mixer to time: its layout, and how it attends to this rank's q, k, v."""

    name: str
    kind: str  # index layout
    attend: Run
    kernel: str = ""  # of its own; empty: the one that all share


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
        mixers.append((f"gather overlapped, {name}", "zigzag", OverlappedGather(transport)))
        mixers += [(f"ulysses in {n}, {name}", "contiguous", OverlappedUlysses(transport, n)) for n in (1, 2, 4)]
        mixers.append((f"ulysses lean, {name}", "contiguous", OverlappedUlysses(transport, keep=keep_output)))
    found = []
    for name, kind, mixer in mixers:
        prepared = mixer.prepare(make_seqinfo(kind, cu_seqlens(lengths, torch.device("cpu")), group), where)

        def attend(q: Tensor, k: Tensor, v: Tensor, mixer: Mixer = mixer, prepared: Any = prepared) -> Tensor:
            return mixer.attend(q, k, v, prepared, scale=HEAD_DIM**-0.5, kernel=kernel)

        found.append(Entry(name, kind, attend))
    if where.type == "cuda":
        found.append(Entry("peer: plain ulysses, FA2", "contiguous", plain_ulysses(lengths, where), "aten FA2"))
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


class Bench:
    """One row of tokens on this rank: its whole q, k, v, dout, the kernel, and one GPU's result to compare with."""

    def __init__(self, asked: Settings, name: str, lengths: tuple[int, ...]) -> None:
        self.asked, self.name, self.lengths = asked, name, lengths
        self.where, self.rank = world().device, dist.get_rank()
        dtype = torch.bfloat16 if self.where.type == "cuda" else torch.float32
        self.kernel = choose_kernel(self.where, dtype, HEAD_DIM)
        if self.rank == 0:
            print(describe(self.kernel, self.where, dtype, HEAD_DIM), flush=True)
        self_check(self.kernel, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, device=self.where)
        self.group = CPGroup(dist.group.WORLD, self.rank, RANKS, tuple(range(RANKS)))
        generator = torch.Generator(device=self.where).manual_seed(0)  # the same row on every rank
        shapes = [(sum(lengths), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        self.q, self.k, self.v, self.dout = (
            torch.randn(s, device=self.where, dtype=dtype, generator=generator) for s in shapes
        )
        self.alone = make_seqinfo("identity", cu_seqlens(lengths, torch.device("cpu")), CPGroup.alone(self.rank))
        self.whole: list[Tensor] = []

    def one_gpu(self) -> Entry:
        """The same kernel on the whole row; measured first."""
        prepared = Local().prepare(self.alone, self.where)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return Local().attend(q, k, v, prepared, scale=HEAD_DIM**-0.5, kernel=self.kernel)

        return Entry("one GPU", "identity", attend)

    def measure(self, entry: Entry) -> dict[str, Any]:
        """Errors and times of one mixer."""
        one = entry.kind == "identity"
        info = self.alone if one else make_seqinfo(entry.kind, self.alone.cu_seqlens, self.group)
        index = info.index.to(self.where)
        local = [x[index].contiguous().requires_grad_() for x in (self.q, self.k, self.v)]
        dout = self.dout[index].contiguous()

        def both() -> list[Tensor]:
            out = entry.attend(*local)
            return [out.detach(), *torch.autograd.grad(out, local, dout)]

        def forward() -> None:
            with torch.no_grad():
                entry.attend(*local)

        found = both()
        self.whole = found if one else self.whole
        row: dict[str, Any] = {"row": self.name, "mixer": entry.name, "layout": entry.kind}
        row["kernel"] = entry.kernel or self.kernel.name
        row |= {f"error_{key}": value for key, value in errors(found, self.whole, index).items()}
        row |= {"forward_ms": slowest_ms(forward, self.asked.repeats), "both_ms": slowest_ms(both, self.asked.repeats)}
        if self.rank == 0:
            medians = statistics.median(row["forward_ms"]), statistics.median(row["both_ms"])
            print(self.name, entry.name, *medians, flush=True)
        return row


def bench_row(asked: Settings, name: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """All mixers on one row; runs on every rank, the result is the same on all."""
    bench = Bench(asked, name, lengths)
    return [bench.measure(e) for e in [bench.one_gpu(), *entries(bench.group, lengths, bench.kernel, bench.where)]]


def ringmaster_row(asked: Settings, name: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """One GPU again, for the efficiency and the errors, and each schedule of axolotl-ringmaster; one that fails is skipped."""
    from peer_ringmaster import NAME, schedules  # an optional package

    bench = Bench(asked, name, lengths)
    rows = [bench.measure(bench.one_gpu())]
    cu = cu_seqlens(lengths, bench.where)
    for title, kernel, kind, attend in schedules(lengths, bench.kernel, cu, HEAD_DIM**-0.5):
        entry = Entry(f"peer: {NAME} {title} ({kernel})", kind, attend, kernel)
        try:
            rows.append(bench.measure(entry))
        except PEER_FAILURES as error:
            rows.append({"row": name, "mixer": entry.name, "layout": kind, "kernel": kernel, "skipped": reason(error)})
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

        found = {"forward_ms": slowest_ms(forward, asked.repeats), "both_ms": slowest_ms(both, asked.repeats)}
        for x in local:
            x.requires_grad_(False)  # the context resizes its buffers back on the way out
    return found


def peer_row(asked: Settings) -> list[dict[str, Any]]:
    try:
        found = torch_context_parallel(asked, 65536)
    except PEER_FAILURES as error:
        found = {"skipped": reason(error)}
    return [{"row": "64k row", "mixer": "peer: torch context_parallel, 16/16 heads", "kernel": "SDPA flash", **found}]


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[-180:]}"  # a rank's own error ends the message


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds time of one GPU (the first row) / (ranks * time)."""
    for row in rows:
        ranks = 1 if row["layout"] == "identity" else RANKS
        for part in ("forward", "both"):
            if "skipped" not in row:
                alone, mine = (statistics.median(x[f"{part}_ms"]) for x in (rows[0], row))
                row[f"{part}_efficiency"] = round(alone / ranks / mine, 3)
    return rows


def run() -> Report:
    asked = settings("attention mixers on two GPUs")
    report = Report("mixers", asked, __doc__ or "")
    for name, lengths in asked.rows.items():
        if asked.wants(name):
            for row in with_efficiency(launch(bench_row, asked, name, lengths, ranks=RANKS, timeout_s=150)[0]):
                report.add(**row)
    if not asked.wants("peers"):
        return report
    if torch.cuda.is_available():
        for row in launch(peer_row, asked, ranks=RANKS, timeout_s=120)[0]:
            report.add(**row)
    if find_spec("ringmaster") is None:
        report.skip("the package is not installed", mixer="peer: axolotl-ringmaster")
        return report
    for name, lengths in asked.rows.items():
        try:
            rows = launch(ringmaster_row, asked, name, lengths, ranks=RANKS, timeout_s=120)[0]
        except RankError as error:
            report.skip(reason(error), row=name, mixer="peer: axolotl-ringmaster")
            continue
        for row in with_efficiency(rows)[1:]:
            report.add(**row)
    return report


if __name__ == "__main__":
    run().save(bars=lambda row: (row["row"], row["mixer"], row["median_both_ms"]), unit="ms, forward+backward")
