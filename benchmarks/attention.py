"""Attention kernels on one GPU through the kernel interface: forward and forward+backward, causal packed rows, bf16.

    python benchmarks/attention.py

Kernels: flash4, flash2 (aten), and torch SDPA's cuDNN backend beside them on the one-document row (it takes no packed
row with a working backward). Also the shapes that context parallelism makes: ulysses shares of heads, ring blocks,
windows, vision towers (head dim 72). TFLOP/s: causal forward 2 * sum(L^2) * H * D, forward+backward 3.5 times that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from common import Report, Settings, causal_flops, device, settings, times_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan.errors import UserError
from longspan.mixers.kernels import Block, Kernel
from longspan.mixers.kernels.choose import choose_kernel


@dataclass(frozen=True)
class Case:
    """One shape."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    causal: bool = True
    deterministic: bool = False
    window: int | None = None


def cases(asked: Settings) -> list[Case]:
    one, mix = asked.rows["64k row"], asked.rows["64k mix"]
    return [
        Case("64k row", 16, 8, 128, one),
        Case("64k mix", 16, 8, 128, mix),
        Case("64k row", 32, 8, 128, one),
        Case("64k row", 16, 4, 256, one),
        Case("64k row, ulysses 2", 8, 4, 128, one),
        Case("64k mix, ulysses 2", 8, 4, 128, mix),
        Case("64k row, ulysses 4", 4, 2, 128, one),
        Case("ring block 16k x 16k", 16, 8, 128, (16 if asked.smoke else 16384,), causal=False),
        Case("64k row, deterministic", 16, 8, 128, one, deterministic=True),
        Case("64k row, window 4096", 16, 8, 128, one, window=8 if asked.smoke else 4096),
        Case("16 images of 4096", 16, 16, 72, (16,) * 4 if asked.smoke else (4096,) * 16, causal=False),
    ]


def through_kernel(kernel: Kernel, case: Case) -> tuple[Callable[[], None], Callable[[], None]]:
    """(forward, forward+backward)."""
    where = device()
    tokens = sum(case.lengths)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    q, dout = (torch.randn(tokens, case.heads, case.head_dim, device=where, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(tokens, case.kv_heads, case.head_dim, device=where, dtype=dtype) for _ in range(2))
    kind = "causal" if case.causal else "full"
    block = Block.make(case.lengths, case.lengths, kind=kind, device=where)
    scale = case.head_dim**-0.5

    def forward() -> None:
        kernel.forward(q, k, v, block, scale=scale, window=case.window)

    def both() -> None:
        out, lse = kernel.forward(q, k, v, block, scale=scale, window=case.window)
        kernel.backward(dout, q, k, v, out, lse, block, scale=scale, window=case.window)

    return forward, both


def through_cudnn(case: Case) -> tuple[Callable[[], None], Callable[[], None]]:
    where = device()
    shape = (1, case.heads, sum(case.lengths), case.head_dim)
    kv_shape = (1, case.kv_heads, *shape[2:])
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    q, k, v = (torch.randn(s, device=where, dtype=dtype).requires_grad_() for s in (shape, kv_shape, kv_shape))
    dout = torch.randn(shape, device=where, dtype=dtype)

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if where.type == "cuda" else SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        torch.autograd.grad(attend(), (q, k, v), dout)

    return forward, both


def run(asked: Settings) -> Report:
    report = Report("attention", asked, __doc__ or "")
    for case in cases(asked):
        names = ["flash4", "flash2"] if device().type == "cuda" else ["reference"]
        names += ["sdpa cudnn"] if len(case.lengths) == 1 and case.causal and case.name == "64k row" else []
        for name in names:
            shape = {"case": case.name, "heads": f"{case.heads}/{case.kv_heads}/{case.head_dim}", "kernel": name}
            dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
            try:
                if name == "sdpa cudnn":
                    forward, both = through_cudnn(case)
                else:
                    kernel = choose_kernel(device(), dtype, case.head_dim, name=name, deterministic=case.deterministic)
                    forward, both = through_kernel(kernel, case)
                forward_ms = times_ms(forward, repeats=asked.repeats)
                both_ms = times_ms(both, repeats=asked.repeats)
            except (UserError, RuntimeError) as error:
                report.skip(str(error), **shape)
                continue
            flops = causal_flops(case.lengths, case.heads, case.head_dim, causal=case.causal)
            if case.window is not None:  # 4 * H * D for each pair that is seen
                seen = case.lengths[0] * case.window - case.window**2 / 2
                flops = 4 * seen * case.heads * case.head_dim
            row = report.add(**shape, forward_ms=forward_ms, both_ms=both_ms)
            row["forward_tflops"] = round(flops / row["median_forward_ms"] / 1e9, 1)
            row["both_tflops"] = round(3.5 * flops / row["median_both_ms"] / 1e9, 1)
            print(f"  {row['forward_tflops']} / {row['both_tflops']} TFLOP/s", flush=True)
    return report


if __name__ == "__main__":
    run(settings("attention kernels")).save(
        bars=lambda row: (
            (f"{row['case']}, {row['heads']}", row["kernel"], row["both_tflops"])
            if row["case"] in ("64k row", "64k mix")
            else None
        ),
        unit="TFLOP/s, forward+backward",
    )
