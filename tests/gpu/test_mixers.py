"""Mixers on two GPUs: every mixer and transport against one GPU, ragged documents, forward and gradients.

fp32 with the reference kernel: 1e-5 relative L2 (other order of sums only). bf16 with the chosen kernel: no farther
from fp32 than one GPU's bf16 is, times 1.2 (DESIGN.md). Ring and overlapped gather add two parts that a kernel rounded to
bf16 where one GPU rounds once, in out (partial softmaxes) and in every gradient; gather in dk and dv: two roundings of 2^-9
more. Control: keys of the wrong layout are far off. Overlapped Ulysses in one group has the bits of Ulysses; dq, whose parts
flash4 adds in any order, of a deterministic kernel. Two attentions a run, so that travel that one starts for the other's
backward, or a checkpoint's recomputation for both, is under way beside them. Overlapped gather, and the travel that it
starts, have not run on a GPU yet.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.launch import launch, world
from longspan.layout import make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.mixers import Gather, Local, Mixer, Ring, Saved, Ulysses
from longspan.mixers.gather_overlap import OverlappedGather
from longspan.mixers.kernels import Kernel
from longspan.mixers.kernels.choose import choose_kernel
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.symmetric import Pulled, Symmetric
from longspan.mixers.transport import Arrival, Collective
from longspan.mixers.ulysses_overlap import OverlappedUlysses, keep_output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]
LENGTHS = (1400, 4, 24, 3000, 20)
HEADS, KV_HEADS, DIM = 8, 4, 64
RECOMPUTED = "recomputed"


def mixers(device: torch.device) -> list[tuple[str, Mixer]]:
    found: list[tuple[str, Mixer]] = [("ulysses", Ulysses()), ("gather", Gather())]
    for name, transport in (("nccl", Collective()), ("symmetric", Symmetric(device))):
        found += [(f"ring {name}", Ring(transport)), (f"overlapped gather {name}", OverlappedGather(transport))]
        found += [(f"overlapped in {n} {name}", OverlappedUlysses(transport, n)) for n in (1, 2)]
        for groups, way in ((1, "keeping output"), (2, RECOMPUTED)):
            found.append((f"overlapped {way} {name}", OverlappedUlysses(transport, groups, keep_output)))
    return found


def attend(
    mixer: Mixer, info: Any, kernel: Kernel, tensors: list[Tensor], window: int | None, *, twice: bool = False
) -> list[Tensor]:
    """This rank's out, dq, dk, dv of two attentions' sum; two runs, so that buffers are used again. out must not move."""
    index = info.index.to(tensors[0].device)
    q, k, v, dout = (x[index].contiguous() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    prepared = mixer.prepare(info, q.device)
    runs = []
    for _ in range(2):
        slots = [Saved() if twice else None for _ in range(2)]

        def both(*inputs: Tensor, slots: list[Saved | None] = slots) -> Tensor:
            how = {"scale": DIM**-0.5, "kernel": kernel, "window": window}
            return sum(mixer.attend(*inputs, prepared, saved=saved, **how) for saved in slots)

        out = checkpoint(both, *inputs, use_reentrant=False) if twice else both(*inputs)
        runs.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    assert torch.equal(runs[0][0], runs[1][0])
    return runs[-1]


def exchanged(transport: Symmetric, x: Tensor, group: CPGroup) -> Arrival:
    return transport.exchange((x,), (torch.empty_like(x),), group)


def gathered(transport: Symmetric, x: Tensor, group: CPGroup) -> Arrival:
    return transport.gather((x[0],), group)


TRAVELS = (exchanged, gathered)  # each lands in a tensor like x


def overwritten(start: Callable[[Symmetric, Tensor, CPGroup], Arrival], group: CPGroup, device: torch.device) -> bool:
    """Whether a travel that nobody waits for lands in memory that was given to others since."""
    transport, x = Symmetric(device), torch.ones(2, 1 << 21, device=device)
    start(transport, x, group).wait()
    (slots,) = transport._slots.values()
    with torch.cuda.stream(slots.stream):
        torch.cuda._sleep(10**8)  # cycles: the pull comes late
    arrival = start(transport, x, group)
    del arrival
    others = [torch.zeros_like(x) for _ in range(4)]
    torch.cuda.synchronize()
    return any(bool(other.any()) for other in others)


def relative(found: list[Tensor], whole: list[Tensor], index: Tensor) -> list[float]:
    pairs = [(a.double(), b[index.to(b.device)].double()) for a, b in zip(found, whole, strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def allowed(name: str, single: list[float]) -> list[float]:
    twice = 2 * 2**-18
    in_parts = "ring" in name or "overlapped gather" in name
    extra = [twice] * 4 if in_parts else [0.0, 0.0, twice, twice] if "gather" in name else [0.0] * 4
    return [1.2 * (error**2 + more) ** 0.5 for error, more in zip(single, extra, strict=True)]


def compare() -> list[tuple[str, list[float], list[float]]]:
    """(case, errors, allowed errors) of this rank."""
    device, rank = world().device, dist.get_rank()
    group = CPGroup(dist.group.WORLD, rank, 2, (0, 1))
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = [(sum(LENGTHS), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    tensors = [torch.randn(s, device=device, generator=generator).bfloat16().float() for s in shapes]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    alone = make_seqinfo("identity", cu, CPGroup.alone(rank))
    flash, firm = (choose_kernel(device, torch.bfloat16, DIM, deterministic=fixed) for fixed in (False, True))
    found: list[tuple[str, list[float], list[float]]] = []
    narrow = [x.bfloat16() for x in tensors]
    for window in (None, 100):
        exact = attend(Local(), alone, Reference(), tensors, window)
        single = relative(attend(Local(), alone, flash, narrow, window), exact, alone.index)
        for kind in ("contiguous", "zigzag"):
            info, plain = make_seqinfo(kind, cu, group), exact
            for name, mixer in mixers(device):
                case, twice = f"{name} {kind} window {window}", RECOMPUTED in name
                errors = relative(attend(mixer, info, Reference(), tensors, window, twice=twice), exact, info.index)
                found.append((f"{case} fp32", errors, [1e-5] * 4))
                results = attend(mixer, info, flash, narrow, window, twice=twice)
                found.append((f"{case} bf16", relative(results, exact, info.index), allowed(name, single)))
                one_call = isinstance(mixer, OverlappedUlysses) and mixer.groups == 1  # as Ulysses, on the same heads
                if one_call or isinstance(mixer, Ulysses):
                    results[1] = attend(mixer, info, firm, narrow, window)[1]
                plain = results if isinstance(mixer, Ulysses) else plain
                if one_call:
                    moved = [float(not torch.equal(a, b)) for a, b in zip(results, plain, strict=True)]
                    found.append((f"{case} bits", moved, [0.0] * 4))
    other = make_seqinfo("zigzag", cu, group)
    swapped = attend(Ring(Collective()), make_seqinfo("contiguous", cu, group), Reference(), tensors, None)
    found.append(("control", [0.0], [relative(swapped, exact, other.index)[0] - 0.5]))
    for start in TRAVELS:
        found.append((f"dropped, {start.__name__}", [float(overwritten(start, group, device))], [0.0]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pulled, "__del__", lambda self: None)
            found.append((f"control of dropped, {start.__name__}", [0.0], [overwritten(start, group, device) - 0.5]))
    return found


def test_mixers_equal_one_gpu() -> None:
    for rank, cases in enumerate(launch(compare, ranks=2, timeout_s=240)):
        for name, errors, allowed in cases:
            print(
                rank, name, " ".join(f"{error:.2e}/{limit:.2e}" for error, limit in zip(errors, allowed, strict=True))
            )
        wrong = [name for name, errors, allowed in cases if any(e > a for e, a in zip(errors, allowed, strict=True))]
        assert not wrong, (rank, wrong)
