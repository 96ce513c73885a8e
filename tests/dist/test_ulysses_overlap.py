"""Ulysses by groups of heads equals plain Ulysses bit for bit, forward and backward, in fp64 on three and four ranks (gloo). Around
the ring of a hybrid within 1e-14: merges of parts take exponentials in vectors or one by one as heads are fewer, an ulp apart.

The oracle is mixers/ulysses.py and plain hybrid.py, themselves checked against naive attention. `Late` fills what travels with NaN until it is waited
for, so that a wait that misses or comes late is seen; it also notes the order of starts and waits. Controls: two head groups
swapped on their way home; a wait for the way there, home, or of what was sent ahead for backward left out.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late import Late, There
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.launch import launch
from longspan.layout import Layout, Mesh, make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo
from longspan.mixers import Hybrid, Mixer, Ring, Saved, Ulysses
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.transport import Ahead, Collective
from longspan.mixers.ulysses_overlap import Keep, OverlappedUlysses, keep_arrivals, keep_output
from longspan.mixers.ulysses_trip import Trip

Shape = tuple[int, int, int]
CASES: dict[int, list[Shape]] = {  # ranks -> heads, KV heads, largest number of groups
    4: [(8, 8, 2), (16, 8, 2), (16, 8, 4), (8, 4, 2), (8, 2, 2), (4, 1, 2)],
    3: [(6, 6, 2), (12, 3, 2)],
}
EDGES = {  # of documents; where tokens lie in a run some are shorter than the ranks
    (4, "contiguous"): [0, 1, 3, 16, 24, 64],
    (4, "zigzag"): [0, 16, 24, 64],
    (3, "contiguous"): [0, 1, 3, 16, 24, 48],
    (3, "zigzag"): [0, 6, 18, 24, 48],
}
LAYERED = {4: (16, 8, 2), 3: (6, 3, 1)}  # of two layers
RECOMPUTED = "s0 w0 s1 w1 s2 s3 mlp s4 w2 w3 w4 s5 w5"  # one layer; travels 2 and 3 are those of the recomputation
AHEAD = "s0 w0 s1 w1 s2 w2 s3 w3 mlp s4 s5 s6 w5 w4 s7 w7 mlp s8 w6 w8 s9 w9"  # two; travel 6 is the lower one's output
CPU = torch.device("cpu")


@contextmanager
def unwaited() -> Iterator[None]:
    """The planted fault: backward takes what was sent ahead as if it were there."""
    take = Ahead.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "take", lambda self: [There(arrival) for arrival in take(self) or []] or None)
        yield


to_heads, to_tokens = Trip.to_heads, Trip.to_tokens


def heads_unwaited(trip: Trip, *tensors: Tensor) -> tuple[list[Tensor], list[Any]]:
    landing, coming = to_heads(trip, *tensors)
    return landing, [There(arrival) for arrival in coming]


def tokens_unwaited(trip: Trip, tensors: tuple[Tensor, ...], into: tuple[Tensor, ...], g: int) -> Any:
    return There(to_tokens(trip, tensors, into, g))


def other_group(trip: Trip, tensors: tuple[Tensor, ...], into: tuple[Tensor, ...], g: int) -> Any:
    return to_tokens(trip, tensors, into, trip.groups - 1 - g)


FAULTS = (("to_heads", heads_unwaited), ("to_tokens", tokens_unwaited), ("to_tokens", other_group))  # of the forward


class Withheld(torch.autograd.Function):
    """A consumer that gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def hybrid_infos() -> dict[tuple[int, str], SeqInfo]:
    """Two by two ranks; of three each swaps heads with itself alone."""
    mesh = Mesh(Layout(cp=4, mixer="hybrid", ulysses=2), ranks=4, rank=dist.get_rank(), device=CPU)
    groups = {size: mesh.group(0, size) for size in (3, 4)}
    inside = {(n, kind): edges for (n, kind), edges in EDGES.items() if groups[n].rank >= 0}
    return {(n, kind): make_seqinfo(kind, torch.tensor(edges), groups[n]) for (n, kind), edges in inside.items()}


def own_groups() -> dict[int, CPGroup]:
    rank = dist.get_rank()
    three = dist.new_group([0, 1, 2])
    groups = {4: CPGroup(dist.group.WORLD, rank, 4, (0, 1, 2, 3))}
    return groups | ({3: CPGroup(three, rank, 3, (0, 1, 2))} if rank < 3 else {})


