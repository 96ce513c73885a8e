"""Ulysses by groups of heads equals plain Ulysses bit for bit, forward and backward, in fp64 on three and four ranks (gloo).

The oracle is mixers/ulysses.py, itself checked against naive attention. `Late` fills what travels with NaN until it is waited
for, so that a wait that misses or comes late is seen; it also notes the order of starts and waits. Controls: two head groups
swapped; what was sent ahead for backward used without a wait.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.launch import launch
from longspan.layout import make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.layout.seqinfo import SeqInfo
from longspan.mixers import Mixer, Saved, Ulysses
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.transport import Ahead, Arrival, Collective
from longspan.mixers.ulysses import UlyssesPrepared
from longspan.mixers.ulysses_overlap import OverlappedUlysses, keep_arrivals, keep_output
from longspan.mixers.ulysses_trip import Trip

CASES = {  # ranks -> heads, KV heads, largest number of groups
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


class LateArrival:
    """An arrival that is NaN until it is waited for."""

    def __init__(self, number: int, into: tuple[Tensor, ...], arrival: Arrival, log: list[str]) -> None:
        self.number, self.into, self.arrival, self.log = number, into, arrival, log
        log.append(f"s{number}")

    def wait(self) -> tuple[Tensor, ...]:
        self.log.append(f"w{self.number}")
        for x, landed in zip(self.into, self.arrival.wait(), strict=True):
            x.copy_(landed)
        return self.into


class Late(Collective):
    """gloo, whose exchanges land at the last moment."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.travels = 0

    def exchange(self, parts: tuple[Tensor, ...], into: tuple[Tensor, ...], group: CPGroup) -> Any:
        landing = tuple(x.new_empty(x.shape) for x in into)
        arrival = super().exchange(parts, landing, group)
        for x in into:
            x.fill_(float("nan"))
        self.travels += 1
        return LateArrival(self.travels - 1, into, arrival, self.log)


@contextmanager
def unwaited() -> Iterator[None]:
    """The planted fault: backward takes what was sent ahead as if it were there."""

    class There:
        def __init__(self, arrival: Any) -> None:
            self.wait = lambda: arrival.into

    take = Ahead.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ahead, "take", lambda self: [There(arrival) for arrival in take(self) or []] or None)
        yield


def own_groups() -> dict[int, CPGroup]:
    rank = dist.get_rank()
    three = dist.new_group([0, 1, 2])
    groups = {4: CPGroup(dist.group.WORLD, rank, 4, (0, 1, 2, 3))}
    return groups | ({3: CPGroup(three, rank, 3, (0, 1, 2))} if rank < 3 else {})


def compare(infos: dict[tuple[int, str], SeqInfo]) -> list[tuple[str, bool]]:
    """(case, equal) for every case: one attention."""
    found = []
    for (size, kind), info in infos.items():
        for heads, kv_heads, groups in CASES[size]:
            generator = torch.Generator().manual_seed(info.rank)
            q, dout = (torch.randn(16, heads, 8, dtype=torch.float64, generator=generator) for _ in range(2))
            k, v = (torch.randn(16, kv_heads, 8, dtype=torch.float64, generator=generator) for _ in range(2))
            ways: list[tuple[str, Mixer, Saved | None]] = [("oracle", Ulysses(), None)]
            for keep, saved in ((keep_arrivals, None), (keep_output, None), (keep_output, Saved())):
                way = f"{keep.__name__} saved {saved is not None}"
                ways.append((way, OverlappedUlysses(Late(), groups, keep), saved))
            results = []
            for _, mixer, saved in ways:
                a, b, c = inputs = [x.clone().requires_grad_() for x in (q, k, v)]
                prepared = mixer.prepare(info, CPU)
                out = mixer.attend(a, b, c, prepared, scale=0.3, kernel=Reference(), saved=saved)
                if saved is not None:  # recomputes from what was saved
                    out = mixer.attend(a, b, c, prepared, scale=0.3, kernel=Reference(), saved=saved)
                results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
            for (way, _, _), other in zip(ways[1:], results[1:], strict=True):
                found.append((f"{size} ranks {kind} {heads}/{kv_heads} groups {groups} {way}", same(results[0], other)))
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


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


def wrong_group(group: CPGroup) -> bool:
    """The control: heads of the wrong group come back as output."""
    inner: Any = None  # only the shapes are read
    trips = [Trip(UlyssesPrepared(group, None, None, inner), Collective(), inner, g, ()) for g in (1, 2)]
    x = torch.arange(4 * 16.0).view(4, 16, 1)
    swapped = torch.cat([trips[1].part(x, 1), trips[1].part(x, 0)], 2)
    straight = torch.cat([trips[1].part(x, 0), trips[1].part(x, 1)], 2)
    return torch.equal(trips[0].part(x, 0), straight) and not torch.equal(swapped, straight)


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


def everything() -> tuple[list[tuple[str, bool]], bool, list[int], list[str]]:
    groups = own_groups()
    infos = {(n, kind): make_seqinfo(kind, torch.tensor(e), groups[n]) for (n, kind), e in EDGES.items() if n in groups}
    one = infos[4, "contiguous"]
    orders = [order(one, layers=1, twice=True), order(one, layers=2, twice=False), without_gradient(one)]
    kept = [kept_bytes(one, keep) for keep in (keep_arrivals, keep_output)]
    return compare(infos) + in_layers(infos), wrong_group(groups[4]), kept, orders


def test_overlapped_ulysses_is_ulysses_bit_for_bit() -> None:
    for rank, (cases, control, (twice, once), orders) in enumerate(launch(everything, ranks=4, timeout_s=120)):
        assert control, rank
        assert orders == [RECOMPUTED, AHEAD, RECOMPUTED[:11]], rank
        assert twice - once == 16 * 4 * 8 * 8, (rank, twice, once)  # one [T/N, H, D] in fp64
        sizes = [size for size in CASES if rank < size]
        assert len(cases) == sum(2 * 3 * len(CASES[size]) + 2 * 6 for size in sizes)
        assert all(equal for _, equal in cases), (rank, [name for name, equal in cases if not equal])
