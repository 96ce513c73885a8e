"""`make sweep N=2000`: random samples, layouts and objectives, each compared with the oracle in fp64.

hypothesis runs on rank 0, which is also the oracle; each example goes to all ranks of a launch, and a miss raises on
rank 0 only, so shrinking goes on with the same ranks. A launch runs a few dozen examples with its own seed, printed
with every miss: process groups that engines leave behind end with their launch. Every example compares every trained
token's log-prob (in the given order, in another order, and one sample alone), every gradient and every metric (with
several calls, the sums over calls); the batch is cut into random calls in random order. Shards: several runs with
`--seed` a thousand apart and `--json`; sweep_summary.py adds them up.
"""

import importlib
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from longspan.data import Plan, Sample
from longspan.engine import Engine, EngineConfig
from longspan.engine.batch import Batch
from longspan.errors import LongspanError
from longspan.launch import launch
from longspan.parity import differences
from longspan.parity.cases import Case
from longspan.parity.cells import LIMITS
from longspan.parity.checks import roomy_budget, tight_budget
from longspan.parity.reference import Reference
from longspan.parity.report import write_json
from longspan.parity.samples import fill_fields
from longspan.parity.sweep_coverage import REPEATED, covered
from longspan.parity.sweep_examples import DRAFTING, DRAFTS, MODELS, OTHER_BACKEND, Example, examples, make_sample

EXAMPLES = 40  # of one launch
LIMIT = LIMITS["float64"]
INVARIANCE = 1e-10  # log-probs of one sample in two packings: each is within rounding of the oracle's


@dataclass(slots=True)
class Tally:
    """What a sweep has seen so far."""

    examples: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    coverage: Counter[str] = field(default_factory=Counter)

    def note(self, name: str, figure: float) -> None:
        self.worst[name] = max(self.worst.get(name, 0.0), figure)

    def add(self, other: "Tally") -> None:
        self.examples += other.examples
        self.coverage += other.coverage
        for name, figure in other.worst.items():
            self.note(name, figure)

    def figures(self) -> str:
        return ", ".join(f"{name} {figure:.1e}" for name, figure in self.worst.items())


@dataclass(frozen=True, slots=True)
class Said:
    """What the engine said of one example, on one rank."""

    logprob: list[Tensor]  # [L] a sample, in the given order
    reordered: list[Tensor]  # the same from a batch in another order
    alone: tuple[int, Tensor]  # a sample's number and its log-probs from a batch of its own
    metrics: Mapping[str, float]  # of the only call, or the sums that add up over calls
    gradients: Mapping[str, Tensor]  # accumulated over all calls
    covered: frozenset[str]


def run(example: Example, samples: Sequence[Sample]) -> Said:
    """The example through the engine. Collective."""
    lengths = [len(sample) for sample in samples]
    layout = example.layout
    budget = tight_budget(lengths, layout.cp, layout.dp) if example.tight else roomy_budget(lengths, layout.cp)
    config = EngineConfig(
        model=example.model,
        layout=layout,
        backend=example.backend,
        dtype="float64",
        value_head=True,
        mtp_steps=DRAFTS if example.model in DRAFTING else 0,
        max_tokens_per_rank=budget,
        recompute=example.recompute,
        dynamic_cp=example.dynamic_cp,
    )
    engine = Engine.build(config)
    plans = _watch_plans(engine)
    logprob = _logprob(engine, samples)
    order = np.random.default_rng(example.order).permutation(len(samples)).tolist()
    shuffled = _logprob(engine, [samples[i] for i in order])
    single = order[0]
    parts = [order[start :: example.calls] for start in range(example.calls)]
    parts = [part for part in parts if part]
    case = whole_batch(example.case, samples, calls=len(parts))
    said = [
        engine.forward_backward(
            [samples[i] for i in part], case.objective(), normalise=case.normalise, denominator=case.denominator
        )
        for part in parts
    ]
    calls = list(zip([list(range(len(samples))), order, *parts], plans, strict=True))
    alone = _logprob(engine, [samples[single]])[0]
    resolved = engine.mesh.layout
    return Said(
        logprob,
        [shuffled[order.index(number)] for number in range(len(samples))],
        (single, alone),
        said[0] if len(said) == 1 else summed(said),
        engine.gradients(),
        frozenset(covered(example, samples, resolved.index, resolved.mixer, [calls[0], *calls[2:]])),
    )


def _logprob(engine: Engine, samples: Sequence[Sample]) -> list[Tensor]:
    return [output["logprob"] for output in engine.forward(samples)]


def _watch_plans(engine: Engine) -> list[Plan]:
    """Grows by the plan of each call from here on."""
    seen: list[Plan] = []
    plan = engine.planner.plan

    def watched(batch: Batch) -> Plan:
        seen.append(plan(batch))
        return seen[-1]

    engine.planner.plan = watched
    return seen


