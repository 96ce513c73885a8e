"""The LM head on one GPU: log-prob and entropy of the targets, forward and forward+backward, through the package.

    python benchmarks/head.py

T = 65,536 tokens, E = 2,048, V = 151,936 (Qwen3-1.7B), bf16 hidden and weight, fp32 logits. `one pass`: head_loss,
which forms a token-wise loss and its gradients in one pass (3 matmuls); `two passes`: head_outputs (4 matmuls), for
losses that read other tokens. Peers, where they are installed, give weighted log-probs only, so `one pass, log-prob`
stands beside them: liger-kernel's fused linear cross-entropy and cut-cross-entropy (filter_eps off: exact gradients).
Extra memory: peak over what was allocated before, without dW in fp32 (4 * V * E bytes).
Error: largest difference of 256 log-probs from fp64. Bound: three matmuls at the 784 TFLOP/s of a measured 8192^3
product, and the fp32 logits written once and read twice, their bf16 gradient written and read twice, at 4.28 TB/s.
"""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

import torch
from common import Report, device, settings, times_ms
from torch import Tensor

from longspan.objective.head_loss import head_loss
from longspan.objective.logprob import head_outputs

CHUNKS: tuple[int | str, ...] = ("auto", 2048, 3072, 4096, 6144)


def clipped(advantage: Tensor, old: Tensor) -> Callable[..., Tensor]:
    """PPO's loss with an entropy bonus: what an RL step asks of the head."""

    def of_chunk(out, where) -> Tensor:  # out: TokenOut of a chunk, where: its token numbers
        ratio = torch.exp(out.logprob - old[where])
        gain = torch.minimum(ratio * advantage[where], ratio.clamp(0.8, 1.2) * advantage[where])
        return -gain - 0.001 * out.entropy

    return of_chunk


def peak_extra_gib(call: Callable[[], object], weight: Tensor) -> float:
    """GiB over the memory before the call, dW and its cast excluded."""
    if device().type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return (peak - 4 * weight.numel()) / 2**30


def liger_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return -LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)(weight, hidden, targets)


def cut_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


PEERS = {"liger-kernel": ("liger_kernel", liger_logprob), "cut-cross-entropy": ("cut_cross_entropy", cut_logprob)}


def peers(
    report: Report, hidden: Tensor, weight: Tensor, targets: Tensor, *, share: Tensor, exact: Tensor, repeats: int
) -> None:
    """sum(share * log-prob) and its gradients, by each peer and by ours. exact: fp64 log-probs of the first tokens."""

    def ours() -> object:
        formed = head_loss(hidden, weight, targets, lambda out, where: -share[where] * out.logprob)
        return torch.autograd.grad(formed.total, (hidden, weight))

    ms = times_ms(ours, repeats=repeats, warmup=1)
    report.add(method="one pass, log-prob", chunk="auto", ms=ms, extra_gib=peak_extra_gib(ours, weight))
    for name, (package, logprob) in PEERS.items():
        if find_spec(package) is None or hidden.device.type != "cuda":
            report.skip("not installed here, or no GPU", method=name)
            continue

        def both(logprob: Callable[..., Tensor] = logprob) -> object:
            return torch.autograd.grad(-(share * logprob(hidden, weight, targets)).sum(), (hidden, weight))

        try:
            with torch.no_grad():
                found = logprob(hidden[: len(exact)].detach(), weight.detach(), targets[: len(exact)])
            error = float((found.double() - exact).abs().max())
            ms = times_ms(both, repeats=repeats, warmup=1)
            extra = peak_extra_gib(both, weight)
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as problem:
            report.skip(f"{type(problem).__name__}: {problem}", method=name)
            continue
        label = f"{name} {version(name)}"
        report.add(method=label, chunk="", ms=ms, extra_gib=extra, logprob_error=error)


def run() -> Report:
    asked = settings("LM head: log-prob and entropy", repeats=3)
    report = Report("head", asked, __doc__ or "")
    tokens, width, vocab = (64, 16, 97) if asked.smoke else (65536, 2048, 151936)
    where = device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    hidden = torch.randn(tokens, width, device=where, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, width, device=where) * width**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=where)
    with torch.no_grad():
        old = head_outputs(hidden, weight, targets).logprob
        rows = slice(0, 256)
        exact = torch.log_softmax(hidden[rows].double() @ weight.double().t(), -1)
        exact = exact.gather(1, targets[rows, None])[:, 0]
        error = float((old[rows].double() - exact).abs().max())
    share = torch.randn(tokens, device=where) / tokens
    loss = clipped(share, old)

    for chunk in CHUNKS:

        def one_pass(chunk: int | str = chunk) -> object:
            formed = head_loss(hidden, weight, targets, loss, entropy=True, chunk=chunk)
            return torch.autograd.grad(formed.total, (hidden, weight))

        def two_passes(chunk: int | str = chunk) -> object:
            out = head_outputs(hidden, weight, targets, entropy=True, chunk=chunk)
            return torch.autograd.grad(loss(out, slice(None)).sum(), (hidden, weight))

        def forward(chunk: int | str = chunk) -> object:
            with torch.no_grad():
                return head_outputs(hidden, weight, targets, entropy=True, chunk=chunk)

        for name, call in (("one pass", one_pass), ("two passes", two_passes), ("forward", forward)):
            if chunk != "auto" and name != "one pass":
                continue
            extra = peak_extra_gib(call, weight) if name != "forward" else None
            ms = times_ms(call, repeats=asked.repeats, warmup=1)
            report.add(method=name, chunk=chunk, ms=ms, extra_gib=extra, logprob_error=error)
    peers(report, hidden, weight, targets, share=share, exact=exact, repeats=asked.repeats)
    bound = 6 * tokens * width * vocab / 784e9 + tokens * vocab * (3 * 4 + 3 * 2) / 4.28e9
    report.add(method="bound", chunk="", ms=[bound])
    return report


if __name__ == "__main__":
    run().save(bars=lambda row: ("head", f"{row['method']} {row['chunk']}", row["median_ms"]), unit="ms")
