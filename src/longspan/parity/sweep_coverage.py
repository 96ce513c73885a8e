"""What an example of the sweep really met, as names to count: read off the plan and the index vectors that it ran.

A layout can ask for four ranks and never cut an image; so cuts, inert rows and ranks without a trained token are
looked up in the rows that were packed, not in the example's settings. REQUIRED is what a long sweep must have met.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.data import Plan, Row, Sample
from longspan.data.plan import IndexKind, padded_length, row_index, row_tokens
from longspan.layout import layout_index
from longspan.parity.sweep_examples import END, IMAGE, MODELS, START, Example

REPEATED = "example seen before in its launch"
TERMS = ("kl", "entropy", "value", "moe_aux", "mtp")
LOSSES = ("cross_entropy", "importance_sampling", "reinforce", "value", "distill_topk", "ppo", "cispo", "gspo", "dro")
RULES = ("token", "sample", "sample_sum", "constant", "sum")
MIXERS = ("ring cp2", "ring cp3", "ring cp4", "gather cp2", "gather cp3", "gather cp4", "ulysses cp2", "ulysses cp4")
REQUIRED = (
    *(f"model {name}" for name in MODELS),
    *(f"mixer {name}" for name in (*MIXERS, "hybrid cp4")),
    *(f"dp {size}" for size in (1, 2, 3, 4)),
    *(f"ep {size}" for size in (1, 2, 4)),
    *(f"index {kind}" for kind in ("identity", "contiguous", "zigzag")),
    *(f"linear {how}" for how in ("state", "heads")),
    *(f"recompute {how}" for how in ("none", "selective", "full")),
    *(f"calls {number}" for number in (1, 2, 3)),
    *(f"loss {name}" for name in LOSSES),
    *(f"terms {name} alone" for name in LOSSES),
    *(f"term {name}" for name in TERMS),
    "terms all together",
    *(f"rule {name}" for name in RULES),
    "dynamic cp",
    "rows of different sizes in one micro-step",
    "several micro-steps",
    "several samples in one row",
    "inert row",
    "order of samples changed",
    "sample cut by a shard edge",
    "sample shorter than its cp",
    "sample of 1 token",
    "sample over 200 tokens",
    "sample without a trained token",
    "nothing trained at all",
    "rank without a trained token",
    "image cut by a shard edge",
    "image that begins or ends at a shard edge",
    "several images in a sample",
    "sampled placeholder",
    "rank without an image beside one with",
    "no image beside a tower",
)


def covered(
    example: Example, samples: Sequence[Sample], index: IndexKind, mixer: str, plans: Sequence[tuple[list[int], Plan]]
) -> set[str]:
    """Names of what the example met. plans: (sample numbers of a call, its plan); index and mixer: the resolved ones."""
    layout, case = example.layout, example.case
    terms = [name for name in TERMS if name in case.settings]
    usual = [name for name in ("kl", "entropy", "value") if name != case.loss]
    found = {
        f"model {example.model}",
        f"mixer {mixer} cp{layout.cp}",
        f"dp {layout.dp}",
        f"ep {layout.ep}",
        f"linear {layout.linear}",
        f"recompute {example.recompute}",
        f"calls {len(plans) - 1}",
        f"loss {case.loss}",
        f"rule {case.normalise}",
        *(f"term {name}" for name in terms),
        *(f"{axis} {size}" for axis, size in layout.axes.items() if axis in ("tp", "pp", "etp") and size > 1),
    }
    if layout.sequence_parallel:
        found.add("sequence parallel")
    if not terms:
        found.add(f"terms {case.loss} alone")
    if set(usual) <= set(terms):
        found.add("terms all together")
    if example.dynamic_cp:
        found.add("dynamic cp")
    if [number for numbers, _ in plans[1:] for number in numbers] != list(range(len(samples))):
        found.add("order of samples changed")
    for sample in samples:
        found |= set(_of_sample(sample, tower=example.model.endswith(("_vl", "_vl_moe"))))
    if not any(sample.num_trained for sample in samples):
        found.add("nothing trained at all")
    for numbers, plan in plans:
        found |= set(_of_plan(plan, [samples[number] for number in numbers], index))
    return found


def _of_sample(sample: Sample, *, tower: bool) -> Iterator[str]:
    if len(sample) == 1:
        yield "sample of 1 token"
    if len(sample) > 200:
        yield "sample over 200 tokens"
    if sample.num_trained == 0:
        yield "sample without a trained token"
    if len(sample.media) > 1:
        yield "several images in a sample"
    if tower and not sample.media:
        yield "no image beside a tower"
    if bool(((sample.target_ids == IMAGE) & (sample.mask > 0)).any()):
        yield "sampled placeholder"


def _of_plan(plan: Plan, samples: Sequence[Sample], index: IndexKind) -> Iterator[str]:
    if len(plan.micro_steps) > 1:
        yield "several micro-steps"
    for rows in plan.micro_steps:
        if len({row.size for row in rows}) > 1:
            yield "rows of different sizes in one micro-step"
        pictures = [sum(len(samples[number].media) for number in row.samples) for row in rows]
        if any(pictures) and any(count < row.size for count, row in zip(pictures, rows, strict=True)):
            yield "rank without an image beside one with"
        for row in rows:
            yield from _of_row(row, samples, index)


def _of_row(row: Row, samples: Sequence[Sample], index: IndexKind) -> Iterator[str]:
    yield f"index {row_index(row.size, index)}"
    if not row.samples:
        yield "inert row"
        return
    if len(row.samples) > 1:
        yield "several samples in one row"
    trained = torch.zeros(row.size)
    for number, ranks in zip(row.samples, owners(row, [len(samples[i]) for i in row.samples], index), strict=True):
        sample = samples[number]
        trained.index_add_(0, ranks, sample.mask.float())
        edges = ranks.diff() != 0  # [L - 1] between token t and t + 1
        if bool(edges.any()):
            yield "sample cut by a shard edge"
        if len(sample) < row.size:
            yield "sample shorter than its cp"
        inside = torch.zeros(len(sample), dtype=torch.bool)
        for first, last in _images(sample):
            inside[first : last + 1] = True
            if bool(edges[first:last].any()):
                yield "image cut by a shard edge"
            if bool(edges[first - 1]) or bool(edges[last : last + 1].any()):
                yield "image that begins or ends at a shard edge"
    if bool((trained == 0).any()):
        yield "rank without a trained token"


def _images(sample: Sample) -> Iterator[tuple[int, int]]:
    """First and last placeholder of each image: what stands between the vision markers."""
    ids = sample.input_ids
    starts = ((ids[:-1] == START) & (ids[1:] == IMAGE)).nonzero()[:, 0].tolist()
    ends = (ids == END).nonzero()[:, 0].tolist()
    for start in starts:
        yield start + 1, min([end for end in ends if end > start], default=len(ids)) - 1


def owners(row: Row, lengths: Sequence[int], index: IndexKind) -> list[Tensor]:
    """For each sample of a row the rank, inside the row, that holds each of its tokens: int64 [L]."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + padded_length(length, row.size, index))
    total = row.size * row_tokens(lengths, row.size, index)
    cu_seqlens = torch.tensor([*bounds, *([total] if total > bounds[-1] else [])], dtype=torch.int32)
    owner = torch.empty(total, dtype=torch.int64)
    for rank, positions in enumerate(layout_index(row_index(row.size, index), cu_seqlens, row.size)):
        owner[positions] = rank
    return [owner[start : start + length] for start, length in zip(bounds, lengths, strict=False)]
