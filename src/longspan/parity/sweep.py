"""`make sweep N=2000`: random samples, layouts and objectives, each compared with the oracle in fp64.

hypothesis runs on rank 0, which is also the oracle; each example goes to all ranks of a launch, and a miss raises on
rank 0 only, so shrinking goes on with the same ranks. A launch runs a few dozen examples with its own seed, printed
with every miss: process groups that engines leave behind end with their launch. Every example compares every trained
token's log-prob, every gradient and (for one call) every metric; the batch is cut into random calls in random order.
"""

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import tyro
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from longspan.data import Image, Sample
from longspan.engine import Engine, EngineConfig
from longspan.errors import LongspanError
from longspan.launch import launch
from longspan.layout import Layout
from longspan.parity import differences
from longspan.parity.cases import Case
from longspan.parity.cells import LIMITS
from longspan.parity.checks import roomy_budget, tight_budget
from longspan.parity.reference import Reference
from longspan.parity.report import write_json
from longspan.parity.samples import fill_fields

EXAMPLES = 40  # of one launch
TEXT = ("tiny:qwen3", "tiny:qwen2", "tiny:llama", "tiny:mistral")
MODELS = (
    *TEXT,
    "tiny:qwen3_vl",
    "tiny:qwen3_5",
    "tiny:qwen3_5_vl",
    "tiny:qwen3_moe",
    "tiny:qwen3_next",
    "tiny:gpt_oss",
)
RECURRENT = ("qwen3_5", "qwen3_next")
WITH_IMAGES = ("tiny:qwen3_vl", "tiny:qwen3_5_vl")
MOE = ("moe", "next", "gpt_oss")
CELL = 8  # pixels a visual token of the tiny towers is high and wide
IMAGE, VIDEO, START, END = 93, 94, 95, 96
LIMIT = LIMITS["float64"]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be made: plain numbers, so that a miss prints as something to type in again."""

    length: int
    prompt: int  # tokens before the response
    holes: float  # share of the response that is masked
    trained: bool
    images: tuple[tuple[int, int, int], ...]  # (text tokens before it, height, width in visual tokens)
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


@dataclass(slots=True)
class Tally:
    """What a sweep has seen so far."""

    examples: int = 0
    worst: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, figure: float) -> None:
        self.worst[name] = max(self.worst.get(name, 0.0), figure)


@st.composite
def rows(draw: st.DrawFn, images: bool) -> Row:
    length = draw(st.one_of(st.integers(1, 24), st.integers(1, 300)))
    shapes: list[tuple[int, int, int]] = []
    if images:
        shapes = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 4)), max_size=3))
    return Row(
        length=length,
        prompt=draw(st.integers(0, length - 1)),
        holes=draw(st.sampled_from([0.0, 0.3, 0.8])),
        trained=draw(st.integers(0, 5)) > 0,
        images=tuple(shapes),
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
    if any(part in model for part in MOE) and draw(st.booleans()):
        chosen |= {"moe_aux": 0.1, "moe_z": 0.01}
    rule = draw(st.sampled_from(["token", "sample", "sample_sum", "constant", "sum"]))
    return Case(loss, loss, chosen, rule, 37.0 if rule == "constant" else None)


@st.composite
def layouts(draw: st.DrawFn, ranks: int, model: str) -> Layout:
    cp = draw(st.sampled_from([size for size in (1, 2, 3, 4) if ranks % size == 0]))
    recurrent = any(part in model for part in RECURRENT)
    mixers = ["ring", "gather", "auto"] + (["ulysses"] if cp in (1, 2, 4) else []) + (["hybrid"] if cp == 4 else [])
    index = "contiguous" if recurrent else draw(st.sampled_from(["auto", "contiguous", "zigzag"]))
    return Layout(dp=ranks // cp, cp=cp, mixer=draw(st.sampled_from(mixers)), index=index)


@st.composite
def examples(draw: st.DrawFn, ranks: int, models: Sequence[str]) -> Example:
    model = draw(st.sampled_from(models))
    made = draw(st.lists(rows(model in WITH_IMAGES), min_size=1, max_size=7))
    layout = draw(layouts(ranks, model))
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
    return Sample(tokens[:-1], tokens[1:], mask if row.trained else np.zeros(length), media=media)


def run(example: Example, samples: Sequence[Sample]) -> tuple[list[torch.Tensor], dict[str, float], dict]:
    """What the engine says: log-probs, the metrics of the first call, accumulated gradients. Collective."""
    lengths = [len(sample) for sample in samples]
    layout = example.layout
    budget = tight_budget(lengths, layout.cp, layout.dp) if example.tight else roomy_budget(lengths, layout.cp)
    config = EngineConfig(
        model=example.model,
        layout=layout,
        dtype="float64",
        value_head=True,
        max_tokens_per_rank=budget,
        recompute=example.recompute,
        dynamic_cp=example.dynamic_cp,
    )
    engine = Engine.build(config)
    logprob = [output["logprob"] for output in engine.forward(samples)]
    order = np.random.default_rng(example.order).permutation(len(samples))
    parts = [[samples[i] for i in order[start :: example.calls]] for start in range(example.calls)]
    parts = [part for part in parts if part]
    case = whole_batch(example.case, samples, calls=len(parts))
    metrics: dict[str, float] = {}
    for part in parts:
        metrics = engine.forward_backward(
            part, case.objective(), normalise=case.normalise, denominator=case.denominator
        )
    return logprob, metrics if len(parts) == 1 else {}, engine.gradients()


def whole_batch(case: Case, samples: Sequence[Sample], *, calls: int) -> Case:
    """The case with the whole batch's denominator, which several calls need."""
    if calls == 1 or case.normalise in ("sum", "constant"):
        return case
    trained = [sample.num_trained for sample in samples]
    count = sum(trained) if case.normalise == "token" else sum(number > 0 for number in trained)
    return replace(case, denominator=float(max(count, 1)))


