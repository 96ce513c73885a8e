"""Full-vocabulary KL on a GPU: the Triton rows against plain log-softmax in fp64, the peak of memory, and two engines.

fp32 tolerance 1e-5, of a KL above 1 relative: fp32 logits of 64 terms. bf16: 1e-4 on KL (logits are fp32), 2e-2 on gradients, because dlogits are
rounded to bf16 (2^-9) before the two matmuls. Inputs are exact in bf16: fp64 sees them too.
"""

import pytest
import torch
from torch import Tensor

from longspan import Engine, EngineConfig, Objective, Sample, launch
from longspan.objective import TeacherHead, head_kl, head_loss
from longspan.parity.reference import Reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS, WIDTH, TEACHER_WIDTH, VOCAB = 300, 64, 128, 5003
FORWARD = {torch.float32: 1e-5, torch.bfloat16: 1e-4}
GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CAPS = [(None, None), (5.0, None), (None, 4.0)]


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def plain(hidden: Tensor, weight: Tensor, temperature: Tensor | None, softcap: float | None) -> Tensor:
    """[T, V] log-probs, fp64."""
    z = hidden.double() @ weight.double().t()
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    return torch.log_softmax(z if temperature is None else z / temperature.double()[:, None], -1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize(("softcap", "teacher_cap"), CAPS)
def test_kl_equals_plain_log_softmax(
    dtype: torch.dtype, direction: str, tempered: bool, softcap: float | None, teacher_cap: float | None
) -> None:
    torch.manual_seed(0)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (draw(TOKENS, WIDTH), draw(VOCAB, WIDTH, scale=0.3)))
    theirs = [x.to(dtype) for x in (draw(TOKENS, TEACHER_WIDTH), draw(VOCAB, TEACHER_WIDTH, scale=0.2))]
    temperature = torch.rand(TOKENS, device="cuda") + 0.5 if tempered else None
    pull = torch.randn(TOKENS, device="cuda")
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    p, q = plain(*wide, temperature, softcap), plain(*theirs, temperature, teacher_cap)
    over, other = (q, p) if direction == "forward" else (p, q)
    want = (over.exp() * (over - other)).sum(1)
    expected = torch.autograd.grad((want * pull).sum(), wide, retain_graph=True)
    teacher = TeacherHead(*theirs, softcap=teacher_cap)
    asked = {"temperature": temperature, "softcap": softcap, "direction": direction, "chunk": 128}
    kl = head_kl(hidden, weight, teacher, **asked)
    found = torch.autograd.grad((kl * pull).sum(), (hidden, weight))
    targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
    once = one_pass(hidden, weight, targets, pull, p=p, want=want, wide=wide, teacher=teacher, asked=asked)
    error = (
        float(((kl - want) / want.clamp(min=1)).detach().abs().max()),
        *(relative(a, b) for a, b in zip(found, expected, strict=True)),
    )
    print(f"{dtype} {direction}: KL {error[0]:.1e}, gradients {max(error[1:]):.1e}")
    assert error[0] < FORWARD[dtype] and max(error[1:]) < GRADIENT[dtype]
    assert max(once) < GRADIENT[dtype]
    swapped = (other.exp() * (other - over)).sum(1)
    assert float((kl - swapped).detach().abs().max()) > 1e-1


def one_pass(hidden, weight, targets, pull, *, p, want, wide, teacher, asked) -> list[float]:
    """Gradient errors of head_loss: of the KL alone, and of the KL with log-prob and entropy."""
    logprob, entropy = p.gather(1, targets[:, None])[:, 0], -(p.exp() * p).sum(1)
    errors = []
    for mixed in (0.0, 0.7):

        def loss(out, where, mixed: float = mixed) -> Tensor:
            alone = pull[where] * out.teacher_kl
            return alone + mixed * (out.logprob - out.entropy) if mixed else alone

        formed = head_loss(hidden, weight, targets, loss, entropy=True, teacher=teacher, **asked)
        expected = torch.autograd.grad((pull * want + mixed * (logprob - entropy)).sum(), wide, retain_graph=True)
        found = torch.autograd.grad(formed.total, (hidden, weight))
        errors += [relative(a, b) for a, b in zip(found, expected, strict=True)]
    print(f"one pass: {max(errors):.1e}")
    return errors


def test_peak_is_a_chunk_of_each_side() -> None:
    """8,192 tokens, 64k ids: 2 GiB of fp32 logits a side; a chunk of 256 rows of both and dW take 0.2 GiB."""
    hidden, weight = draw(8192, 256).requires_grad_(), draw(65536, 256, scale=0.1).requires_grad_()
    teacher = TeacherHead(draw(8192, 512), draw(65536, 512, scale=0.1))
    head_kl(hidden, weight, teacher, chunk=256).sum().backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    head_kl(hidden, weight, teacher, chunk=256).sum().backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"peak {peak:.3f} GiB")
    assert peak < 0.3


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in (13, 1, 40, 7):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        found.append(Sample(ids[:-1], ids[1:], (torch.rand(length, generator=generator) > 0.3).float()))
    return found


def distil() -> dict[str, Tensor]:
    student, teacher = (Engine.build(EngineConfig("tiny:qwen3", seed=seed)) for seed in (0, 7))
    student.forward_backward(samples(), Objective("distill_full", direction="reverse"), teacher=teacher)
    return student.gradients()


def test_two_engines_on_one_gpu() -> None:
    """fp32 on the GPU against two plain models in fp64."""
    mine, theirs = (Reference("tiny:qwen3", dtype=torch.float64, seed=seed) for seed in (0, 7))
    total = sum(float(sample.mask.sum()) for sample in samples())
    for sample in samples():
        p = mine.outputs(sample).log_softmax
        with torch.no_grad():
            q = theirs.outputs(sample).log_softmax
        ((p.exp() * (p - q)).sum(-1) * sample.mask / total).sum().backward()
    found = launch(distil, ranks=1, timeout_s=200, device="cuda")[0]
    errors = {name: relative(found[name], want) for name, want in mine.gradients().items()}
    print(f"worst gradient {max(errors.values()):.1e}")
    assert max(errors.values()) < 1e-5
