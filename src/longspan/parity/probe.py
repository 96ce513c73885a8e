"""The leak probe's samples: documents over disjoint ids, and one token of one of them changed.

Lengths, media and packing are those of the checked samples. Document d uses ids of its own range only, so a row of
the input embedding belongs to one document, and its gradient shows what reached that document backwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.data import Sample
from longspan.errors import UserError


@dataclass(frozen=True, slots=True)
class Probe:
    """Two batches that differ in one token of `document`."""

    name: str
    document: int
    before: Sequence[Sample]
    after: Sequence[Sample]
    outside_rows: list[int]  # embedding rows whose ids stand in other documents only
    embedding: str  # name of the input embedding's parameter
    loss: (
        str  # what the gradient probe trains: "value", which leaves a tied head out, or "cross_entropy" for untied ones
    )


def make_probes(
    samples: Sequence[Sample], *, text_ids: Tensor, special: Sequence[int], embedding: str, loss: str, most: int = 3
) -> list[Probe]:
    """Probes of up to `most` documents of 2 tokens or more: the longest, the first, and those spread between.

    text_ids: ids of plain text. special: media ids, which keep their places in every document.
    """
    share = len(text_ids) // len(samples)
    if share < 2:
        raise UserError(
            f"{len(samples)} documents need 2 ids of text each for the leak probe, the vocabulary has {len(text_ids)}. "
            "Check fewer samples at once"
        )
    own_ids = [text_ids[number * share : (number + 1) * share] for number in range(len(samples))]
    # cross-entropy reaches a tied embedding through the head too: then the changed document trains nothing
    silent = loss != "value"
    documents = [_renamed(sample, ids, special) for sample, ids in zip(samples, own_ids, strict=True)]
    able = [number for number, sample in enumerate(documents) if len(sample) > 1 and _text_places(sample, special)]
    able.sort(key=lambda number: -len(documents[number]))
    probes = []
    for document in able[:: max(1, len(able) // most)][:most]:
        places = _text_places(documents[document], special)
        place = places[len(places) // 2]
        before = list(documents)
        if silent:
            before[document] = _with(before[document], mask=torch.zeros(len(before[document])))
        after = list(before)
        after[document] = _changed(before[document], place, own_ids[document])
        outside = sorted({int(i) for n, s in enumerate(documents) if n != document for i in s.input_ids} - set(special))
        name = f"token {place} of sample {document}"
        probes.append(Probe(name, document, before, after, outside, embedding, loss))
    return probes


def _text_places(sample: Sample, special: Sequence[int]) -> list[int]:
    return [place for place, token in enumerate(sample.input_ids.tolist()) if token not in special]


def _renamed(sample: Sample, own: Tensor, special: Sequence[int]) -> Sample:
    """Text ids out of `own`, every token trained; media ids and media stay."""
    kept = torch.isin(sample.input_ids, torch.tensor(list(special), dtype=torch.int64))
    ids = torch.where(kept, sample.input_ids, own[sample.input_ids % len(own)])
    targets = own[sample.target_ids.clamp(min=0) % len(own)]
    mask = sample.mask if bool(kept.any()) else torch.ones(len(sample))
    fields = {name: value for name, value in sample.fields.items() if name in ("return", "temperature")}
    return Sample(ids, targets, mask, fields=fields, media=sample.media, group=sample.group)


def _changed(sample: Sample, place: int, own: Tensor) -> Sample:
    ids: Tensor = sample.input_ids.clone()
    number = int((own == ids[place]).nonzero())
    ids[place] = own[(number + 1) % len(own)]
    return _with(sample, ids=ids)


def _with(sample: Sample, *, ids: Tensor | None = None, mask: Tensor | None = None) -> Sample:
    return Sample(
        sample.input_ids if ids is None else ids,
        sample.target_ids,
        sample.mask if mask is None else mask,
        fields=sample.fields,
        media=sample.media,
        group=sample.group,
    )
