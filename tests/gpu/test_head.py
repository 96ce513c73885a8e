"""The head's Triton rows on a GPU against plain log-softmax in fp64: log-prob, entropy, top-k and all gradients.

fp32 tolerance 1e-5: fp32 logits of 64 terms. bf16 tolerance 2e-2 on gradients: dlogits are rounded to bf16 (2^-9)
before the two matmuls; log-probs stay at 1e-4, because logits are fp32. Inputs are exact in bf16: fp64 sees them too.
"""

import pytest
import torch
from torch import Tensor

from longspan.objective.head_loss import head_loss
from longspan.objective.logprob import head_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS, WIDTH, VOCAB = 300, 64, 5003
FORWARD = {torch.float32: 1e-5, torch.bfloat16: 1e-4}
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def plain(hidden: Tensor, weight: Tensor, temperature: Tensor | None, softcap: float | None) -> Tensor:
    """[T, V] log-probs, fp64."""
    z = hidden @ weight.t()
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    return torch.log_softmax(z if temperature is None else z / temperature[:, None], -1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tempered", "softcap"), [(False, None), (True, None), (True, 5.0)])
@pytest.mark.parametrize("topk", [0, 7])
def test_head_equals_plain_log_softmax(dtype: torch.dtype, tempered: bool, softcap: float | None, topk: int) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    hidden = torch.randn(TOKENS, WIDTH, device=device).bfloat16().to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, device=device) * 0.3).bfloat16().to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), device=device)
    temperature = torch.rand(TOKENS, device=device) + 0.5 if tempered else None
    ids = torch.randint(0, VOCAB, (TOKENS, topk), device=device) if topk else None
    pulls = [torch.randn(TOKENS, device=device) for _ in range(2)]
    topk_pull = torch.randn(TOKENS, topk, device=device) if topk else None

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = plain(*wide, None if temperature is None else temperature.double(), softcap)
    logprob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    total = (logprob * pulls[0]).sum() + (entropy * pulls[1]).sum()
    if ids is not None and topk_pull is not None:
        total = total + (log_p.gather(1, ids) * topk_pull).sum()
    expected = torch.autograd.grad(total, wide)

    def weighted(out, where) -> Tensor:  # out: HeadOut or TokenOut
        loss = out.logprob * pulls[0][where] + out.entropy * pulls[1][where]
        return loss if topk_pull is None else loss + (out.topk_logprob * topk_pull[where]).sum(1)

    asked = {"temperature": temperature, "softcap": softcap, "entropy": True, "teacher_ids": ids, "chunk": 128}
    out = head_outputs(hidden, weight, targets, **asked)
    assert float((out.logprob - logprob).detach().abs().max()) < FORWARD[dtype]
    assert float((out.entropy - entropy).detach().abs().max()) < FORWARD[dtype]
    found = torch.autograd.grad(weighted(out, slice(None)).sum(), (hidden, weight))
    formed = head_loss(hidden, weight, targets, weighted, **asked)
    assert float((formed.total - total).detach().abs()) < 1e-4 * float(total.detach().abs()) + 1e-2
    once = torch.autograd.grad(formed.total, (hidden, weight))
    for pair in (found, once):
        for a, b in zip(pair, expected, strict=True):
            assert relative(a, b) < GRADIENT[dtype]
