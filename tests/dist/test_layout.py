"""Groups, unshard, relayout and collectives across real ranks."""

import pytest
import torch

from longspan.errors import UserError
from longspan.launch import launch, world
from longspan.layout import CPGroup, Layout, Mesh, SeqInfo, inverse, make_seqinfo, relayout, unshard
from longspan.mixers.collectives import all_gather, all_to_all, reduce_scatter

# ---- groups ----


def groups_of(layout: Layout, rows: list[tuple[int, int]]) -> tuple[dict[str, object], dict[str, object]]:
    """What this rank sees of the groups of rows, and the sums over each group that it is in."""
    here = world()
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    seen, sums = {}, {}
    for start, size in rows + rows:  # asked for twice, made once
        group = mesh.group(start, size)
        assert group is mesh.group(start, size)
        seen[f"{start}+{size}"] = (group.rank, group.size, group.ranks)
        parts = {"": group} if group.rank >= 0 else {}
        if group.parts is not None:
            parts |= {" ulysses": group.parts[0], " ring": group.parts[1]}
        for name, part in parts.items():
            sums[f"{start}+{size}{name}"] = rank_sum(part, here.rank)
    seen["all"], sums["all"] = mesh.all.ranks, rank_sum(mesh.all, here.rank)
    sums["experts"] = rank_sum(mesh.experts(), here.rank) if layout.tp == 1 else None
    assert mesh.gather_objects(here.rank) == list(range(here.ranks))
    return seen, sums


def rank_sum(group: CPGroup, rank: int) -> int:
    """The sum of 10 ** rank over the group, through its process group."""
    parts = torch.full((group.size,), 10**rank)
    return int(reduce_scatter(parts, group)) if group.size > 1 else 10**rank


def test_groups_of_rows_are_made_once_in_plan_order() -> None:
    """Dynamic CP: a micro-step of four rows of one, one of 1 + 3, one of 2 + 2; every rank asks for every row."""
    rows = [(0, 1), (1, 1), (2, 1), (3, 1), (0, 1), (1, 3), (0, 2), (2, 2), (0, 4)]
    results = launch(lambda: groups_of(Layout(dp=2, cp=2, ep=2), rows), ranks=4, timeout_s=50)
    for rank, (seen, sums) in enumerate(results):
        for start, size in rows:
            ranks = tuple(range(start, start + size))
            assert seen[f"{start}+{size}"] == (ranks.index(rank) if rank in ranks else -1, size, ranks)
            assert sums.get(f"{start}+{size}") == (sum(10**r for r in ranks) if rank in ranks else None)
        assert seen["all"] == (0, 1, 2, 3) and sums["all"] == 1111
        assert sums["experts"] == (11 if rank < 2 else 1100)


def test_hybrid_groups_and_tensor_parallel_slices() -> None:
    hybrid = Layout(cp=4, mixer="hybrid", ulysses=2)
    results = launch(lambda: groups_of(hybrid, [(0, 4), (0, 2), (2, 2)]), ranks=4, timeout_s=50)
    assert [sums["0+4 ulysses"] for _, sums in results] == [11, 11, 1100, 1100]
    assert [sums["0+4 ring"] for _, sums in results] == [101, 1010, 101, 1010]
    assert [sums.get("2+2 ulysses") for _, sums in results] == [None, None, 1100, 1100]
    assert [sums.get("2+2 ring") for _, sums in results] == [None, None, 100, 1000]
    results = launch(lambda: groups_of(Layout(cp=2, tp=2), [(0, 2), (0, 1), (1, 1)]), ranks=4, timeout_s=50)
    assert [sums["0+2"] for _, sums in results] == [101, 1010, 101, 1010]
    assert [seen["0+1"][0] for seen, _ in results] == [0, 0, -1, -1]


# ---- unshard, relayout, collectives ----


