"""What Ulysses over a transport that leaves the SMs alone holds of attention's output, against what the memory model counts for it.

Bytes alive on each rank: every layer keeps its output once, and while a layer's backward runs the output of the attention below is
on its way besides. The model cannot know the transport. It counts what the other way keeps, a second output a layer, and that covers
both. Controls: without the travel ahead one output less is alive; without the second output in the model, it is below.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live import Live
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longspan.data.activations import Activations, attention_kept
from longspan.data.shape import ModelShape
from longspan.launch import launch
from longspan.layout import CPGroup, make_seqinfo
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.transport import Ahead, Collective
from longspan.mixers.ulysses_overlap import OverlappedUlysses, keep_output
from longspan.models.tiny import tiny

TOKENS, HEAD_DIM, HIDDEN = 24, 8, 2  # tokens of a rank; hidden states hardly count
HEADS = {2: (4, 2), 3: (6, 3)}  # ranks -> query and KV heads
LAYERS = (1, 2, 3, 6)


class Direct(Collective):
    """What travels takes no memory but where it lands."""

    blocking = False

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Any:
        with _disable_current_modes():
            arrival = super().exchange(parts, into, group)
            arrival.wait()
        return There(into)


@dataclasses.dataclass(frozen=True)
class There:
    into: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        return self.into


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


def alive(layers: int) -> int:
    """Most bytes alive through forward and backward of so many attentions, whose projections keep nothing."""
    size, rank = dist.get_world_size(), dist.get_rank()
    info = make_seqinfo(
        "contiguous", torch.tensor([0, size * TOKENS]), CPGroup(dist.group.WORLD, rank, size, tuple(range(size)))
    )
    mixer = OverlappedUlysses(Direct(), keep=keep_output)
    heads, kv_heads = HEADS[size]
    into = [torch.ones(HIDDEN, n * HEAD_DIM, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)]
    prepared, back = mixer.prepare(info, torch.device("cpu")), into[0].t().contiguous()
    start = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with Live([]) as live:
        x = start
        for _ in range(layers):
            q, k, v = ((x @ weight).unflatten(1, (-1, HEAD_DIM)) for weight in into)
            x = x + mixer.attend(q, k, v, prepared, scale=0.3, kernel=Alone()).flatten(1) @ back
        del q, k, v
        x.sum().backward()
    return live.peak


def measured() -> tuple[list[int], list[int]]:
    """By number of layers, as it is and with what would travel ahead sent when it is needed."""
    ahead = [alive(layers) for layers in LAYERS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "start", lambda self: None)
        return ahead, [alive(layers) for layers in LAYERS]


@pytest.mark.parametrize("ranks", HEADS)
def test_the_output_that_travels_ahead_is_counted(ranks: int) -> None:
    heads, kv_heads = HEADS[ranks]
    config = tiny("qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM)
    shape, out = ModelShape.from_config(config.to_dict()), TOKENS * heads * HEAD_DIM * 2
    compiled = Activations(shape, 2, compile=True)
    second = TOKENS * (compiled.kept("selective", ranks) - compiled.kept("selective", 1))
    assert second == shape.attention_layers * out, "one output a layer more than a row of one rank"
    once, said = (TOKENS * attention_kept(shape, 2, size, queries=2, keys=2) for size in (1, ranks))
    for ahead, needed in launch(measured, ranks=ranks, timeout_s=60):
        more = [layers - 1 for layers in LAYERS[1:]]  # than one
        held, control = ([found - sums[0] for found in sums[1:]] for sums in (ahead, needed))
        assert held == [n * once + out for n in more]
        assert control == [n * once for n in more], "nothing is on its way"
        assert all(found <= n * said for found, n in zip(held, more, strict=True))
        assert held[0] == said > once, "two layers: what is counted is what is held, and one output less is not enough"
