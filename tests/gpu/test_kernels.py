"""Attention kernels on a GPU against the reference: head dims, grouped heads, windows, empty segments, external LSE.

The oracle is kernels/reference.py in fp32 on the same bf16 inputs (itself checked against plain softmax on CPU). The
tolerance is choose.TOLERANCES: a right bf16 kernel is 3 to 8 times below it, a wrong one far above (see the control).
"""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.mixers.kernels import Block
from longspan.mixers.kernels.choose import choose_kernel, describe, self_check

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # FA4 4.0.0b36 warns while it compiles
]
NAMES = [
    pytest.param(
        "flash4", marks=pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn-4 is not installed")
    ),
    "flash2",
]
SHAPES = [(16, 8, 128), (4, 2, 64), (16, 16, 72), (4, 4, 80), (4, 4, 96), (4, 1, 256), (3, 3, 32)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_kernel_equals_reference(name: str, heads: int, kv_heads: int, head_dim: int) -> None:
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    kernel = choose_kernel(device, dtype, head_dim, name=name)
    errors = self_check(
        kernel, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device, window=48
    )
    worst = max(errors, key=lambda key: errors[key])
    print(f"{name} {heads}/{kv_heads}/{head_dim}: worst {worst} {errors[worst]:.2e}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_backward_repeats_bit_for_bit(name: str) -> None:
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    kernel = choose_kernel(device, dtype, 128, name=name, deterministic=True)
    block = Block.make((3000, 1096), (3000, 1096), kind="causal", device=device)
    q, k, v, dout = (torch.randn(4096, heads, 128, device=device, dtype=dtype) for heads in (8, 4, 4, 8))
    out, lse = kernel.forward(q, k, v, block, scale=0.1)
    first = kernel.backward(dout, q, k, v, out, lse, block, scale=0.1)
    for _ in range(5):
        again = kernel.backward(dout, q, k, v, out, lse, block, scale=0.1)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@dataclass(frozen=True)
class WrongScale:
    """The control: a kernel with a planted fault, 10 % too large a scale in dk."""

    inner: object
    name: str = "wrong"

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return self.inner.forward(*args, **kwargs)

    def backward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self.inner.backward(*args, **kwargs)
        return dq, dk * 1.1, dv


def test_self_check_refuses_a_wrong_kernel() -> None:
    device = torch.device("cuda", 0)
    kernel = WrongScale(choose_kernel(device, torch.bfloat16, 64, name="flash2"))
    with pytest.raises(UserError, match=r"wrong here: .*dk"):
        self_check(kernel, heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_compiles_into_one_graph(name: str) -> None:
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    kernel = choose_kernel(device, dtype, 64, name=name)
    block = Block.make((100, 28), (100, 28), kind="causal", device=device)
    q, k, v = (torch.randn(128, heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.forward(q * 2, k, v, block, scale=0.125)[0] + 1

    compiled = torch.compile(layer, fullgraph=True)
    assert torch.allclose(compiled(q, k, v).float(), layer(q, k, v).float(), atol=1e-2)


def test_auto_takes_the_fastest_kernel_and_says_so() -> None:
    device = torch.device("cuda", 0)
    kernel = choose_kernel(device, torch.bfloat16, 128)
    expected = "flash2" if find_spec("flash_attn") is None else "flash4"
    assert kernel.name == expected
    assert expected in describe(kernel, device, torch.bfloat16, 128)
    assert choose_kernel(device, torch.float32, 128).name == "reference"
