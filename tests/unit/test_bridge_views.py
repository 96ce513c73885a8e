"""Gradients of q, k and v cross the attention bridge as views of what the kernel wrote, in the strides of q, k and v.

Those are what compiled layers ask for: anything else is copied (512 MB a layer of 64k tokens at 16/8 heads of 128). Control:
`x[0]`, the plain way to take a leading axis of size 1 off, copies.
"""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from longspan.mixers.local import Local
from longspan.models import attention_bridge
from longspan.models.adapter import Context

TOKENS, HEADS, DIM = 12, 4, 8


class Attend(torch.autograd.Function):
    """Sum of q, k and v; keeps the gradients that it gives."""

    written: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        Attend.written = [torch.ones(TOKENS, HEADS, DIM) for _ in range(3)]
        return tuple(Attend.written)


def decoder(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixer = SimpleNamespace(attend=lambda q, k, v, prepared, **_: Attend.apply(q, k, v))
    context = Context(None, mixer, None, None)
    return attention_bridge.decoder_attention(torch.nn.Identity(), q, k, v, None, scaling=1.0, longspan=context)[0]


def tower(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = torch.tensor([0, TOKENS], dtype=torch.int32)
    how = {"cu_seq_lens_q": cu, "max_length_q": TOKENS, "longspan": Context(None, None, None, None)}
    return attention_bridge.vision_attention(torch.nn.Identity(), q, k, v, None, scaling=1.0, **how)[0]


def as_the_decoder_has_them() -> Tensor:
    return torch.randn(1, TOKENS, HEADS, DIM).transpose(1, 2)


def as_the_tower_has_them() -> Tensor:
    return torch.randn(TOKENS, HEADS, DIM).transpose(0, 1).unsqueeze(0)


@pytest.mark.parametrize(
    ("bridge", "make"), [(decoder, as_the_decoder_has_them), (tower, as_the_tower_has_them)], ids=["decoder", "tower"]
)
def test_gradients_are_the_kernels_own_memory(bridge, make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Local, "attend", lambda self, q, k, v, prepared, **_: Attend.apply(q, k, v))
    inputs = [make().requires_grad_() for _ in range(3)]
    grads = torch.autograd.grad(bridge(*inputs).sum(), inputs)
    assert [x.data_ptr() for x in grads] == [x.data_ptr() for x in Attend.written]
    assert [x.stride() for x in grads] == [x.stride() for x in inputs]


def test_an_index_copies() -> None:
    q, k, v = (as_the_decoder_has_them().requires_grad_() for _ in range(3))
    (grad,) = torch.autograd.grad(Attend.apply(*(x[0].transpose(0, 1) for x in (q, k, v))).sum(), q)
    assert grad.data_ptr() != Attend.written[0].data_ptr()
