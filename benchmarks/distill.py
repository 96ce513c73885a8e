"""Full-vocabulary distillation in the head on one GPU: KL of a student against a teacher, forward+backward.

    python benchmarks/distill.py

T = 65,536 tokens, V = 151,936; student width 2,048 (Qwen3-1.7B), teacher width 4,096 (Qwen3-8B), bf16 hidden and
weights, fp32 logits. `one pass`: head_loss, what "distill_full" runs; `two passes`: head_kl, for losses that read other
tokens. Extra memory: peak over what was allocated before, without dW in fp32
(4 * V * E bytes). Error: largest difference of 256 KLs from fp64. Bound of one pass: the matmuls (both sides' logits, two of the
student's gradient) at the 784 TFLOP/s of a measured 8192^3 product, and both sides' fp32 logits written once and read
twice, the student's once more, the bf16 gradient written once and read twice, at 4.28 TB/s.
"""

import torch
from common import Report, device, settings, times_ms
from head import peak_extra_gib
from torch import Tensor

from longspan.objective import TeacherHead, head_kl, head_loss

CHUNKS: tuple[int | str, ...] = ("auto", 1024, 2048)


def run() -> Report:
    asked = settings("Full-vocabulary distillation in the head", repeats=3)
    report = Report("distill", asked, __doc__ or "")
    tokens, width, wider, vocab = (64, 16, 24, 97) if asked.smoke else (65536, 2048, 4096, 151936)
    where = device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32

    def sides(width: int) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(tokens, width, device=where, dtype=dtype)
        return hidden, (torch.randn(vocab, width, device=where) * width**-0.5).to(dtype)

    hidden, weight = (x.requires_grad_() for x in sides(width))
    teacher = TeacherHead(*sides(wider))
    share = torch.randn(tokens, device=where) / tokens
    targets = torch.randint(0, vocab, (tokens,), device=where)
    for direction in ("forward", "reverse"):
        with torch.no_grad():
            rows = slice(0, min(256, tokens))
            p = torch.log_softmax(hidden[rows].double() @ weight.double().t(), -1)
            q = torch.log_softmax(teacher.hidden[rows].double() @ teacher.weight.double().t(), -1)
            over, other = (q, p) if direction == "forward" else (p, q)
            exact = (over.exp() * (over - other)).sum(1)
            small = TeacherHead(teacher.hidden[rows], teacher.weight)
            found = head_kl(hidden[rows], weight, small, direction=direction)
            error = float((found.double() - exact).abs().max())
            del p, q, over, other
        for chunk in CHUNKS:

            def one(chunk: int | str = chunk, direction: str = direction) -> object:
                formed = head_loss(
                    hidden,
                    weight,
                    targets,
                    lambda out, part: share[part] * out.teacher_kl,
                    teacher=teacher,
                    direction=direction,
                    chunk=chunk,
                )
                return torch.autograd.grad(formed.total, (hidden, weight))

            def two(chunk: int | str = chunk, direction: str = direction) -> object:
                kl = head_kl(hidden, weight, teacher, direction=direction, chunk=chunk)
                return torch.autograd.grad((kl * share).sum(), (hidden, weight))

            for name, call in (("one pass", one), ("two passes", two)):
                ms = times_ms(call, repeats=asked.repeats, warmup=1)
                extra = peak_extra_gib(call, weight)
                report.add(method=f"{name}, {direction}", chunk=chunk, ms=ms, extra_gib=extra, kl_error=error)
    flops = 2 * tokens * vocab * (3 * width + wider)
    bytes_moved = tokens * vocab * (4 * (3 + 3 + 1) + 2 * 3)
    report.add(method="bound", chunk="", ms=[flops / 784e9 + bytes_moved / 4.28e9])
    return report


if __name__ == "__main__":
    run().save(bars=lambda row: ("distill", f"{row['method']} {row['chunk']}", row["median_ms"]), unit="ms")