def infos(size: int) -> dict[str, SeqInfo]:
    """A contiguous, a zigzag and, from other boundaries, one more layout of one stream of 8 * size tokens."""
    here = world()
    group = Mesh(Layout(cp=size), ranks=here.ranks, rank=here.rank, device=here.device).group(0, size)
    bounds = torch.tensor([0, 2 * size, 8 * size]).int()
    return {
        "contiguous": make_seqinfo("contiguous", bounds, group),
        "zigzag": make_seqinfo("zigzag", bounds, group),
        "zigzag of one": make_seqinfo("zigzag", bounds[[0, 2]], group),
    }


def move_tokens() -> dict[str, bool]:
    here = world()
    found = infos(here.ranks)
    total = 8 * here.ranks
    stream = torch.randn(3, total, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.randn(3, total, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right = {}
    for old_name, old in found.items():
        right[f"unshard {old_name}"] = torch.equal(unshard(stream[:, old.index], old), stream)
        ids = torch.arange(total)[old.index]
        right[f"unshard ids {old_name}"] = torch.equal(unshard(ids, old), torch.arange(total))
        for new_name, new in found.items():
            local = stream[:, old.index].requires_grad_()
            moved = relayout(local, old, new)
            right[f"{old_name} to {new_name}"] = torch.equal(moved, stream[:, new.index])
            (grad,) = torch.autograd.grad((moved * weight[:, new.index]).sum(), local)
            right[f"gradient of {old_name} to {new_name}"] = torch.equal(grad, weight[:, old.index])
    return right


def test_tokens_move_between_layouts_with_their_gradient() -> None:
    for ranks in (1, 3):
        for right in launch(move_tokens, ranks=ranks, timeout_s=50):
            assert len(right) == 24 and all(right.values()), [name for name, ok in right.items() if not ok]


def test_relayout_refuses_two_streams() -> None:
    group = CPGroup(None, 0, 2, (0, 1))
    old, new = (make_seqinfo("contiguous", torch.tensor([0, n]).int(), group) for n in (8, 12))
    with pytest.raises(UserError, match=r"8 tokens.*12"):
        relayout(torch.zeros(4), old, new)
    assert torch.equal(torch.cat(old.indices)[inverse(list(old.indices))], torch.arange(8))


def gradients() -> dict[str, float]:
    """Each collective against its definition on all ranks' inputs, which every rank makes for itself."""
    here = world()
    size, rank = here.ranks, here.rank
    group = Mesh(Layout(cp=size), ranks=size, rank=rank, device=here.device).group(0, size)
    errors = {}

    def compare(name: str, function, definition, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(rows, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(size)]
        outputs = definition(inputs)
        weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
        loss = sum((out * w).sum() for out, w in zip(outputs, weights, strict=True))
        expected = torch.autograd.grad(loss, inputs[rank])[0]
        mine = inputs[rank].detach().requires_grad_()
        out = function(mine, group)
        (grad,) = torch.autograd.grad((out * weights[rank]).sum(), mine)
        errors[name] = max(float((out - outputs[rank]).abs().max()), float((grad - expected).abs().max()))

    compare("all_gather", all_gather, lambda xs: [torch.cat(xs)] * size, 2)
    compare("reduce_scatter", reduce_scatter, lambda xs: list(sum(xs).chunk(size)), 2 * size)
    compare(
        "all_to_all",
        all_to_all,
        lambda xs: [torch.cat([x.chunk(size)[r] for x in xs]) for r in range(size)],
        2 * size,
    )
    half = torch.full((size, 1), 1 + 2**-9, dtype=torch.float32).bfloat16()
    errors["sum in f32"] = float((reduce_scatter(half * 256, group) - 256 * size).abs().max())
    return errors


def test_collectives_and_their_gradients() -> None:
    for ranks in (1, 3):
        for errors in launch(gradients, ranks=ranks, timeout_s=50):
            assert max(errors.values()) < 1e-14, errors
