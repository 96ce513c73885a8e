"""What the sweep draws: rows, layouts, objectives and calls as plain numbers, and the samples made of them.

An `Example` prints as something to type in again. Rows are ragged from 1 token up, with holes, without any trained
token, with up to three images anywhere and with image placeholders that the policy sampled itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from longspan.data import Image, Sample
from longspan.layout import Layout
from longspan.parity.cases import Case

TEXT = (
    "tiny:qwen3",
    "tiny:qwen2",
    "tiny:llama",
    "tiny:mistral",
    "tiny:ministral",
    "tiny:gemma3",
    "tiny:glm4",
    "tiny:olmo2",
    "tiny:olmo3",
    "tiny:phi3",
    "tiny:smollm3",
)
WITH_IMAGES = ("tiny:qwen3_vl", "tiny:qwen3_5_vl", "tiny:qwen3_vl_moe")
RECURRENT = ("tiny:qwen3_5", "tiny:qwen3_5_vl", "tiny:qwen3_5_moe", "tiny:qwen3_5_mtp", "tiny:qwen3_next")
MOE = ("tiny:qwen3_moe", "tiny:qwen3_vl_moe", "tiny:qwen3_5_moe", "tiny:qwen3_next", "tiny:gpt_oss")
DRAFTING = ("tiny:qwen3_5_mtp",)  # with a head that predicts DRAFTS tokens ahead
DRAFTS = 2
MODELS = tuple(dict.fromkeys((*TEXT, *WITH_IMAGES, *RECURRENT, *MOE)))
OTHER_BACKEND = (  # in the megatron backend's tables
    *("tiny:llama", "tiny:mistral", "tiny:qwen2", "tiny:qwen3", "tiny:qwen3_moe", "tiny:qwen3_vl", "tiny:qwen3_vl_moe"),
    *(name for name in RECURRENT if name not in DRAFTING),
)
CELL = 8  # pixels a visual token of the tiny towers is high and wide
IMAGE, VIDEO, START, END = 93, 94, 95, 96


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be made."""

    length: int
    prompt: int  # tokens before the response
    holes: float  # share of the response that is masked
    trained: bool
    images: tuple[tuple[int, int, int], ...]  # (text tokens before it, height, width in visual tokens)
    sampled: int  # placeholders that the policy sampled, near the end of the response
    seed: int


@dataclass(frozen=True, slots=True)
class Example:
    """Everything that one comparison depends on."""

    model: str
    layout: Layout
    rows: tuple[Row, ...]
    case: Case
    calls: int
    order: int  # seed of the order of samples
    tight: bool
    recompute: str
    dynamic_cp: bool
    backend: str = "fsdp"


@st.composite
def rows(draw: st.DrawFn, images: bool) -> Row:
    length = draw(st.one_of(st.integers(1, 24), st.integers(1, 300)))
    shapes: list[tuple[int, int, int]] = []
    sampled = 0
    if images:
        shapes = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 4)), max_size=3))
        sampled = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return Row(
        length=length,
        prompt=draw(st.integers(0, length - 1)),
        holes=draw(st.sampled_from([0.0, 0.3, 0.8])),
        trained=draw(st.integers(0, 5)) > 0,
        images=tuple(shapes),
        sampled=sampled,
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def cases(draw: st.DrawFn, model: str) -> Case:
    options: dict[str, dict[str, object]] = {
        "ppo": {"clip": 0.2, "dual_clip": draw(st.sampled_from([None, 3.0]))},
        "cispo": {"clip": 0.2},
        "gspo": {"clip": 0.2},
        "dro": {"beta": 0.1},
    }
    names = ["cross_entropy", "importance_sampling", "reinforce", "value", "distill_topk", *options]
    loss = draw(st.sampled_from(names))
    chosen = dict(options.get(loss, {}))
    if draw(st.booleans()):
        chosen |= {"kl": 0.3, "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"]))}
    if draw(st.booleans()):
        chosen["entropy"] = 0.1
    if loss != "value" and draw(st.booleans()):
        chosen |= {"value": 0.5, "value_clip": draw(st.sampled_from([None, 0.2]))}
    if model in MOE and draw(st.booleans()):
        chosen |= {"moe_aux": 0.1, "moe_z": 0.01}
    if model in DRAFTING and draw(st.booleans()):
        chosen["mtp"] = 0.3
    rule = draw(st.sampled_from(["token", "sample", "sample_sum", "constant", "sum"]))
    return Case(loss, loss, chosen, rule, 37.0 if rule == "constant" else None)