def summed(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics that add up over calls with one denominator: loss terms and counts."""
    names = [name for name in calls[0] if name.startswith(("loss/", "tok/"))]
    return {name: sum(metrics[name] for metrics in calls) for name in names}


def whole_batch(case: Case, samples: Sequence[Sample], *, calls: int) -> Case:
    """The case with the whole batch's denominator, which several calls need."""
    if calls == 1 or case.normalise in ("sum", "constant"):
        return case
    trained = [sample.num_trained for sample in samples]
    count = sum(trained) if case.normalise == "token" else sum(number > 0 for number in trained)
    return replace(case, denominator=float(max(count, 1)))


def compare(example: Example, reference: Reference, samples: Sequence[Sample], said: Said, tally: Tally) -> None:
    """Raises AssertionError where the engine and the oracle differ."""
    reference.clear()
    with torch.no_grad():
        want = [reference.outputs(sample).logprob for sample in samples]
    result = reference.run(samples, example.case)
    single, alone = said.alone
    own = [samples[single]]
    checks = [
        ("logprob", differences.tokens(said.logprob, want, samples), LIMIT.logprob),
        ("order", differences.tokens(said.reordered, said.logprob, samples), INVARIANCE),
        ("packing", differences.tokens([alone], [said.logprob[single]], own), INVARIANCE),
        ("gradient", differences.parameters(said.gradients, result.gradients, LIMIT.zero), LIMIT.gradient),
        ("metrics", differences.metrics(said.metrics, result.metrics), LIMIT.metric),
    ]
    for name, (figure, where), limit in checks:
        tally.note(name, figure)
        assert figure <= limit, f"{name} {figure:.3g} > {limit:g} at {where}"


def sweep_ranks(number: int, start: int, models: Sequence[str], backend: str = "fsdp") -> tuple[Tally, str | None]:
    """Body of a launch: `number` examples from seed `start`. Rank 0 leads, the others follow. -> (tally, the miss)."""
    if dist.get_rank() > 0:
        follow()
        return Tally(), None
    tally = Tally()
    references: dict[str, Reference] = {}
    seen: set[str] = set()

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(examples(dist.get_world_size(), models, backend))
    def check(example: Example) -> None:
        if example.model not in references:
            references[example.model] = Reference(example.model, dtype=torch.float64, value_head=True, mtp_steps=DRAFTS)
        reference = references[example.model]
        samples = fill_fields([make_sample(row) for row in example.rows], reference)
        dist.broadcast_object_list([(example, samples)], src=0)
        said = run(example, samples)
        tally.examples += 1
        tally.coverage.update(said.covered | ({REPEATED} if repr(example) in seen else set()))
        seen.add(repr(example))
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
    """The first launch's seed; each launch adds 1, so shards take seeds 1000 apart."""
    ranks: tuple[int, ...] = (2, 4, 3, 4, 2, 1)
    """Numbers of ranks that launches go through in turn."""
    models: tuple[str, ...] = ()
    """Tiny models to draw from; none: all that the backend knows."""
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """What owns the parameters; megatron's layouts have tp and pp too."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the tally to this file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when no example misses."""
    options = tyro.cli(Options, args=arguments, prog="python -m longspan.parity.sweep", description=__doc__)
    started, total, misses, number = time.monotonic(), Tally(), [], 0
    models = options.models or (MODELS if options.backend == "fsdp" else OTHER_BACKEND)
    while total.examples < options.n:
        ranks = options.ranks[number % len(options.ranks)]
        size = min(EXAMPLES, options.n - total.examples)
        try:
            tally, miss = launch(
                sweep_ranks,
                size,
                options.seed + number,
                models,
                options.backend,
                ranks=ranks,
                timeout_s=3600.0,
                device="cpu",
            )[0]
        except LongspanError as error:
            tally, miss = Tally(size), f"seed {options.seed + number}: {error}"
        total.add(tally)
        if miss is not None:
            misses.append(f"{ranks} ranks, {miss}")
            print(misses[-1], flush=True)
        seconds = time.monotonic() - started
        print(f"{total.examples} examples, {len(misses)} misses, worst {total.figures()}, {seconds:.0f} s", flush=True)
        number += 1
    if options.json is not None:
        write_json(
            options.json,
            {
                "seeds": [options.seed, options.seed + number - 1],
                "examples": total.examples,
                "misses": misses,
                "worst": total.worst,
                "coverage": dict(sorted(total.coverage.items())),
                "seconds": round(time.monotonic() - started),
                "passed": not misses,
            },
        )
    return 1 if misses else 0


if __name__ == "__main__":
    # under its own name: classes of __main__ do not travel between ranks
    sys.exit(importlib.import_module("longspan.parity.sweep").main())
