"""What Ulysses holds of attention's output, and the largest that it sends, against what the memory model counts.

Bytes alive on each rank. Over a transport that leaves the SMs alone, under selective recomputation, every layer keeps its output once,
and while a layer's backward runs the output of the attention below is on its way besides; over collectives every layer keeps two.
Controls: without the travel ahead one output less is alive; each way is not what the model says of the other.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live import Direct, Live
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longspan.data.activations import Activations, attention_kept
from longspan.data.shape import ModelShape
from longspan.data.travel import COLLECTIVES, SLOTS, Travel
from longspan.launch import launch
from longspan.layout import CPGroup, Layout, make_seqinfo
from longspan.mixers import Mixer, Ulysses, make_mixer
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.transport import Ahead
from longspan.models.tiny import tiny

TOKENS, HEAD_DIM, HIDDEN = 24, 8, 2  # tokens of a rank; hidden states hardly count
HEADS = {2: (4, 2), 3: (6, 3)}  # ranks -> query and KV heads
LAYERS = (1, 2, 3, 6)


@dataclasses.dataclass(frozen=True)
class Alone(Reference):
    """A kernel without temporaries."""

    def forward(self, *tensors: Any, **how: Any) -> tuple[Tensor, Tensor]:
        with _disable_current_modes():
            made = Reference.forward(self, *tensors, **how)
        return made[0].clone(), made[1].clone()

    def backward(self, *tensors: Any, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _disable_current_modes():
            made = Reference.backward(self, *tensors, **how)
        return made[0].clone(), made[1].clone(), made[2].clone()


def alive(layers: int, mixer: Mixer) -> int:
    """Most bytes alive through forward and backward of so many attentions, each before a projection that trains."""
    size, rank = dist.get_world_size(), dist.get_rank()
    info = make_seqinfo(
        "contiguous", torch.tensor([0, size * TOKENS]), CPGroup(dist.group.WORLD, rank, size, tuple(range(size)))
    )
    heads, kv_heads = HEADS[size]
    into = [torch.ones(HIDDEN, n * HEAD_DIM, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
    prepared, back = mixer.prepare(info, torch.device("cpu")), into[0].t().contiguous().requires_grad_()
    start = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with Live([]) as live:
        x = start
        for _ in range(layers):
            q, k, v = ((x @ weight).unflatten(1, (-1, HEAD_DIM)) for weight in into)
            x = x + mixer.attend(q, k, v, prepared, scale=0.3, kernel=Alone()).flatten(1) @ back
        del q, k, v
        x.sum().backward()
    return live.peak


def measured() -> tuple[list[int], list[int], list[int], int]:
    """By number of layers: as it is, with what would travel ahead sent when it is needed, and over collectives; bytes of a travel."""
    transport = Direct()
    lean = make_mixer(Layout(cp=dist.get_world_size(), mixer="ulysses"), transport, lean=True)
    ahead = [alive(layers, lean) for layers in LAYERS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "start", lambda self: None)
        needed = [alive(layers, lean) for layers in LAYERS]
    # a gloo thread may hold what it sent a moment longer
    collective = [min(alive(layers, Ulysses()) for _ in range(5)) for layers in LAYERS]
    return ahead, needed, collective, transport.most


@pytest.mark.parametrize("ranks", HEADS)
def test_outputs_and_buffers_are_counted_by_how_attention_travels(ranks: int) -> None:
    heads, kv_heads = HEADS[ranks]
    config = tiny("qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM)
    shape, out = ModelShape.from_config(config.to_dict()), TOKENS * heads * HEAD_DIM * 2
    symmetric = Travel("ulysses", symmetric=True)
    once, twice = (Activations(shape, 2, compile=True, travel=travel) for travel in (symmetric, COLLECTIVES))
    second = TOKENS * (twice.kept("selective", ranks) - once.kept("selective", ranks))
    assert second == shape.attention_layers * out, "one output a layer"
    on_its_way = TOKENS * (once.backward("selective", ranks) - twice.backward("selective", ranks))
    assert on_its_way == out and once.backward("none", ranks) == twice.backward("none", ranks)
    one, two = (
        TOKENS * attention_kept(shape, 2, ranks, queries=2, keys=2, one_output=travel.one_output(shape, "selective"))
        for travel in (symmetric, COLLECTIVES)
    )
    more = [layers - 1 for layers in LAYERS[1:]]  # than one
    for *sums, most in launch(measured, ranks=ranks, timeout_s=60):
        held, control, collective = ([found - each[0] for found in each[1:]] for each in sums)
        assert held == [n * one + on_its_way for n in more]
        assert control == [n * one for n in more], "nothing is on its way"
        assert collective == [n * two for n in more]
        assert held[1:] != collective[1:], "two layers hold as much either way, more do not"
        assert symmetric.buffers(shape, 2, TOKENS, ranks) == SLOTS * most
