"""Packing: laws shift_before_pack (1) and everything_is_a_stream (4), pads that are inert, bug cases B8, E1, E2, O8."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.data import FieldSpec, Row, pack, padded_length, row_tokens
from longspan.errors import UserError

DECLARED = {
    "ids": FieldSpec(torch.int64),
    "targets": FieldSpec(torch.int64),
    "weight": FieldSpec(torch.float64),
    "position": FieldSpec(torch.int64, 0, (3,)),
    "media_row": FieldSpec(torch.int64, -1),
    "temperature": FieldSpec(torch.float32, 1),
    "routed_experts": FieldSpec(torch.int64, 0, (2, 2)),
}


def tensors(number: int, length: int) -> dict[str, torch.Tensor]:
    """Every value tells its sample, position and field."""
    base = 1000 * (number + 1) + torch.arange(length)
    return {
        "ids": base,
        "targets": base + 1,
        "weight": base.double() / 7,
        "position": torch.stack([base, base + 1, base + 2]),
        "media_row": base,
        "temperature": base.float(),
        "routed_experts": base.expand(2, 2, length),
    }


def make(lengths, size, index, multiple=1):
    row = Row(tuple(range(5, 5 + len(lengths))), start=0, size=size)
    return pack(row, [tensors(k, n) for k, n in enumerate(lengths)], DECLARED, index, multiple=multiple)


lengths_list = st.lists(st.integers(1, 40), max_size=6)


@settings(deadline=None, max_examples=60)
@given(lengths_list, st.integers(1, 5), st.sampled_from(["contiguous", "zigzag"]), st.integers(1, 4))
def test_everything_is_a_stream(lengths, size, index, multiple):
    stream = make(lengths, size, index, multiple)
    total = stream.tokens
    assert set(stream.fields) == set(DECLARED) and stream.lengths == tuple(lengths)
    assert stream.cu_seqlens.dtype == torch.int32 and stream.cu_seqlens[0] == 0
    assert total == size * row_tokens(lengths, size, index, multiple=multiple) and total % (size * multiple) == 0
    assert (stream.cu_seqlens.diff() > 0).all() and len(stream.cu_seqlens) - 1 - len(lengths) in (0, 1)
    real = torch.zeros(total, dtype=torch.bool)
    for k, length in enumerate(lengths):
        start = int(stream.cu_seqlens[k])
        real[start : start + length] = True
        for name, values in tensors(k, length).items():
            assert torch.equal(stream.fields[name][..., start : start + length], values)
        assert stream.cu_seqlens[k + 1] - start >= padded_length(length, size, index) or k == len(lengths) - 1
    for name, spec in DECLARED.items():
        assert stream.fields[name].dtype == spec.dtype and stream.fields[name].shape == (*spec.prefix, total)
        assert (stream.fields[name][..., ~real] == spec.fill).all()
    if stream.index == "zigzag":
        assert (stream.cu_seqlens % (2 * size) == 0).all()


def test_shift_before_pack():
    """E1, E2: targets arrive shifted; the last token of A keeps its own target and never sees the first token of B."""
    stream = make([3, 2], 1, "contiguous")
    assert stream.fields["targets"].tolist() == [1001, 1002, 1003, 2001, 2002]
    zigzag = make([7], 2, "zigzag")  # ids 0 1 | 2 3 | 4 5 | 6 pad: rank 0 holds chunks 0 and 3
    chunks = zigzag.fields["targets"].reshape(4, 2)
    assert torch.cat([chunks[0], chunks[3]]).tolist() == [1001, 1002, 1007, 0]
    assert torch.cat([chunks[1], chunks[2]]).tolist() == [1003, 1004, 1005, 1006]
    rolled = torch.roll(stream.fields["ids"], -1)  # the control: a roll over the pack differs at both sample ends
    assert (rolled != stream.fields["targets"]).nonzero().flatten().tolist() == [2, 4]


@pytest.mark.parametrize("index", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_inert_row_declares_every_field(size, index):
    stream = make([], size, index)
    assert stream.tokens == (2 * size if index == "zigzag" and size > 1 else size)
    assert set(stream.fields) == set(DECLARED) and not stream.fields["weight"].any()
    assert stream.cu_seqlens.tolist() == [0, stream.tokens]


def test_on_one_rank_nothing_is_padded():
    assert make([1, 2, 3, 15, 16, 17], 1, "zigzag").tokens == 54  # B8's lengths
    assert make([5], 1, "zigzag").index == "identity"


def test_missing_and_misshapen_fields_are_refused():
    row = Row((3,), start=0, size=1)
    good = tensors(0, 4)
    with pytest.raises(UserError, match=r"sample 3 lacks the per-token fields \['weight'\]"):
        pack(row, [{k: v for k, v in good.items() if k != "weight"}], DECLARED, "contiguous")
    with pytest.raises(UserError, match=r"sample 3: field 'position' has shape \[2, 4\].*expected \[3, 4\]"):
        pack(row, [good | {"position": torch.zeros(2, 4)}], DECLARED, "contiguous")
