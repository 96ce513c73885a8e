"""Gradients of q, k and v cross the attention bridge as views of what the kernel wrote, and heads first they are what compiled
layers ask for: anything else is copied (512 MB a layer of 64k tokens at 16/8 heads of 128), for fixed lengths and free ones.

Controls: `x[0]`, the plain way to take a leading axis of size 1 off, copies, and so do compiled layers what is tokens first.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from partition_only import partition_only
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from longspan.engine.fsdp import compiled
from longspan.mixers.kernels import heads_first
from longspan.mixers.local import Local
from longspan.models import attention_bridge
from longspan.models.adapter import Context

TOKENS, HEADS, DIM = 12, 4, 8


class Attend(torch.autograd.Function):
    """Sum of q, k and v; keeps the gradients that it gives."""

    written: ClassVar[list[Tensor]] = []
    room: ClassVar[Callable[..., Tensor]] = staticmethod(heads_first)

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        Attend.written = [Attend.room(grad, *grad.shape).fill_(1.0) for _ in range(3)]
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
    assert all(x.is_contiguous() for x in grads)  # [1, H, T, D]


def test_an_index_copies() -> None:
    q, k, v = (as_the_decoder_has_them().requires_grad_() for _ in range(3))
    (grad,) = torch.autograd.grad(Attend.apply(*(x[0].transpose(0, 1) for x in (q, k, v))).sum(), q)
    assert grad.data_ptr() != Attend.written[0].data_ptr()


class Layer(nn.Module):
    """q and k are products and v a view of one, as after rotary embeddings; attention is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v = self.project(x).view(1, -1, HEADS, DIM).transpose(1, 2)
        return attend(v * 2, v * 3, v).flatten(1)


attend = torch.compiler.disable(decoder)


def tokens_first(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape)


@pytest.mark.filterwarnings("default")  # dynamo looks at .grad of what is no leaf
@pytest.mark.parametrize("lengths", [(TOKENS,), (TOKENS, 20, 28)], ids=["fixed", "free"])
@pytest.mark.parametrize(("room", "copies"), [(heads_first, 0), (tokens_first, 3)])
def test_compiled_layers_take_them_as_they_are(room, copies, lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compile_fx", partition_only)
    monkeypatch.setattr(Attend, "room", staticmethod(room))
    torch._dynamo.reset()
    layer = torch.compile(Layer(), backend=compiled.backend_of("none", deterministic=False))
    for length in lengths:
        out = layer(torch.randn(1, length, HEADS * DIM, requires_grad=True))
        grad = torch.ones_like(out)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            out.backward(grad)
    found = [event for event in seen.events() if event.name == "aten::clone"]
    assert len([event for event in found if event.input_shapes[0] == [1, HEADS, lengths[-1], DIM]]) == copies
