"""Parameters that ranks hold in parts come together whole, bit for bit, on every rank: FSDP's own split, and experts over ep and
over the replicas of theirs; rows that no rank count divides, and ranks without a row.

Made without DTensor's `full_tensor`, which is refused here. Controls: parts of either axis put together in the wrong order.
"""

from typing import Any

import pytest
import torch
from swap import replaced
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from longspan.engine.fsdp import backend
from longspan.engine.fsdp.backend import full
from longspan.launch import launch, world
from longspan.layout import CPGroup, Mesh, parse_layout
from longspan.models.experts import shard_experts

# ranks -> (layout, rows of the whole, rows of each rank)
CASES = {
    2: [
        ("cp2", 5, [3, 2]),
        ("dp2", 1, [1, 0]),
        ("cp2-ep2", 6, [3, 3]),
    ],
    3: [
        ("cp3", 7, [3, 3, 1]),
        ("cp3", 2, [1, 1, 0]),
        ("cp3-ep3", 3, [1, 1, 1]),
    ],
    4: [
        ("dp4", 5, [2, 2, 1, 0]),
        ("dp4-ep2", 8, [2, 2, 2, 2]),
        ("dp2-cp2-ep2", 6, [2, 2, 1, 1]),
        ("dp2-cp2-ep2", 2, [1, 1, 0, 0]),
        ("cp4-ep4", 4, [1, 1, 1, 1]),
    ],
}


class Qwen3MoeExperts(nn.Module):
    """One parameter, cut as engine/fsdp/policy.py cuts experts, or any other."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_experts, self.weight = len(weight), nn.Parameter(weight)


def cut(whole: Tensor, layout: str) -> DTensor:
    here = world()
    mesh = Mesh(parse_layout(layout), ranks=here.ranks, rank=here.rank, device=here.device)
    module, axis = Qwen3MoeExperts(whole.clone()), mesh.device_mesh
    if mesh.layout.ep > 1:
        shard_experts(module, mesh.experts(), mesh.expert_mesh["ep"])
        axis = mesh.expert_mesh["replica"]
    fully_shard(module, mesh=axis)
    return module.weight


def backwards(neighbours: bool) -> Any:
    """The fault: groups of neighbouring ranks, or the others, are put together from the last rank to the first."""
    real = backend.all_gather

    def gather(x: Tensor, group: CPGroup) -> Tensor:
        found = real(x, group)
        adjacent = group.ranks[-1] - group.ranks[0] == group.size - 1
        return found.unflatten(0, (group.size, -1)).flip(0).flatten(0, 1) if adjacent == neighbours else found

    return gather


def refused(*_: object) -> None:
    raise AssertionError("full_tensor takes gloo's asynchronous all-gather")


def parts(ranks: int) -> list[tuple[int, bool, bool, list[bool]]]:
    """Of each case: rows here, whether weight and gradient are whole, and whether each fault leaves the weight so."""
    seen = []
    for layout, rows, _ in CASES[ranks]:
        whole = torch.randn(rows, 3, 2, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
        weight = cut(whole, layout)
        with replaced(DTensor, "full_tensor", refused):
            same = torch.equal(full(weight.detach()), whole)
            gradient = torch.equal(full(weight.detach() * 3), whole * 3)
            faults = []
            for neighbours in (True, False):
                with replaced(backend, "all_gather", backwards(neighbours)):
                    faults.append(torch.equal(full(weight.detach()), whole))
        seen.append((len(weight.to_local()), same, gradient, faults))
    return seen


@pytest.mark.parametrize("ranks", CASES)
def test_parts_come_together_whole(ranks: int) -> None:
    for rank, seen in enumerate(launch(parts, ranks, ranks=ranks, timeout_s=60)):
        for (layout, rows, held), (here, whole, gradient, faults) in zip(CASES[ranks], seen, strict=True):
            assert here == held[rank], (layout, rows, rank)
            assert whole and gradient, (layout, rows, rank)
            replicas = ranks // parse_layout(layout).ep
            over_two = 1 < replicas < ranks
            assert faults == [False, not over_two], (layout, rows, rank)
