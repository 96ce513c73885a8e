"""Layouts as users write them: names, refusals with their rule, and the resolution of "auto"."""

import dataclasses

import pytest
import torch

from longspan.errors import UserError
from longspan.layout import Layout, Mesh, parse_layout, resolve
from longspan.layout.mesh import hybrid_ulysses, ulysses_parts

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dp1", Layout()),
        ("cp4-hybrid", Layout(cp=4, mixer="hybrid")),
        ("cp8-hybrid-u4", Layout(cp=8, mixer="hybrid", ulysses=4)),
        ("dp2-cp2", Layout(dp=2, cp=2)),
        ("cp3-ring", Layout(cp=3, mixer="ring")),
        ("cp2-ring-contiguous", Layout(cp=2, mixer="ring", index="contiguous")),
        ("cp2-gather-heads", Layout(cp=2, mixer="gather", linear="heads")),
        ("tp2-sp", Layout(tp=2, sequence_parallel=True)),
        ("pp2-cp2", Layout(cp=2, pp=2)),
        ("pp2-vpp2", Layout(pp=2, vpp=2)),
        ("ep2", Layout(dp=2, ep=2)),
        ("ep2-etp2", Layout(dp=4, ep=2, etp=2)),
        ("cp2-ep2", Layout(cp=2, ep=2)),
        ("dp16-cp11", Layout(dp=16, cp=11)),
    ],
)
def test_names(name: str, expected: Layout) -> None:
    layout = parse_layout(name)
    assert layout == expected
    assert parse_layout(layout.name) == layout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cp2-rings", ("'rings'", "ring", "dp2-cp2-ring")),
        ("cp2-cp4", ("cp twice",)),
        ("cp2-ring-gather", ("mixer twice",)),
        ("sp", ("sequence_parallel", "tp=1")),
        ("vpp2", ("vpp=2", "pp=1")),
        ("cp2-hybrid", ("hybrid", "cp=2", "mixer='ulysses'")),
        ("cp8-hybrid-u8", ("ulysses=8", "cp=8", "(2, 4)")),
        ("cp4-ring-u2", ("ulysses=2", "mixer='hybrid'", "'ring'")),
        ("dp2-ep3", ("ep * etp = 3 * 1 = 3", "dp * cp * tp = 2 * 1 * 1 = 2")),
        ("cp0", ("cp=0", "at least 1")),
        ("", ("''",)),
    ],
)
def test_bad_names_say_what_and_why(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_layout(name)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("field", ["dp", "cp", "tp", "pp", "vpp", "ep", "etp"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_sizes_are_positive_integers(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{field}="):
        Layout(**{field: value})  # pyright: ignore[reportArgumentType]  wrong types are the point


@pytest.mark.parametrize("field", ["dp", "cp", "tp", "pp", "vpp", "ep", "etp"])
def test_absurd_sizes_are_refused_at_once(field: str) -> None:
    with pytest.raises(UserError, match=f"{field}=1000000007 is above 1048576"):
        Layout(**{field: 10**9 + 7})


def test_ulysses_parts_are_the_proper_divisors() -> None:
    for cp in range(1, 200):
        assert ulysses_parts(cp) == tuple(u for u in range(2, cp) if cp % u == 0)


@pytest.mark.parametrize("field", ["mixer", "index", "linear"])
def test_words_are_known(field: str) -> None:
    with pytest.raises(UserError, match=f"{field}='none'.*'auto'"):
        Layout(**{field: "none"})  # pyright: ignore[reportArgumentType]


def test_ranks_must_multiply() -> None:
    layout = Layout(dp=2, cp=3, tp=2)
    with pytest.raises(UserError) as caught:
        Mesh(layout, ranks=8, rank=0, device=CPU)
    for word in ("dp2-cp3-tp2", "dp * cp * tp * pp = 2 * 3 * 2 * 1 = 12", "8 run", "Start 12"):
        assert word in str(caught.value)


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh(Layout(), ranks=1, rank=0, device=CPU)
    assert mesh.group(0, 1) == mesh.all
    assert mesh.all.group is None and mesh.all.size == 1 and mesh.all.rank == 0
    assert mesh.gather_objects({"a": 1}) == [{"a": 1}]


def test_data_rank_counts_cp_before_dp_and_tp_first() -> None:
    layout = Layout(dp=2, cp=2, tp=2, pp=2)
    ranks = [Mesh(layout, ranks=16, rank=rank, device=CPU).data_rank for rank in range(16)]
    assert ranks == [0, 0, 1, 1, 2, 2, 3, 3] * 2


@pytest.mark.parametrize(
    ("layout", "heads", "recurrent", "windowed", "mixer", "index"),
    [
        (Layout(cp=4), 4, False, False, "ulysses", "contiguous"),
        (Layout(cp=3), 4, False, False, "ring", "zigzag"),
        (Layout(cp=3), 4, False, True, "gather", "contiguous"),
        (Layout(cp=3), 4, True, False, "gather", "contiguous"),
        (Layout(cp=2, mixer="ring"), 4, False, False, "ring", "zigzag"),
        (Layout(cp=2, mixer="ring"), 4, True, False, "ring", "contiguous"),
        (Layout(cp=2, mixer="ring", index="contiguous"), 4, False, False, "ring", "contiguous"),
        (Layout(cp=2, mixer="gather", index="zigzag"), 4, False, False, "gather", "zigzag"),
        (Layout(cp=4, mixer="hybrid"), 4, False, False, "hybrid", "zigzag"),
        (Layout(cp=4, mixer="hybrid"), 4, True, False, "hybrid", "contiguous"),
        (Layout(), 5, False, False, "ulysses", "contiguous"),
    ],
)
def test_auto_is_resolved(layout: Layout, heads: int, recurrent: bool, windowed: bool, mixer: str, index: str) -> None:
    found = resolve(layout, heads=heads, kv_heads=1, recurrent=recurrent, windowed=windowed)
    assert (found.mixer, found.index) == (mixer, index)
    assert "auto" not in dataclasses.astuple(found)
    assert resolve(found, heads=heads, kv_heads=1, recurrent=recurrent, windowed=windowed) == found


def test_hybrid_takes_the_largest_ulysses_that_fits() -> None:
    def part(cp: int, heads: int) -> int | None:
        layout = Layout(cp=cp, mixer="hybrid")
        return resolve(layout, heads=heads, kv_heads=1, recurrent=False, windowed=False).ulysses

    assert [part(4, 4), part(8, 4), part(8, 6), part(12, 6), part(6, 16)] == [2, 4, 2, 6, 2]
    with pytest.raises(UserError, match=r"hybrid.*cp=9.*\(3,\).*4 heads"):
        part(9, 4)
    layout = resolve(Layout(cp=8, mixer="hybrid"), heads=4, kv_heads=2, recurrent=False, windowed=False)
    assert [hybrid_ulysses(layout, size) for size in (1, 2, 3, 4, 6, 8)] == [1, 2, 1, 4, 2, 4]


def test_h1_the_rule_of_heads_is_in_the_message() -> None:
    """H1: 40 query and 8 KV heads run at 40 ranks; only query heads limit ulysses, and the refusal says so."""
    for cp in (8, 10, 20, 40):
        layout = Layout(cp=cp, mixer="ulysses")
        assert resolve(layout, heads=40, kv_heads=8, recurrent=False, windowed=False).mixer == "ulysses"
    with pytest.raises(UserError) as caught:
        resolve(Layout(cp=8, mixer="ulysses"), heads=12, kv_heads=4, recurrent=False, windowed=False, model="qwen3")
    assert str(caught.value) == (
        "ulysses=8 needs query heads divisible by 8, got 12 (model qwen3). "
        "Use ulysses in (1, 2, 3, 4, 6, 12) or mixer='ring'."
    )


def test_zigzag_is_refused_for_recurrent_models() -> None:
    with pytest.raises(UserError, match=r"zigzag.*recurrent.*contiguous"):
        resolve(Layout(cp=2, index="zigzag"), heads=4, kv_heads=2, recurrent=True, windowed=False)
    with pytest.raises(UserError, match="6 query heads are no multiple of 4 KV heads"):
        resolve(Layout(cp=2), heads=6, kv_heads=4, recurrent=False, windowed=False)