def attention(info: SeqInfo, mixer: Mixer, shape: Shape, *, runs: int = 1, withheld: bool = False) -> list[Tensor]:
    """out, dq, dk, dv; with two runs the second recomputes. withheld: rank 0's consumer gives no gradient."""
    generator = torch.Generator().manual_seed(info.rank)
    q, dout = (torch.randn(16, shape[0], 8, dtype=torch.float64, generator=generator) for _ in range(2))
    k, v = (torch.randn(16, shape[1], 8, dtype=torch.float64, generator=generator) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    prepared, saved = mixer.prepare(info, CPU), Saved() if runs > 1 else None
    for _ in range(runs):
        out = mixer.attend(*inputs, prepared, scale=0.3, kernel=Reference(), saved=saved)
    result = Withheld.apply(out) if withheld and info.rank == 0 else out
    return [out.detach(), *torch.autograd.grad(result, inputs, dout)]


def ulysses(late: Late, groups: int, keep: Keep) -> Mixer:
    return OverlappedUlysses(late, groups, keep)


def hybrid(late: Late, groups: int, keep: Keep) -> Mixer:
    return Hybrid(2, OverlappedUlysses(late, groups, keep), Ring(late))


MAKERS: dict[str, tuple[Mixer, Callable[..., Mixer], float]] = {  # the oracle, what is tested, how far from it at most
    "ulysses": (Ulysses(), ulysses, 0.0),
    "hybrid": (Hybrid(2), hybrid, 1e-14),
}


def ways(shape: Shape, make: Callable[..., Mixer] = ulysses) -> Iterator[tuple[str, Mixer, int]]:
    """(name, mixer, runs)"""
    for keep, runs in ((keep_arrivals, 1), (keep_output, 1), (keep_output, 2)):
        yield f"{keep.__name__} run {runs}", make(Late(), shape[2], keep), runs


def compare(infos: dict[tuple[int, str], SeqInfo], name: str) -> list[tuple[str, bool]]:
    """(case, equal) for every case: one attention."""
    found = []
    plain, make, most = MAKERS[name]
    for (size, kind), info in infos.items():
        for shape in CASES[size]:
            oracle = attention(info, plain, shape)
            for way, mixer, runs in ways(shape, make):
                result = attention(info, mixer, shape, runs=runs)
                right = same(oracle, result, most)
                if name == "ulysses":
                    right = right and heads_first(oracle) and heads_first(result)
                found.append((f"{name} {size} ranks {kind} {shape} {way}", right))
    return found


def heads_first(result: list[Tensor]) -> bool:
    """Whether the gradients lie in memory as compiled layers want them."""
    return all(x.transpose(0, 1).is_contiguous() for x in result[1:])


def caught(info: SeqInfo, name: str) -> list[tuple[str, bool]]:
    """(fault, its out differs) of every way."""
    shape, found = CASES[info.size][0], []
    plain, make, most = MAKERS[name]
    oracle = attention(info, plain, shape)
    for attribute, fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trip, attribute, fault)
            for way, mixer, runs in ways(shape, make):
                moved = not same(oracle[:1], attention(info, mixer, shape, runs=runs)[:1], most)
                found.append((f"{name} control {fault.__name__} {way}", moved))
    return found


def without_output_gradient(info: SeqInfo) -> list[tuple[str, bool]]:
    """(case, equal): rank 0's gradient of the output is undefined, which counts as zeros; its peers travel on."""
    shape = CASES[info.size][0]
    whole, oracle = (attention(info, Ulysses(), shape, withheld=withheld) for withheld in (False, True))
    found = [("gradient withheld, control", not torch.equal(whole[2], oracle[2]) or info.rank > 0)]
    for way, mixer, runs in ways(shape):
        equal = same(oracle, attention(info, mixer, shape, runs=runs, withheld=True))
        found.append((f"gradient withheld {way}", equal))
    return found


def same(a: list[Tensor], b: list[Tensor], most: float = 0.0) -> bool:
    return all(torch.allclose(x, y, rtol=0.0, atol=most) for x, y in zip(a, b, strict=True))  # NaN is never close


class Layers:
    """Decoder layers around one mixer, with the graph of a step."""

    def __init__(self, info: SeqInfo, heads: int, kv_heads: int, layers: int = 2) -> None:
        generator = torch.Generator().manual_seed(heads)
        shapes = [(16, 8 * heads), (16, 8 * kv_heads), (16, 8 * kv_heads), (8 * heads, 16), (16, 24), (24, 16)]
        draw = [[torch.randn(s, dtype=torch.float64, generator=generator) / 4 for s in shapes] for _ in range(layers)]
        self.weights = [[x.requires_grad_() for x in one] for one in draw]
        generator.manual_seed(info.rank)
        self.x, self.grad = (torch.randn(16, 16, dtype=torch.float64, generator=generator) for _ in range(2))
        self.x.requires_grad_()
        self.info = info

    def run(self, mixer: Mixer, *, twice: bool, log: list[str] | None = None) -> Tensor:
        prepared, x = mixer.prepare(self.info, CPU), self.x
        for weights in self.weights:
            saved = Saved() if twice else None

            def layer(x: Tensor, weights: list[Tensor] = weights, saved: Saved | None = saved) -> Tensor:
                q, k, v = ((x @ w).unflatten(1, (-1, 8)) for w in weights[:3])
                out = mixer.attend(q, k, v, prepared, scale=0.3, kernel=Reference(), saved=saved)
                x = x + out.flatten(1) @ weights[3]
                inner = (x @ weights[4]).tanh()
                if log is not None:
                    inner.register_hook(lambda _: log.append("mlp"))
                return x + inner @ weights[5]

            x = checkpoint(layer, x, use_reentrant=False) if twice else layer(x)
        return x

    def gradients(self, out: Tensor, **how: bool) -> list[Tensor]:
        inputs = [self.x, *(w for weights in self.weights for w in weights)]
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad, **how)]


