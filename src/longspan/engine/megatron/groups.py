"""The process groups of the megatron backend. Collective: every rank builds them in the same order.

Rank = ((pp * dp + dp_rank) * cp + cp_rank) * tp + tp_rank, as `Mesh` counts. megatron-core gets its groups as arguments
(`ProcessGroupCollection`), so its global `parallel_state` is never initialised and engines may differ in one process.
Context parallelism is the mixers' alone: megatron-core is told cp = 1.
"""

from dataclasses import dataclass

import torch.distributed as dist

from longspan.layout import CPGroup, Mesh

__all__ = ["Groups", "make_groups"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this rank stands on each axis."""

    tp: CPGroup
    pp: CPGroup
    data: CPGroup  # dp x cp: ranks with the same weights
    ep: CPGroup  # data ranks that share a set of experts
    replica: CPGroup  # data ranks with the same experts
    ends: CPGroup  # first and last pipeline stage: both hold a tied embedding
    forwards: CPGroup  # pp once more: activations and gradients travel on communicators of their own
    backwards: CPGroup
    forwards_home: CPGroup  # interleaved: from the last pipeline rank back to the first, and the gradients of that
    backwards_home: CPGroup
    alone: dist.ProcessGroup  # this rank by itself, where megatron-core wants a group

    @property
    def first(self) -> bool:
        return self.pp.rank == 0

    @property
    def last(self) -> bool:
        return self.pp.rank == self.pp.size - 1


def make_groups(mesh: Mesh) -> Groups:
    """All groups of a mesh's layout."""
    layout, rank = mesh.layout, mesh.rank
    tp, pp, data, ep = layout.tp, layout.pp, mesh.data_ranks, layout.ep

    def at(stage: int, data_rank: int, column: int) -> int:
        return (stage * data + data_rank) * tp + column

    def pick(lists: list[list[int]]) -> CPGroup:
        return _group(lists, rank)

    every = [(stage, column) for stage in range(pp) for column in range(tp)]
    lines = [[at(stage, d, c) for stage in range(pp)] for d in range(data) for c in range(tp)]
    home = lines if layout.vpp > 1 else [[rank] for line in lines for rank in line]
    return Groups(
        tp=pick([[at(stage, d, c) for c in range(tp)] for stage in range(pp) for d in range(data)]),
        pp=pick(lines),
        data=mesh.all,
        ep=pick([[at(s, d, c) for d in range(start, start + ep)] for s, c in every for start in range(0, data, ep)]),
        replica=pick([[at(s, d, c) for d in range(start, data, ep)] for s, c in every for start in range(ep)]),
        ends=pick([sorted({line[0], line[-1]}) for line in lines] + [line[1:-1] for line in lines if pp > 2]),
        forwards=pick(lines),
        backwards=pick(lines),
        forwards_home=pick(home),
        backwards_home=pick(home),
        alone=dist.new_group([rank], use_local_synchronization=True),
    )


def _group(lists: list[list[int]], rank: int) -> CPGroup:
    """The group of `rank` among disjoint lists of ranks; every list becomes a process group on every rank."""
    mine = None
    for ranks in lists:
        group = dist.new_group(ranks, use_local_synchronization=False) if len(ranks) > 1 else None
        if rank in ranks:
            mine = CPGroup(group, ranks.index(rank), len(ranks), tuple(ranks))
    assert mine is not None, (rank, lists)
    return mine
