"""A batch is its samples' tensors one after the other, and its fingerprint changes with anything that ranks must hold alike."""

import dataclasses

import numpy as np
import pytest
import torch

from longspan import Image, Sample
from longspan.engine.batch import Batch, fingerprint, make_batch
from longspan.errors import UserError
from longspan.models import load_model

FIELDS = ("advantage", "temperature", "routed")


@pytest.fixture(scope="module")
def adapter():
    return load_model("tiny:qwen3", torch.float32, 0)[0]


def sample(length: int, seed: int, *, temperature: float | None = None) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) % 3 > 0
    fields = {"advantage": torch.randn(length, generator=draw), "routed": torch.arange(length * 4).view(length, 2, 2)}
    fields |= {} if temperature is None else {"temperature": torch.full((length,), temperature)}
    ids = torch.randint(0, 50, (2, length), generator=draw)
    return Sample(ids[0], torch.where(mask, ids[1], -100), mask, fields)


def batch(adapter, samples: list[Sample]) -> Batch:
    weights = {"weight/ppo": [each.mask.double() / 7 for each in samples]}
    return make_batch(samples, adapter, weights=weights, fields=FIELDS, dtype=torch.float32)


def test_a_batch_is_its_samples_one_after_the_other(adapter):
    samples = [sample(5, 1), sample(1, 2, temperature=0.5), sample(8, 3)]
    made = batch(adapter, samples)
    assert made.lengths == (5, 1, 8) and set(made.columns) == set(made.declared)
    assert torch.cat([each["token"] for each in made.tensors]).tolist() == list(range(14))
    for each, own in zip(samples, made.tensors, strict=True):
        needed = each.mask > 0
        want = {
            "input_ids": each.input_ids,
            "target_ids": torch.where(needed, each.target_ids, 0),
            "needed": needed,
            "position": torch.arange(len(each)),
            "weight/ppo": each.mask.double() / 7,
            "advantage": each.fields["advantage"],
            "temperature": torch.full((len(each),), 0.5 if len(each) == 1 else 1.0),
            "routed": each.fields["routed"].movedim(0, -1),
        }
        assert set(own) == {*want, "token"}
        for name, values in want.items():
            assert torch.equal(own[name], values) and own[name].dtype == made.declared[name].dtype, name


@pytest.mark.parametrize("name", ["input_ids", "target_ids", "needed", "position", "weight/ppo", *FIELDS])
def test_the_fingerprint_holds_every_value_of_every_stream(adapter, name):
    """One value at a time, the last of each stream too, by the least that its type can change."""
    made = batch(adapter, [sample(5, 1), sample(6, 2)])
    seen = {fingerprint(made)}
    values = made.columns[name]
    for place in (0, values.numel() // 2, values.numel() - 1):
        changed = values.clone()
        changed.view(-1).view(torch.uint8)[place * values.itemsize] ^= 1  # the least bit of one value
        assert not torch.equal(changed, values)
        seen.add(fingerprint(dataclasses.replace(made, columns={**made.columns, name: changed})))
    assert len(seen) == 4


def test_the_fingerprint_holds_order_lengths_and_names(adapter):
    first, second = sample(5, 1), sample(5, 2)
    made = batch(adapter, [first, second])
    assert fingerprint(made) == fingerprint(batch(adapter, [sample(5, 1), sample(5, 2)]))
    renamed = dict(made.columns)
    renamed["return"] = renamed.pop("advantage")
    others = [
        batch(adapter, [second, first]),
        dataclasses.replace(made, lengths=(4, 6)),
        dataclasses.replace(made, columns=renamed),
    ]
    assert len({fingerprint(made), *map(fingerprint, others)}) == 4


def test_the_fingerprint_holds_types_and_shapes(adapter):
    """Equal bytes, told apart: as [2, 3] and [3, 2], as one integer and two floats a token, as zeros of either."""

    def mark(routed: torch.Tensor) -> int:
        return fingerprint(batch(adapter, [dataclasses.replace(sample(4, 1), fields=fields | {"routed": routed})]))

    fields = sample(4, 1).fields
    draw = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    pairs = draw[:, :2].contiguous()
    integers = pairs.t().contiguous().view(torch.int64).view(-1)  # what the column [2, 4] holds
    assert mark(draw.view(4, 2, 3)) != mark(draw.view(4, 3, 2))
    assert mark(pairs) != mark(integers)
    assert mark(torch.zeros(4).long()) != mark(torch.zeros(4, 2))
    assert mark(pairs) == mark(pairs.clone())


def test_the_fingerprint_holds_media(adapter):
    made = batch(adapter, [sample(5, 1)])
    pixels = np.zeros((4, 4, 3), np.uint8)
    brighter = pixels.copy()
    brighter[3, 3, 2] = 1
    media = ([], [Image("a.png")], [Image("b.png")], [Image(pixels)], [Image(brighter)], [Image(pixels)] * 2)
    seen = [dataclasses.replace(made.samples[0], media=items) for items in media]
    assert len({fingerprint(dataclasses.replace(made, samples=(each,))) for each in seen}) == len(media)


def test_what_does_not_fit_is_named(adapter):
    bare = Sample([1, 2], [2, 3], [1, 1])
    with pytest.raises(UserError, match="samples is empty"):
        batch(adapter, [])
    with pytest.raises(UserError, match=r"sample 1 has no field 'advantage', which others of the batch have"):
        batch(adapter, [sample(5, 1), bare])
    with pytest.raises(UserError, match=r"sample 1 has adapter='a', but this engine has no LoRA adapters"):
        make_batch(
            [bare, Sample([1], [1], [1], adapter="a")],
            adapter,
            weights={},
            fields=("temperature",),
            dtype=torch.float32,
        )
