"""Program of test_deltanet_interpreted.py: our wrapper of fla on a CPU, in fp32, under Triton's interpreter (TRITON_INTERPRET=1
before triton is imported), against the torch form in fp64. Prints {case: {tensor: relative L2 error}} as JSON.

The interpreter has no clock to autotune by, so a kernel keeps its first configuration, and its `range` gives Python
numbers where one kernel wants Triton's.
"""

import builtins
import json
import warnings
from itertools import accumulate

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from longspan.layout import CPGroup
from longspan.layout.seqinfo import make_seqinfo
from longspan.mixers.deltanet_choose import _fla_kernel
from longspan.mixers.deltanet_pieces import cut_pieces
from longspan.mixers.deltanet_torch import TorchDeltaKernel
from longspan.mixers.linear import DeltaShape, DeltaWeights, LinearPrepared, gated_delta

CPU = torch.device("cpu")
SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=16)
LENGTHS = (1, 2, 1, 70, 3, 21)
NAMES = ("output", "mixed", "b", "a", "convolution", "log decay", "step bias")


class Step(int):
    def to(self, dtype: object) -> int:
        return int(self)


def first_configuration() -> None:
    """Every autotuner made from now on has one configuration."""
    plain = Autotuner.__init__

    def short(self, fn, arg_names, configs, *others, **named):
        plain(self, fn, arg_names, configs[:1], *others, **named)

    Autotuner.__init__ = short


def run(lengths: tuple[int, ...], *, fla: bool, longest: int | None = None) -> list[Tensor]:
    """Output, and gradients of mixed, b, a and the weights."""
    dtype = torch.float32 if fla else torch.float64
    draw = torch.Generator().manual_seed(0)
    tokens, heads, channels = sum(lengths), SHAPE.value_heads, sum(SHAPE.channels)
    sizes = [(tokens, channels), (tokens, heads), (tokens, heads), (channels, 4)]
    leaves = [torch.randn(s, generator=draw).to(dtype) for s in sizes]
    leaves += [torch.full((heads,), -2.0, dtype=dtype) for _ in range(2)]
    leaves = [x.requires_grad_() for x in leaves]
    gradient = torch.randn(tokens, heads, SHAPE.value_dim, generator=draw).to(dtype)
    info = make_seqinfo("contiguous", torch.tensor([0, *accumulate(lengths)]), CPGroup.alone())
    pieces = cut_pieces(info, longest)
    kernel = (_fla_kernel() if fla else TorchDeltaKernel)(pieces, CPU)
    prepared = LinearPrepared("state", pieces, info.group, kernel, None)
    out = gated_delta(*leaves[:3], DeltaWeights(*leaves[3:]), shape=SHAPE, prepared=prepared, layer=0)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def main() -> None:
    first_configuration()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=ImportWarning)  # as pytest has it
        warnings.filterwarnings("ignore", "Triton is not supported")
        _fla_kernel()
    from fla.ops.common import chunk_delta_h

    from longspan.mixers import deltanet_fla

    chunk_delta_h.range = lambda *bounds: map(Step, builtins.range(*(int(x) for x in bounds)))
    deltanet_fla.SMALLEST = 64  # a tail without 900 inert tokens
    expected = run(LENGTHS, fla=False)
    found = {
        "whole": errors(run(LENGTHS, fla=True), expected),
        "pieces": errors(run(LENGTHS, fla=True, longest=24), expected),
        "lost boundary": errors(run((sum(LENGTHS),), fla=True), expected),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
