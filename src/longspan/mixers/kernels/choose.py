"""Which kernel runs, chosen by device, dtype and head dim; and the check that it is right before it is used.

`auto` takes the first of flash4 (where flash-attn-4 is installed; compute capability 9 to 11), flash2 (CUDA, PyTorch's
own), reference (any device and dtype). A kernel that is asked for by name and cannot run is an error, never another.
`self_check` compares output, LSE and gradients with reference.py on a small ragged case of this run's heads and head
dim, also as two blocks of one softmax, as a ring uses them. It costs seconds: the kernels compile then.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from longspan.errors import UserError

from . import Block, Kernel
from .flash2 import MAX_HEAD_DIM as FLASH2_MAX_HEAD_DIM
from .flash2 import Flash2
from .reference import Reference

__all__ = ["KERNELS", "choose_kernel", "describe", "self_check"]

HALF = (torch.bfloat16, torch.float16)
FLASH4_MAX_HEAD_DIM = 256

# Relative L2 errors above which a kernel is refused. A right bf16 kernel measures 2e-3 to 6e-3 here (unit roundoff
# 2^-8 = 3.9e-3, averaged over a row), f16 8 times less; a wrong mask, scale or dQ is above 0.1. f32: TF32 gives 5e-4.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def choose_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, name: str = "auto", *, deterministic: bool = False
) -> Kernel:
    """The kernel to use; UserError where the named one cannot run, with the reason and the way out."""
    if name not in ("auto", *KERNELS):
        raise UserError(f"kernel={name!r} is not one of {('auto', *KERNELS)}")
    if name != "auto":
        reason = KERNELS[name][0](device, dtype, head_dim)
        if reason:
            raise UserError(f"kernel={name!r} {reason}. Use kernel='auto'")
        return KERNELS[name][1](deterministic)
    return next(make(deterministic) for why_not, make in KERNELS.values() if not why_not(device, dtype, head_dim))


def describe(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """One line for the start of a run: the kernel, and why each faster one is not used."""
    passed = []
    for name, (why_not, _) in KERNELS.items():
        if name == kernel.name:
            break
        passed.append(f"{name} {why_not(device, dtype, head_dim) or 'was not asked for'}")
    reasons = f" ({'; '.join(passed)})" if passed else ""
    return f"attention kernel: {kernel.name}, {dtype}, head dim {head_dim}, {device}{reasons}"


def _flash4_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if dtype not in HALF:
        return f"needs bfloat16 or float16, got {dtype}"
    if head_dim > FLASH4_MAX_HEAD_DIM:
        return f"needs a head dim of at most {FLASH4_MAX_HEAD_DIM}, got {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in (9, 10, 11):
        return f"needs compute capability 9 to 11, got {capability[0]}.{capability[1]}"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "needs the package flash-attn-4 (pip install 'longspan[cuda]')"
    return ""


def _flash2_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if device.type != "cuda":
        return f"needs a CUDA device, got {device.type}"
    if dtype not in HALF:
        return f"needs bfloat16 or float16, got {dtype}"
    if head_dim > FLASH2_MAX_HEAD_DIM:
        return f"needs a head dim of at most {FLASH2_MAX_HEAD_DIM}, got {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability[0] >= 8 else f"needs compute capability 8, got {capability[0]}.{capability[1]}"


def _make_flash4(deterministic: bool) -> Kernel:
    from .flash4 import Flash4  # optional package, 6 s to import

    return Flash4(deterministic)


# name -> (why it cannot run here, or "", and how to make it), fastest first
KERNELS: dict[str, tuple[Callable[[torch.device, torch.dtype, int], str], Callable[[bool], Kernel]]] = {
    "flash4": (_flash4_why_not, _make_flash4),
    "flash2": (_flash2_why_not, Flash2),
    "reference": (lambda device, dtype, head_dim: "", lambda deterministic: Reference()),
}


def self_check(
    kernel: Kernel,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
) -> dict[str, float]:
    """Relative errors of the kernel against the reference in f32 (f64 for f64), by "case/tensor".

    Raises UserError when one is above TOLERANCES[dtype] or not finite: such a kernel would train on wrong numbers.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    errors = {}
    for case, block, block_window in _cases(device, window):
        q, k, v, dout = _inputs(block, heads, kv_heads, head_dim, dtype, device)
        scale = head_dim**-0.5
        expected = _run(Reference(), dout.to(wide), q.to(wide), k.to(wide), v.to(wide), block, scale, block_window)
        found = _run(kernel, dout, q, k, v, block, scale, block_window)
        for tensor, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
            errors[f"{case}/{tensor}"] = _relative(a, b)
    errors |= _two_blocks(kernel, heads, kv_heads, head_dim, dtype, device, wide)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    if not errors[worst] <= TOLERANCES[dtype]:
        raise UserError(
            f"kernel={kernel.name!r} is wrong here: {worst} differs from the reference by {errors[worst]:.2g} "
            f"(allowed {TOLERANCES[dtype]:g}) with {heads} heads, {kv_heads} KV heads, head dim {head_dim}, {dtype}, "
            f"{device}. Use kernel='flash2' or 'reference', and check the versions of torch and flash-attn-4"
        )
    return errors


