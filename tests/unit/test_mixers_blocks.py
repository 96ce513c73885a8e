"""The calls of ring, gather and gather with overlap cover each visible pair of tokens once and no other, as kernels read them.

FlashAttention knows one window a call, aligned to the bottom right: window_left = window - 1 - shift (kernels.Block).
The pairs are counted with that rule, not with the reference's.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.layout import CPGroup, SeqInfo, make_seqinfo
from longspan.layout.index import layout_index
from longspan.mixers.blocks import Call, select
from longspan.mixers.gather import Gather
from longspan.mixers.gather_overlap import Meetings, OverlappedGather, OverlappedGatherPrepared
from longspan.mixers.ring import Ring
from longspan.mixers.transport import Collective

CPU = torch.device("cpu")


def padded(lengths: list[int], size: int, kind: str) -> Tensor:
    if kind == "zigzag":
        lengths = [-(-length // (2 * size)) * 2 * size for length in lengths]
    elif sum(lengths) % size:
        lengths = [*lengths, -sum(lengths) % size]
    return torch.tensor([0, *lengths]).cumsum(0).int()


def add_pairs(
    seen: Tensor, call: Call, queries: Tensor, keys: Tensor, window: int | None, *, shifted: bool = True
) -> None:
    """Counts the pairs of stream positions (query, key) that one call lets meet. shifted=False: a planted fault."""
    q_tokens, k_tokens = select(queries, call.q_rows), select(keys, call.k_rows)
    block = call.block
    assert block.lens_q is not None and block.lens_k is not None
    assert int(block.cu_q[-1]) == q_tokens.numel() and int(block.cu_k[-1]) == k_tokens.numel()
    assert block.max_q == max(block.lens_q) and block.max_k == max(block.lens_k)
    for rows in (q_tokens, k_tokens):
        assert rows.unique().numel() == rows.numel(), "a row stands in a call twice"
    left = None if window is None else window - 1 - block.shift * shifted
    assert left is None or left >= 0, "FlashAttention takes a negative window for none"
    bounds = zip(block.cu_q.tolist(), block.cu_k.tolist(), block.lens_q, block.lens_k, strict=False)
    for start_q, start_k, len_q, len_k in bounds:
        query, key = torch.arange(len_q)[:, None], torch.arange(len_k)[None]
        visible = torch.ones(len_q, len_k, dtype=torch.bool)
        if block.kind == "causal":
            visible &= key <= query + len_k - len_q
        if left is not None:
            visible &= key >= query + len_k - len_q - left
        q_part, k_part = q_tokens[start_q : start_q + len_q], k_tokens[start_k : start_k + len_k]
        seen[q_part[:, None], k_part[None]] += visible.int()


def meetings_of(info: SeqInfo, window: int | None) -> Meetings:
    prepared = OverlappedGather(Collective()).prepare(info, CPU)
    assert isinstance(prepared, OverlappedGatherPrepared)
    return prepared.meetings(window)


def wanted(info: SeqInfo, window: int | None) -> Tensor:
    """[T, T]: 1 where this rank's query sees the key."""
    total = info.num_tokens
    document = torch.arange(info.cu_seqlens.numel() - 1).repeat_interleave(info.cu_seqlens.diff().long())
    token = torch.arange(total)
    distance = token[:, None] - token[None]
    visible = (document[:, None] == document[None]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    mine = torch.zeros(total, dtype=torch.bool)
    mine[info.index] = True
    return (visible & mine[:, None]).int()


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    size=st.integers(2, 5),
    kind=st.sampled_from(["contiguous", "zigzag"]),
    window=st.one_of(st.none(), st.integers(1, 30)),
)
def test_each_visible_pair_meets_once(lengths: list[int], size: int, kind: str, window: int | None) -> None:
    cu = padded(lengths, size, kind)
    indices = layout_index(kind, cu, size)
    for rank in range(size):
        info = make_seqinfo(kind, cu, CPGroup(None, rank, size, tuple(range(size))))
        expected = wanted(info, window)

        ring = torch.zeros_like(expected)
        for step, calls in enumerate(Ring().prepare(info, CPU).steps(window)):
            for call in calls:
                add_pairs(ring, call, info.index, indices[(rank - step) % size], window)
        assert torch.equal(ring, expected), "ring"

        gather = torch.zeros_like(expected)
        for call in Gather().prepare(info, CPU).calls(window):
            add_pairs(gather, call, info.index, torch.cat(indices), window)
        assert torch.equal(gather, expected), "gather"

        overlapped = torch.zeros_like(expected)
        meetings = meetings_of(info, window)
        for call in meetings.own:
            add_pairs(overlapped, call, info.index, info.index, window)
        for call in meetings.others:
            add_pairs(overlapped, call, info.index, torch.cat(indices), window)
            away = (rank - select(torch.arange(info.num_tokens), call.k_rows) // info.num_local) % size
            assert int(away.min()) > 0 and int(away.max()) <= meetings.hops, "gradients go that far"
        assert torch.equal(overlapped, expected), "gather with overlap"


def test_a_window_that_ignores_the_shift_is_caught() -> None:
    """The control of the test above: 24 tokens on 3 ranks, window 12."""
    info = make_seqinfo("contiguous", torch.tensor([0, 24]).int(), CPGroup(None, 2, 3, (0, 1, 2)))
    expected = wanted(info, 12)
    for shifted in (True, False):
        seen = torch.zeros_like(expected)
        for step, calls in enumerate(Ring().prepare(info, CPU).steps(12)):
            for call in calls:
                add_pairs(seen, call, info.index, info.indices[2 - step], 12, shifted=shifted)
        assert torch.equal(seen, expected) == shifted


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    size=st.integers(2, 5),
    kind=st.sampled_from(["contiguous", "zigzag"]),
    window=st.one_of(st.none(), st.integers(1, 30)),
)
def test_fresh_rows_are_those_not_written_before(lengths: list[int], size: int, kind: str, window: int | None) -> None:
    """Fresh calls overwrite: none may follow another call over the same rows; all rows are written in the end."""
    cu = padded(lengths, size, kind)
    for rank in range(size):
        info = make_seqinfo(kind, cu, CPGroup(None, rank, size, tuple(range(size))))
        ring_calls = [call for calls in Ring().prepare(info, CPU).steps(window) for call in calls]
        meetings = meetings_of(info, window)
        overlapped = [*meetings.own, *meetings.others]
        for calls in (ring_calls, list(Gather().prepare(info, CPU).calls(window)), overlapped):
            written = torch.zeros(info.num_local, dtype=torch.bool)
            for call in calls:
                rows = select(torch.arange(info.num_local), call.q_rows)
                assert not (call.fresh and bool(written[rows].any()))
                written[rows] = True
            assert bool(written.all())