def in_layers(infos: dict[tuple[int, str], SeqInfo]) -> list[tuple[str, bool]]:
    """(case, equal) of two layers: travel that a recomputation or the layer above starts."""
    found = []
    for (size, kind), info in infos.items():
        heads, kv_heads, groups = LAYERED[size]
        layers = Layers(info, heads, kv_heads)
        oracle = layers.gradients(layers.run(Ulysses(), twice=False))
        mixer = OverlappedUlysses(Late(), groups, keep_output)
        for twice in (False, True):
            case = f"two layers, {size} ranks {kind}, twice {twice}"
            drop(layers, mixer, twice)
            out = layers.run(mixer, twice=twice)
            found.append((case, same(oracle, layers.gradients(out, retain_graph=True))))
            found.append((f"{case}, again", same(oracle, layers.gradients(out))))
            with unwaited():
                moved = not same(oracle, layers.gradients(layers.run(mixer, twice=twice)))
            found.append((f"{case}, control", moved))
    return found


def drop(layers: Layers, mixer: Mixer, twice: bool) -> None:
    """Starts travels for a backward that never comes: the lower layer's; a recomputed graph's."""
    out = layers.run(mixer, twice=twice)
    torch.autograd.grad(out, layers.weights[1], layers.grad)
    saved, prepared = Saved(), mixer.prepare(layers.info, CPU)
    q, k, v = ((layers.x @ w).unflatten(1, (-1, 8)) for w in layers.weights[0][:3])
    for _ in range(2):
        out = mixer.attend(q, k, v, prepared, scale=0.3, kernel=Reference(), saved=saved)
    del out, saved, prepared
    gc.collect()


def order(info: SeqInfo, *, layers: int, twice: bool) -> str:
    """Starts and waits of one step."""
    transport = Late()
    model = Layers(info, 8, 4, layers)
    model.gradients(model.run(OverlappedUlysses(transport, 1, keep_output), twice=twice, log=transport.log))
    return " ".join(transport.log)


def without_gradient(info: SeqInfo) -> str:
    """Starts and waits of a layer and its recomputation that no gradient enters."""
    transport, saved = Late(), Saved()
    mixer = OverlappedUlysses(transport)
    first, second = (
        mixer.attend(*torch.ones(3, 16, 4, 8), mixer.prepare(info, CPU), scale=0.3, kernel=Reference(), saved=saved)
        for _ in range(2)
    )
    assert torch.equal(first, second)
    return " ".join(transport.log)


def kept_bytes(info: SeqInfo, keep: Callable[..., Tensor]) -> int:
    """What autograd holds until backward, in distinct storages, with what the next layer keeps of the output."""
    mixer = OverlappedUlysses(Collective(), keep=keep)
    q, k, v = (torch.randn(16, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = mixer.attend(q, k, v, mixer.prepare(info, CPU), scale=0.3, kernel=Reference())
        out.square()
    return sum(held.values())


def everything() -> tuple[list[tuple[str, bool]], list[int], list[str]]:
    groups = own_groups()
    infos = {(n, kind): make_seqinfo(kind, torch.tensor(e), groups[n]) for (n, kind), e in EDGES.items() if n in groups}
    one = infos[4, "contiguous"]
    orders = [order(one, layers=1, twice=True), order(one, layers=2, twice=False), without_gradient(one)]
    kept = [kept_bytes(one, keep) for keep in (keep_arrivals, keep_output)]
    hybrids = hybrid_infos()
    cases = compare(infos, "ulysses") + compare(hybrids, "hybrid")
    controls = caught(one, "ulysses") + caught(hybrids[4, "contiguous"], "hybrid")
    return cases + in_layers(infos) + controls + without_output_gradient(one), kept, orders


def test_overlapped_ulysses_is_ulysses_bit_for_bit() -> None:
    for rank, (cases, (twice, once), orders) in enumerate(launch(everything, ranks=4, timeout_s=120)):
        assert orders == [RECOMPUTED, AHEAD, RECOMPUTED[:11]], rank
        assert twice - once == 16 * 4 * 8 * 8, (rank, twice, once)  # one [T/N, H, D] in fp64
        sizes = [size for size in CASES if rank < size]
        assert len(cases) == sum(2 * 2 * 3 * len(CASES[size]) + 2 * 6 for size in sizes) + 2 * 3 * len(FAULTS) + 4
        assert all(equal for _, equal in cases), (rank, [name for name, equal in cases if not equal])
