"""Mixers on one rank: packed attention, selective recomputation, sinks, boundaries; and the deal of heads."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.errors import UserError
from longspan.layout import CPGroup, Layout, make_seqinfo
from longspan.layout.resolve import ulysses_refusal
from longspan.mixers import MIXERS, AttentionCache, Hybrid, Local, Ring, Ulysses, make_mixer, naive, packed_attention
from longspan.mixers.kernels import Block, Kernel
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.kernels.sdpa import Sdpa
from longspan.mixers.ulysses import kv_heads_by_rank
from longspan.mixers.ulysses_overlap import OverlappedUlysses, keep_output

CPU = torch.device("cpu")
LENGTHS = [5, 1, 17, 2, 3]


class Counting:
    """The reference kernel, counting its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.forwards = 0
        self.backwards = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, **how: object) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        return Reference().forward(q, k, v, block, **how)  # pyright: ignore[reportArgumentType]  passed on

    def backward(self, *tensors: object, **how: object) -> tuple[Tensor, Tensor, Tensor]:
        self.backwards += 1
        return Reference().backward(*tensors, **how)  # pyright: ignore[reportArgumentType]  passed on


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def leaves(heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    return [
        torch.randn(total, h, dim, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def places(lengths: list[int]) -> dict[str, Tensor]:
    return {
        "segment": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        "position": torch.cat([torch.arange(length) for length in lengths]),
    }


def test_a_hybrid_travels_as_its_parts_do() -> None:
    """Control: what it has without a transport of the machine's."""
    layout, transport = Layout(cp=4, mixer="hybrid", ulysses=2), SimpleNamespace(blocking=False)
    mixer = make_mixer(layout, transport, lean=True)
    assert mixer == Hybrid(2, OverlappedUlysses(transport, keep=keep_output), Ring(transport))
    assert make_mixer(layout).swap == Ulysses() and make_mixer(layout).ring != mixer.ring


@pytest.mark.parametrize("name", sorted(MIXERS))
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("with_sink", [False, True])
def test_every_mixer_attends_alone_on_one_rank(name: str, window: int | None, with_sink: bool) -> None:
    q, k, v = leaves()
    sink = torch.randn(4, dtype=torch.float64).requires_grad_() if with_sink else None
    inputs = [q, k, v] + ([sink] if sink is not None else [])
    expected = naive.attention(q, k, v, **places(LENGTHS), scale=0.3, window=window, sink=sink)
    dout = torch.randn_like(expected)
    mixer = make_mixer(Layout(cp=4, mixer=name, ulysses=2 if name == "hybrid" else None))
    prepared = mixer.prepare(make_seqinfo("zigzag", bounds(LENGTHS), CPGroup.alone()), CPU)
    found = mixer.attend(q, k, v, prepared, scale=0.3, window=window, sink=sink, kernel=Reference())
    assert float((found - expected).detach().abs().max()) < 1e-13
    pairs = zip(torch.autograd.grad(found, inputs, dout), torch.autograd.grad(expected, inputs, dout), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-13


@pytest.mark.parametrize("kernel", [Reference(), Sdpa()], ids=["plain", "sdpa"])
def test_d7_a_token_of_another_document_changes_nothing(kernel: Kernel) -> None:
    """D7, on one rank and bit for bit: outputs and gradients of the other documents; the control sees the change."""
    mixer = Local()
    prepared = mixer.prepare(make_seqinfo("identity", bounds(LENGTHS), CPGroup.alone()), CPU)
    segment = places(LENGTHS)["segment"]
    results = []
    for changed in (False, True):
        inputs = leaves()
        with torch.no_grad():
            for x in inputs:
                x[10] += float(changed)  # in document 2
        out = mixer.attend(*inputs, prepared, scale=0.3, kernel=kernel)
        dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[segment != 2], after[segment != 2])
        assert not torch.equal(before[segment == 2], after[segment == 2])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_for_towers(causal: bool) -> None:
    """Segments from cu_seqlens alone; full attention is the mean of values where all keys are equal."""
    q, k, v = leaves()
    found = packed_attention(q, k, v, bounds(LENGTHS), max_len=17, causal=causal, scale=0.3, kernel=Reference())
    starts = bounds(LENGTHS).tolist()
    for start, stop in itertools.pairwise(starts):
        keys, values = (x[start:stop].repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], keys) * 0.3
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        assert float((found[start:stop] - expected).detach().abs().max()) < 1e-13
    assert all(bool(torch.isfinite(grad).all()) for grad in torch.autograd.grad(found.sum(), (q, k, v)))


def test_selective_recomputation_attends_once() -> None:
    """The layer is recomputed, its attention is not; the gradient is the same bit for bit."""
    mixer = Local()
    prepared = mixer.prepare(make_seqinfo("identity", bounds(LENGTHS), CPGroup.alone()), CPU)

    def layers(x: Tensor, weights: list[Tensor], kernel: Counting, cache: AttentionCache | None) -> Tensor:
        def layer(x: Tensor, weight: Tensor, number: int) -> Tensor:
            q, k, v = (x @ weight).unflatten(-1, (3, 2, 4)).unbind(1)
            saved = cache.slot(number) if cache else None
            out = mixer.attend(q, k, v, prepared, scale=0.3, kernel=kernel, saved=saved)
            return x + out.flatten(1).sin()

        for number, weight in enumerate(weights):
            x = checkpoint(layer, x, weight, number, use_reentrant=False) if cache else layer(x, weight, number)  # pyright: ignore[reportAssignmentType]  its stub returns Any
        return x

    generator = torch.Generator().manual_seed(0)
    grads, kernels = [], []
    for cache in (None, AttentionCache()):
        x = torch.randn(sum(LENGTHS), 8, dtype=torch.float64, generator=generator.manual_seed(0)).requires_grad_()
        weights = [torch.randn(8, 24, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
        kernel = Counting()
        loss = layers(x, weights, kernel, cache).square().sum()
        grads.append(torch.autograd.grad(loss, [x, *weights]))
        kernels.append(kernel)
    assert [(kernel.forwards, kernel.backwards) for kernel in kernels] == [(3, 3), (3, 3)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_slot_is_emptied_by_its_recomputation() -> None:
    cache = AttentionCache()
    slot = cache.slot(3)
    assert slot is cache.slot(3) and slot is not cache.slot(4)
    assert slot.take() is None
    slot.put(torch.ones(1), torch.zeros(1))
    assert slot.take() is not None and slot.take() is None


def test_h4_heads_are_accepted_exactly_when_they_can_be_dealt() -> None:
    """H4: all (query heads, KV heads, ranks) up to 16: accepted iff each rank's slots serve its query heads rightly."""
    for heads in range(1, 17):
        for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
            for size in range(1, 17):
                reason = ulysses_refusal(size, heads)
                assert (reason is None) == (heads % size == 0) == (Ulysses().sizes(heads, kv_heads)(size) is None)
                if reason is not None:
                    listed = [int(n) for n in reason.split("in (")[1].split(")")[0].split(", ")]
                    assert listed == [n for n in range(1, heads + 1) if ulysses_refusal(n, heads) is None]
                    continue
                slots = kv_heads_by_rank(heads, kv_heads, size)
                mine, slots_each = heads // size, len(slots) // size
                assert len(slots) % size == 0 and mine % slots_each == 0
                for head in range(heads):
                    rank, place = divmod(head, mine)
                    slot = rank * slots_each + place // (mine // slots_each)
                    assert slots[slot] == head // (heads // kv_heads), (heads, kv_heads, size)
                if kv_heads % size == 0:
                    assert slots == tuple(range(kv_heads))  # nothing travels twice


def test_attend_refuses_heads_that_do_not_divide() -> None:
    """The same message as at start, before any collective, for callers that skipped `resolve`."""
    group = CPGroup(None, 0, 4, (0, 1, 2, 3))
    prepared = Ulysses().prepare(make_seqinfo("zigzag", bounds([8, 16]), group), CPU)
    q, k, v = (torch.zeros(6, heads, 8) for heads in (6, 3, 3))
    with pytest.raises(UserError, match=r"ulysses=4 needs query heads divisible by 4, got 6\. Use .* \(1, 2, 3, 6\)"):
        Ulysses().attend(q, k, v, prepared, scale=0.3, kernel=Reference())


def test_a_mixer_needs_a_resolved_layout() -> None:
    with pytest.raises(AssertionError, match="resolve the layout first"):
        make_mixer(Layout(cp=2))
