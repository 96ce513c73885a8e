"""Law `layout_is_an_index`: the ranks' index vectors together are a permutation; shard is take, unshard its inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.data import FieldSpec, Row, pack
from longspan.errors import UserError
from longspan.layout import CPGroup, inverse, layout_index, make_seqinfo, shard, split_outputs
from longspan.layout.seqinfo import runs

CPU = torch.device("cpu")
DECLARED = {
    "input_ids": FieldSpec(torch.int64),
    "position": FieldSpec(torch.int64, prefix=(3,)),
    "media_row": FieldSpec(torch.int64, fill=-1),
    "weight": FieldSpec(torch.float64),
}


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def group(rank: int, size: int) -> CPGroup:
    return CPGroup(None, rank, size, tuple(range(size)))


def padded(lengths: list[int], size: int, kind: str) -> list[int]:
    """The padding rules in the plainest words."""
    if size == 1:
        return lengths
    if kind == "zigzag":
        return [-(-length // (2 * size)) * 2 * size for length in lengths]
    tail = -sum(lengths) % size
    return lengths + [tail] * (tail > 0)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    size=st.integers(1, 9),
    kind=st.sampled_from(["contiguous", "zigzag"]),
)
def test_layout_is_an_index(lengths: list[int], size: int, kind: str) -> None:
    cu = bounds(padded(lengths, size, kind))
    indices = layout_index(kind, cu, size)
    total = int(cu[-1])
    assert [index.numel() for index in indices] == [total // size] * size
    assert torch.equal(torch.cat(indices).sort().values, torch.arange(total))
    stream = torch.randperm(total)
    assert torch.equal(torch.cat([stream[index] for index in indices])[inverse(indices)], stream)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    size=st.integers(1, 6),
    kind=st.sampled_from(["contiguous", "zigzag"]),
)
def test_runs_are_the_index_again(lengths: list[int], size: int, kind: str) -> None:
    cu = bounds(padded(lengths, size, kind))
    for rank in range(size):
        info = make_seqinfo(kind, cu, group(rank, size))
        starts = cu.tolist()
        rebuilt = [torch.arange(starts[run.document] + run.start, starts[run.document] + run.stop) for run in info.runs]
        assert torch.equal(torch.cat(rebuilt), info.index)
        rows = [run.row for run in info.runs]
        assert rows == [0, *torch.tensor([run.stop - run.start for run in info.runs]).cumsum(0).tolist()[:-1]]
        expected = [(d, t) for d, length in enumerate(cu.diff().tolist()) for t in range(length)]
        found = list(zip(info.segment.tolist(), info.position_in_document.tolist(), strict=True))
        assert found == [expected[i] for i in info.index.tolist()]


def test_zigzag_keeps_the_chunks_of_each_document() -> None:
    cu = bounds([4, 12])
    assert [index.tolist() for index in layout_index("zigzag", cu, 2)] == [
        [0, 3, 4, 5, 6, 13, 14, 15],
        [1, 2, 7, 8, 9, 10, 11, 12],
    ]
    assert [len(runs(index, cu)) for index in layout_index("zigzag", cu, 2)] == [4, 2]  # the middle chunks join


def test_a_stream_that_does_not_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"7 tokens.*2 equal runs"):
        layout_index("contiguous", bounds([7]), 2)
    with pytest.raises(UserError, match=r"6 tokens.*2 \* 2 chunks"):
        layout_index("zigzag", bounds([8, 6]), 2)
    with pytest.raises(UserError, match="'striped'"):
        layout_index("striped", bounds([8]), 2)


def samples(lengths: list[int]) -> list[dict[str, Tensor]]:
    made = []
    for number, length in enumerate(lengths):
        ids = 1000 * (number + 1) + torch.arange(length)
        made.append(
            {
                "input_ids": ids,
                "position": ids.expand(3, -1) * torch.tensor([[1], [2], [3]]),
                "media_row": ids % 5,
                "weight": ids.double() / 7,
            }
        )
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_everything_is_a_stream(kind: str, size: int) -> None:
    """Every field, whatever its shape, is cut by the same rule and comes back sample by sample (B8: lengths from 1)."""
    lengths = [1, 2, 3, 15, 16, 17]
    tensors = samples(lengths)
    row = Row(samples=tuple(range(len(lengths))), start=0, size=size)
    stream = pack(row, tensors, DECLARED, kind)  # pyright: ignore[reportArgumentType]  a parametrized literal
    shards = [shard(stream, group(rank, size), CPU) for rank in range(size)]
    back = inverse(list(shards[0].info.indices))
    for name in DECLARED:
        full = torch.cat([piece.fields[name] for piece in shards], -1)[..., back]
        assert torch.equal(full, stream.fields[name])
        for found, sample in zip(split_outputs(full, shards[0]), tensors, strict=True):
            assert torch.equal(found, sample[name])


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_o8_padded_length_is_decided_once(kind: str) -> None:
    """O8: every total around every alignment: the packer's length is the one that the layout cuts, on every rank."""
    for size in (2, 3, 4, 8):
        for total in range(1, 4 * size + 2):
            lengths = [total, 1]
            row = Row(samples=(0, 1), start=0, size=size)
            stream = pack(row, samples(lengths), DECLARED, kind, multiple=3)  # pyright: ignore[reportArgumentType]
            infos = [make_seqinfo(stream.index, stream.cu_seqlens, group(rank, size)) for rank in range(size)]
            assert {info.num_local for info in infos} == {stream.tokens // size}
            assert {info.index.numel() for info in infos} == {stream.tokens // size}


@pytest.mark.parametrize(("kind", "expected"), [("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("contiguous", None)])
def test_e1_targets_travel_with_their_tokens(kind: str, expected: list[list[int]] | None) -> None:
    """E1, E2: targets are made per sample before the cut: no rank predicts a neighbour's token or a wrapped one."""
    length, size = 8, 2
    target = torch.tensor([1, 2, 3, 4, 5, 6, 7, -100])
    sample = {"input_ids": torch.arange(length), "target_ids": target}
    declared = {"input_ids": FieldSpec(torch.int64), "target_ids": FieldSpec(torch.int64)}
    stream = pack(Row(samples=(0,), start=0, size=size), [sample], declared, kind)  # pyright: ignore[reportArgumentType]
    for rank in range(size):
        fields = shard(stream, group(rank, size), CPU).fields
        if expected:
            assert fields["input_ids"].tolist() == expected[rank]
        assert torch.equal(fields["target_ids"], target[fields["input_ids"]])
        rolled = fields["input_ids"].roll(-1)  # the planted fault: a shift on the local shard
        assert not torch.equal(rolled, fields["target_ids"])


def test_contiguous_tail_is_a_document_of_its_own() -> None:
    stream = pack(Row(samples=(0,), start=0, size=4), samples([5]), DECLARED, "contiguous")
    info = make_seqinfo(stream.index, stream.cu_seqlens, group(1, 4))
    assert info.cu_seqlens.tolist() == [0, 5, 8]
    last = make_seqinfo(stream.index, stream.cu_seqlens, group(2, 4))
    assert last.segment.tolist() == [0, 1]


def test_an_inert_row_cuts_like_any_other() -> None:
    for kind in ("contiguous", "zigzag"):
        stream = pack(Row(samples=(), start=0, size=3), [], DECLARED, kind)  # pyright: ignore[reportArgumentType]
        piece = shard(stream, group(2, 3), CPU)
        assert set(piece.fields) == set(DECLARED)
        assert piece.fields["weight"].abs().sum() == 0 and split_outputs(piece.fields["weight"], piece) == ()