@st.composite
def layouts(draw: st.DrawFn, ranks: int, model: str) -> Layout:
    """Any cp that divides the ranks; 4 query heads stand against ulysses at cp=3, token order against zigzag."""
    cp = draw(st.sampled_from([size for size in (1, 2, 3, 4) if ranks % size == 0]))
    mixers = ["ring", "gather", "auto"] + (["ulysses"] if cp in (1, 2, 4) else []) + (["hybrid"] if cp == 4 else [])
    index, linear, ep = "auto", "auto", 1
    if model in RECURRENT:
        linear = draw(st.sampled_from(["state", "heads"])) if cp in (1, 2) else "state"
    else:
        index = draw(st.sampled_from(["auto", "contiguous", "zigzag"]))
    if model in MOE:
        ep = draw(st.sampled_from([size for size in (1, 2, 4) if ranks % size == 0]))
    return Layout(dp=ranks // cp, cp=cp, ep=ep, mixer=draw(st.sampled_from(mixers)), index=index, linear=linear)


@st.composite
def model_parallel_layouts(draw: st.DrawFn, ranks: int, model: str) -> Layout:
    """What the megatron backend adds: tp over 2 KV heads, with or without sequence parallelism and the experts' columns, and
    pp over 2 or 3 layers."""
    tp = draw(st.sampled_from([size for size in (1, 2) if ranks % size == 0]))
    stages = 3 if model in RECURRENT else 2
    pp = draw(st.sampled_from([size for size in (1, stages) if ranks // tp % size == 0]))
    data = draw(layouts(ranks // tp // pp, model))
    if data.mixer == "ulysses" and (4 // tp) % data.cp:
        data = replace(data, mixer="ring")
    sequence_parallel = tp > 1 and draw(st.booleans())
    etp = tp if model in MOE and draw(st.booleans()) else 1
    return replace(data, tp=tp, pp=pp, etp=etp, sequence_parallel=sequence_parallel)


@st.composite
def examples(draw: st.DrawFn, ranks: int, models: Sequence[str], backend: str = "fsdp") -> Example:
    towers = [name for name in models if name in WITH_IMAGES]  # more to go wrong: drawn twice as often
    model = draw(st.sampled_from([*models, *towers]))
    made = draw(st.lists(rows(model in WITH_IMAGES), min_size=1, max_size=7))
    layout = draw((layouts if backend == "fsdp" else model_parallel_layouts)(ranks, model))
    dynamic = layout.mixer != "hybrid" and draw(st.integers(0, 4)) == 0
    return Example(
        model=model,
        layout=layout,
        rows=tuple(made),
        case=draw(cases(model)),
        calls=draw(st.integers(1, 3)),
        order=draw(st.integers(0, 100)),
        tight=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        dynamic_cp=dynamic,
        backend=backend,
    )


def make_sample(row: Row) -> Sample:
    """A row's sample, without fields."""
    rng = np.random.default_rng(row.seed)
    ids = rng.integers(0, IMAGE, row.length + 1).tolist()
    pieces: list[int] = []
    media = []
    for before, height, width in row.images:
        pieces += [*ids[:before], START, *[IMAGE] * (height * width), END]
        ids = ids[before:] if len(ids) > before else ids[-1:]
        media.append(Image(rng.integers(0, 256, (height * CELL, width * CELL, 3), dtype=np.uint8)))
    tokens = np.array(pieces + ids)
    length = len(tokens) - 1
    mask = (np.arange(length) >= min(row.prompt, length - 1)) & (rng.random(length) >= row.holes)
    mask &= tokens[1:] != IMAGE
    if row.trained and len(ids) > row.sampled + 2:
        own = np.arange(length - row.sampled, length)  # a run before the last token, all of it sampled
        tokens[own] = IMAGE
        mask[own - 1] = True
    return Sample(tokens[:-1], tokens[1:], mask if row.trained else np.zeros(length), media=media)
