"""Ulysses by groups of heads equals plain Ulysses bit for bit, forward and backward, in fp64 on three and four ranks (gloo).

The oracle is mixers/ulysses.py, itself checked against naive attention. Controls: a plan that swaps two head groups; `lean` keeps
one copy of the output for backward, the default two.
"""

import dataclasses

import torch

from longspan.launch import launch
from longspan.layout import make_seqinfo
from longspan.layout.mesh import CPGroup
from longspan.mixers import Mixer, Saved, Ulysses
from longspan.mixers.kernels.reference import Reference
from longspan.mixers.transport import Collective
from longspan.mixers.ulysses_overlap import OverlappedUlysses, Plan

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


def compare() -> list[tuple[str, bool]]:
    """(case, equal) for every case; runs on each rank."""
    import torch.distributed as dist

    rank = dist.get_rank()
    three = dist.new_group([0, 1, 2])
    groups_of = {4: CPGroup(dist.group.WORLD, rank, 4, (0, 1, 2, 3))}
    if rank < 3:
        groups_of[3] = CPGroup(three, rank, 3, (0, 1, 2))
    found = []
    for (size, kind), edges in EDGES.items():
        if size not in groups_of:
            continue
        info = make_seqinfo(kind, torch.tensor(edges), groups_of[size])
        for heads, kv_heads, groups in CASES[size]:
            generator = torch.Generator().manual_seed(rank)
            q, dout = (torch.randn(16, heads, 8, dtype=torch.float64, generator=generator) for _ in range(2))
            k, v = (torch.randn(16, kv_heads, 8, dtype=torch.float64, generator=generator) for _ in range(2))
            ways: list[tuple[str, Mixer, Saved | None]] = [("oracle", Ulysses(), None)]
            for lean in (False, True):
                other = OverlappedUlysses(Collective(), groups, lean)
                ways += [(f"lean {lean}", other, None), (f"lean {lean}, saved", other, Saved())]
            results = []
            for _, mixer, saved in ways:
                a, b, c = inputs = [x.clone().requires_grad_() for x in (q, k, v)]
                prepared = mixer.prepare(info, torch.device("cpu"))
                out = mixer.attend(a, b, c, prepared, scale=0.3, kernel=Reference(), saved=saved)
                if saved is not None:  # recomputes from what was saved
                    out = mixer.attend(a, b, c, prepared, scale=0.3, kernel=Reference(), saved=saved)
                results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
            for (way, _, _), other in zip(ways[1:], results[1:], strict=True):
                same = all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
                found.append((f"{size} ranks {kind} {heads}/{kv_heads} groups {groups} {way}", same))
    return found


def wrong_group() -> bool:
    """The control: heads of the wrong group come back as output."""
    import torch.distributed as dist

    group = CPGroup(dist.group.WORLD, dist.get_rank(), 4, (0, 1, 2, 3))
    plan = Plan(None, group, 2, tuple(range(8)), 4, 2, 1, 8, 8)  # type: ignore[arg-type]  # only the shapes are read
    x = torch.arange(4 * 16.0).view(4, 16, 1)
    swapped = torch.cat([plan.part(x, 1), plan.part(x, 0)], 2)
    straight = torch.cat([plan.part(x, 0), plan.part(x, 1)], 2)
    return torch.equal(dataclasses.replace(plan, groups=1).part(x, 0), straight) and not torch.equal(swapped, straight)


def kept_bytes(*, lean: bool) -> int:
    """What autograd holds until backward, in distinct storages, with what the next layer keeps of the output."""
    import torch.distributed as dist

    group = CPGroup(dist.group.WORLD, dist.get_rank(), 4, (0, 1, 2, 3))
    info = make_seqinfo("contiguous", torch.tensor([0, 64]), group)
    mixer = OverlappedUlysses(Collective(), lean=lean)
    q, k, v = (torch.randn(16, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    held: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = mixer.attend(q, k, v, mixer.prepare(info, torch.device("cpu")), scale=0.3, kernel=Reference())
        out.square()
    return sum(held.values())


def everything() -> tuple[list[tuple[str, bool]], bool, list[int]]:
    return compare(), wrong_group(), [kept_bytes(lean=lean) for lean in (False, True)]


def test_overlapped_ulysses_is_ulysses_bit_for_bit() -> None:
    for rank, (cases, control, (twice, once)) in enumerate(launch(everything, ranks=4, timeout_s=60)):
        assert control, rank
        assert twice - once == 16 * 4 * 8 * 8, (rank, twice, once)  # one [T/N, H, D] in fp64
        assert len(cases) == 2 * 4 * sum(len(some) for size, some in CASES.items() if rank < size)
        assert all(same for _, same in cases), (rank, [name for name, same in cases if not same])