def _cases(device: torch.device, window: int | None) -> Iterator[tuple[str, Block, int | None]]:
    lens_q, lens_k = (
        (150, 1, 0, 40, 130),
        (150, 1, 19, 25, 260),
    )  # an empty segment; rows that see no key (40 against 25)
    causal = Block.make(lens_q, lens_k, kind="causal", device=device)
    yield "causal", causal, None
    yield "full", Block.make(lens_q, (90, 3, 19, 0, 260), kind="full", device=device), None
    if window is not None:
        yield "window", Block.make(lens_q, lens_k, kind="causal", device=device), min(window, 64)


def _two_blocks(
    kernel: Kernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    wide: torch.dtype,
) -> dict[str, float]:
    """Keys in two blocks under one softmax: each block's backward gets the merged output and LSE, as in a ring."""
    whole = Block.make((200,), (320,), kind="causal", device=device)
    first = Block.make((200,), (120,), kind="full", device=device)
    second = Block.make((200,), (200,), kind="causal", device=device)
    scale = head_dim**-0.5
    q, k, v, dout = _inputs(whole, heads, kv_heads, head_dim, dtype, device)
    expected = _run(Reference(), dout.to(wide), q.to(wide), k.to(wide), v.to(wide), whole, scale, None)
    pieces = [(first, k[:120], v[:120]), (second, k[120:], v[120:])]
    outs, lses = zip(*(kernel.forward(q, kp, vp, block, scale=scale) for block, kp, vp in pieces), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum(o.to(wide) * (part - lse).exp().t()[..., None] for o, part in zip(outs, lses, strict=True))
    grads = [kernel.backward(dout, q, kp, vp, out.to(dtype), lse, block, scale=scale) for block, kp, vp in pieces]
    dq = grads[0][0].to(wide) + grads[1][0].to(wide)
    dk, dv = (torch.cat([grads[0][i], grads[1][i]]) for i in (1, 2))
    named = zip(("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv), expected, strict=True)
    return {f"two blocks/{name}": _relative(a, b) for name, a, b in named}


def _run(
    kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, window: int | None
) -> tuple[Tensor, ...]:
    out, lse = kernel.forward(q, k, v, block, scale=scale, window=window)
    return out, lse, *kernel.backward(dout, q, k, v, out, lse, block, scale=scale, window=window)


def _inputs(
    block: Block, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """q, k, v, dout, the same on every machine: drawn on the CPU."""
    generator = torch.Generator().manual_seed(0)
    assert block.lens_q is not None and block.lens_k is not None
    shapes = [
        (sum(block.lens_q), heads),
        (sum(block.lens_k), kv_heads),
        (sum(block.lens_k), kv_heads),
        (sum(block.lens_q), heads),
    ]
    return [torch.randn(*shape, head_dim, generator=generator).to(device, dtype) for shape in shapes]


def _relative(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error over finite elements; infinite ones (LSE of rows without keys) must be equal."""
    found, expected = found.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(found[~finite], expected[~finite]):
        return float("nan")
    return float((found[finite] - expected[finite]).norm() / expected[finite].norm().clamp_min(1e-30))