def compare(example: Example, reference: Reference, samples: Sequence[Sample], said, tally: Tally) -> None:
    """Raises AssertionError where the engine and the oracle differ."""
    logprob, metrics, gradients = said
    reference.clear()
    with torch.no_grad():
        want = [reference.outputs(sample).logprob for sample in samples]
    result = reference.run(samples, example.case)
    checks = [
        ("logprob", differences.tokens(logprob, want, samples), LIMIT.logprob),
        ("gradient", differences.parameters(gradients, result.gradients, LIMIT.zero), LIMIT.gradient),
    ]
    if metrics:
        checks.append(("metrics", differences.metrics(metrics, result.metrics), LIMIT.metric))
    for name, (figure, where), limit in checks:
        tally.note(name, figure)
        assert figure <= limit, f"{name} {figure:.3g} > {limit:g} at {where}"


def sweep_ranks(number: int, start: int, models: Sequence[str]) -> tuple[Tally, str | None]:
    """Body of a launch: `number` examples from seed `start`. Rank 0 leads, the others follow. -> (tally, the miss)."""
    if dist.get_rank() > 0:
        follow()
        return Tally(), None
    tally = Tally()
    references: dict[str, Reference] = {}

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(examples(dist.get_world_size(), models))
    def check(example: Example) -> None:
        if example.model not in references:
            references[example.model] = Reference(example.model, dtype=torch.float64, value_head=True)
        reference = references[example.model]
        samples = fill_fields([make_sample(row) for row in example.rows], reference)
        dist.broadcast_object_list([(example, samples)], src=0)
        said = run(example, samples)
        tally.examples += 1
        compare(example, reference, samples, said, tally)

    miss = None
    try:
        check()
    except AssertionError as error:
        miss = f"seed {start}: {error}\n" + "\n".join(error.__notes__)
    dist.broadcast_object_list([None], src=0)
    return tally, miss


def follow() -> None:
    """Ranks above 0: run what rank 0 sends until it says None."""
    while True:
        message: list[object] = [None]
        dist.broadcast_object_list(message, src=0)
        if message[0] is None:
            return
        run(*message[0])


@dataclass(frozen=True, slots=True)
class Options:
    """How much, and from where."""

    n: int = 200
    """Examples in all, shared over 1, 2, 3 and 4 ranks."""
    seed: int = 0
    """The first launch's seed; each launch adds 1."""
    ranks: tuple[int, ...] = (2, 3, 4, 1)
    """Numbers of ranks that launches go through in turn."""
    models: tuple[str, ...] = MODELS
    """Tiny models to draw from."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the tally to this file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no example misses."""
    options = tyro.cli(Options, args=arguments, prog="python -m longspan.parity.sweep", description=__doc__)
    started, total, misses, number = time.monotonic(), Tally(), [], 0
    while total.examples < options.n:
        ranks = options.ranks[number % len(options.ranks)]
        size = min(EXAMPLES, options.n - total.examples)
        try:
            tally, miss = launch(
                sweep_ranks, size, options.seed + number, options.models, ranks=ranks, timeout_s=3600.0, device="cpu"
            )[0]
        except LongspanError as error:
            tally, miss = Tally(size), f"seed {options.seed + number}: {error}"
        total.examples += tally.examples
        for name, figure in tally.worst.items():
            total.note(name, figure)
        if miss is not None:
            misses.append(f"{ranks} ranks, {miss}")
            print(misses[-1], flush=True)
        figures = ", ".join(f"{name} {figure:.1e}" for name, figure in total.worst.items())
        print(
            f"{total.examples} examples, {len(misses)} misses, worst {figures}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        number += 1
    if options.json is not None:
        record = {"examples": total.examples, "misses": misses, "worst": total.worst, "passed": not misses}
        write_json(options.json, record)
    return 1 if misses else 0


if __name__ == "__main__":
    # under its own name: classes of __main__ do not travel between ranks
    sys.exit(importlib.import_module("longspan.parity.sweep").main())
