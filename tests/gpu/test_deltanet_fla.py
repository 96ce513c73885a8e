"""Gated DeltaNet on fla's kernels against the torch form in fp32, on a GPU, bf16: outputs and all gradients.

Tolerance 2e-2 relative L2: bf16 rounds q, k, v, states and outputs at 2^-9 each, which measures 7e-3 with the kernels in
Triton's interpreter; a lost boundary or state measures above 0.1. Ragged documents (1 and 2 tokens too), pieces cut
further, a tail, grouped heads; a row alone equals itself packed, and a row equals itself again, bit for bit.

    TRITON_CACHE_DIR=.. TILELANG_CACHE_DIR=.. pytest -x -s tests/gpu/test_deltanet_fla.py   # the errors are printed

Each kernel keeps one configuration, so it compiles once and nothing is tuned; the benchmark runs the tuned ones. Time is
compilation. Compiled for Hopper on one CPU core (Triton 3.7.1): 15 kernels in 10 s for the first test, 4 more in 5 s for
the second, none for the others; on a GPU with TileLang, its kernel takes 11 to 15 s in place of one of them.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from longspan.layout import CPGroup
from longspan.layout.seqinfo import make_seqinfo
from longspan.mixers.deltanet_choose import choose_delta_kernel
from longspan.mixers.deltanet_pieces import cut_pieces
from longspan.mixers.deltanet_torch import TorchDeltaKernel
from longspan.mixers.linear import DeltaShape, DeltaWeights, LinearPrepared, gated_delta, prepare_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),  # compilation, beside other programs
    pytest.mark.filterwarnings("default"),  # those of compilers while they compile are no failures of ours
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("fla") is None, reason="needs CUDA and fla-core"),
]
SHAPE = DeltaShape(key_heads=4, value_heads=8, key_dim=128, value_dim=128)
RAGGED = (1, 2, 3, 1, 700, 1, 64, 1300)
TOLERANCE = 2e-2
NAMES = ("output", "mixed", "b", "a", "convolution", "log decay", "step bias")


@pytest.fixture(scope="module", autouse=True)
def one_configuration() -> Iterator[None]:
    """Of each of fla's kernels: the first with four warps. Autotuners of other packages stay as they are."""
    from triton.runtime.autotuner import Autotuner

    plain = Autotuner.__init__

    def short(self, fn, arg_names, configs, *others, **named):
        four = [config for config in configs if config.num_warps == 4]
        plain(self, fn, arg_names, (four or configs)[:1], *others, **named)

    Autotuner.__init__ = short
    try:
        info = make_seqinfo("contiguous", torch.tensor([0, 1]), CPGroup.alone())
        device = torch.device("cuda", 0)
        choose_delta_kernel(device, torch.bfloat16).make(cut_pieces(info), device)  # imports fla
    finally:
        Autotuner.__init__ = plain
    yield


def run(lengths: tuple[int, ...], *, fla: bool, longest: int | None = None, start: int = 0) -> list[Tensor]:
    """Output and gradients of mixed, b, a and the weights. start: which tokens of the drawn row these are."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16 if fla else torch.float32
    draw = torch.Generator(device=device).manual_seed(0)
    total, tokens, heads = 4096, sum(lengths), SHAPE.value_heads
    channels = sum(SHAPE.channels)
    shapes = [(total, channels), (total, heads), (total, heads), (total, heads, SHAPE.value_dim)]
    mixed, b, a, gradient = (
        torch.randn(s, device=device, generator=draw).bfloat16()[start : start + tokens].to(dtype) for s in shapes
    )
    weights = [
        torch.randn(channels, 4, device=device, generator=draw),
        *(torch.full((heads,), -2.0, device=device),) * 2,
    ]
    leaves = [x.detach().requires_grad_() for x in (mixed, b, a, *(w.bfloat16().to(dtype) for w in weights))]
    cu = torch.tensor([0, *accumulate(lengths)])
    info = make_seqinfo("contiguous", cu, CPGroup.alone())
    prepared = prepare_linear(info, device, how="state", dtype=dtype)
    if longest is not None:
        pieces = cut_pieces(info, longest)
        kernel = TorchDeltaKernel(pieces, device) if not fla else type(prepared.kernel)(pieces, device)
        prepared = LinearPrepared("state", pieces, info.group, kernel, None)
    out = gated_delta(*leaves[:3], DeltaWeights(*leaves[3:]), shape=SHAPE, prepared=prepared, layer=0)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


@cache
def expected() -> list[Tensor]:
    return run(RAGGED, fla=False)


def worst(found: list[Tensor], case: str) -> float:
    """The largest error of a tensor; all are printed first."""
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected(), strict=True)]
    print(f"{case}: " + ", ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, errors, strict=True)), flush=True)
    return max(errors)


@pytest.mark.parametrize("longest", [None, 256])
def test_fla_equals_the_torch_form(longest: int | None) -> None:
    assert worst(run(RAGGED, fla=True, longest=longest), f"pieces of {longest}") < TOLERANCE


def test_a_lost_boundary_is_seen() -> None:
    assert worst(run((sum(RAGGED),), fla=True), "a lost boundary") > 5 * TOLERANCE


def test_the_same_row_gives_the_same_bits() -> None:
    """fla's TileLang kernel as shipped adds a term of the decay's gradient in a race (deltanet_tile.py)."""
    first = run(RAGGED, fla=True)
    again = [run(RAGGED, fla=True) for _ in range(10)]
    differ = [sum(not torch.equal(a, b) for b in others) for a, *others in zip(first, *again, strict=True)]
    print(dict(zip(NAMES, differ, strict=True)), "of 10 runs differ", flush=True)
    assert not any(differ)


def test_packed_equals_alone_bit_for_bit() -> None:
    """Outputs and token gradients; weight gradients are sums over other tokens."""
    packed, alone = run(RAGGED, fla=True), run((700,), fla=True, start=7)
    differ = [int((a[7:707] != b).sum()) for a, b in zip(packed[:4], alone[:4], strict=True)]
    print(dict(zip(NAMES[:4], differ, strict=True)), "numbers differ", flush=True)
    assert not any(differ)