def test_every_rank_takes_the_same_steps_and_no_more_than_needed() -> None:
    """Contiguous: documents of 4 on ranks of 6 reach one rank back; a window of 2 in one long document likewise."""

    def steps(lengths: list[int], size: int, kind: str, window: int | None) -> set[int]:
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        groups = [CPGroup(None, rank, size, tuple(range(size))) for rank in range(size)]
        return {len(Ring().prepare(make_seqinfo(kind, cu, g), CPU).steps(window)) for g in groups}

    assert steps([4] * 6, 4, "contiguous", None) == {2}
    assert steps([6] * 4, 4, "contiguous", None) == {1}
    assert steps([24], 4, "contiguous", None) == {4}
    assert steps([24], 4, "contiguous", 2) == {2}
    assert steps([24], 4, "contiguous", 8) == {3}
    assert steps([24], 3, "zigzag", None) == {3}


def test_a_zigzag_ring_makes_one_call_a_step() -> None:
    """However many documents: own causal, then one full block; a contiguous step is one slice and one segment."""
    cu = torch.tensor([0, 24, 36, 84]).int()
    for rank in range(3):
        info = make_seqinfo("zigzag", cu, CPGroup(None, rank, 3, (0, 1, 2)))
        assert [len(calls) for calls in Ring().prepare(info, CPU).steps(None)] == [1, 1, 1]
    info = make_seqinfo("contiguous", cu, CPGroup(None, 1, 3, (0, 1, 2)))
    own, before = Ring().prepare(info, CPU).steps(None)
    assert len(own) == 1 and len(before) == 1 and before[0].block.lens_q == (8,)
    assert isinstance(before[0].k_rows, slice) and isinstance(before[0].q_rows, slice)


def test_a_zigzag_gather_with_overlap_makes_at_most_two_calls_on_other_ranks_keys() -> None:
    """However many documents; no key stands in both, so that a gradient goes home as one call gave it."""
    cu = torch.tensor([0, 24, 36, 84]).int()
    for rank, calls in enumerate((1, 2, 1)):
        meetings = meetings_of(make_seqinfo("zigzag", cu, CPGroup(None, rank, 3, (0, 1, 2))), None)
        assert len(meetings.own) == 1 and len(meetings.others) == calls and meetings.hops == 2
        keys = torch.cat([select(torch.arange(84), call.k_rows) for call in meetings.others])
        assert keys.unique().numel() == keys.numel()
