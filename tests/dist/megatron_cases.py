"""What the tests of the megatron backend share: jobs that hold layouts against the oracle, and faults to plant in them.

Few launches with many layouts each: importing megatron-core costs 8 s a process. Every layout is also held in two calls of
which the second has one token, so that ranks have nothing to do.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from ragged import calls

from longspan import Engine, EngineConfig, launch
from longspan.launch import world
from longspan.layout import parse_layout
from longspan.models.loading import build_random
from longspan.models.tiny import tiny
from longspan.parity import differences
from longspan.parity.cases import ALL, PPO, Case
from longspan.parity.checks import Truth, check_layout, tight_budget
from longspan.parity.compare import Request, prepare
from longspan.parity.reference import Reference

installed = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: see docs/megatron.md"
)
LENGTHS = (13, 1, 22, 7, 5, 2)  # the last row trains nothing; two rows are shorter than CP=3
CASES = {
    "ppo": Case("ppo", "ppo", PPO),
    "together": Case("together", "ppo", {**PPO, **ALL, "value": 0.5, "value_clip": 0.2}, "sample"),
    "mtp": Case("mtp", "reinforce", {"mtp": 0.5}),
    "moe_aux": Case("moe_aux", "reinforce", {"moe_aux": 1.0}),
    "moe_z": Case("moe_z", "reinforce", {"moe_z": 1.0}, "sample"),
}
APART = Case("apart", "reinforce", {}, "constant", 60.0)  # its calls share a denominator


@contextmanager
def replaced(target, make):
    """`make(original)` in place of "module:name" inside the block."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


BACKEND, MODEL = "longspan.engine.megatron.backend:", "longspan.engine.megatron.model:"
FAULTS = {
    # each rank keeps its own heads' part of the q and k norms' gradient (NeMo-RL and Megatron shipped it)
    "tp": (BACKEND + "_sum", lambda real: lambda x, group: None if x.dim() == 1 else real(x, group)),
    # gradients stay on the data rank that made them
    "data": (BACKEND + "_sum", lambda real: lambda x, group: None),
    # etp: each rank keeps its own columns' part of the gradients of the tokens and scores that experts read
    "columns": ("longspan.engine.megatron.moe:sum_gradient", lambda real: lambda x, group: x),
    # router losses of the stages before the last are dropped
    "routers": (MODEL + "Stage.forward", lambda real: lambda *args: (real(*args)[0], None)),
}


@dataclass(frozen=True)
class Job:
    """One model on layouts of as many ranks; faults: of a layout that runs once more with a fault planted."""

    model: str
    layouts: tuple[str, ...]
    cases: tuple[str, ...]
    faults: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[str, ...] = ("start", "logprob", "gradient", "weights")
    over: Mapping[str, int] = field(default_factory=dict)  # of the model's tiny config

    @property
    def name(self) -> str:
        return " ".join([self.model, *(f"{key}={value}" for key, value in self.over.items())])

    def path(self, folder) -> str:
        """ "tiny:<family>", or a folder of the same model with other sizes."""
        if not self.over:
            return f"tiny:{self.model}"
        target = folder / self.name
        if not target.exists():
            build_random(tiny(self.model, **self.over), torch.float32, 0).save_pretrained(target)
        return str(target)


def once(make):
    """`make`, called once for each argument, even if it fails: each test that asks again fails alike, at once."""
    made = {}

    def of(key):
        if key not in made:
            made[key] = Future()
            try:
                made[key].set_result(make(key))
            except Exception as error:
                made[key].set_exception(error)
        return made[key].result()

    return of


def engine_of(model, name, backend="megatron", **settings):
    """An engine of a tiny model under a layout's name."""
    settings = {"max_tokens_per_rank": 48, **settings}
    return Engine.build(EngineConfig(model, layout=parse_layout(name), backend=backend, **settings))


def prepared(job, folder):
    """The plan of a job, and the oracle's answers, to APART too."""
    request = Request(
        job.path(folder),
        {},
        backend="megatron",
        lengths=LENGTHS,
        checks=job.checks,
        steps=2,
        cases=(*(CASES[name] for name in job.cases), APART),
    )
    plan, truth = prepare(request, Reference(request.model, dtype=torch.float64, value_head=True))
    return replace(plan, cases=plan.cases[:-1]), truth


def check(plan, path, job):
    """In every rank: each layout's cells and digest by its name, and cells where a fault is planted by (layout, fault)."""
    compares = world().rank == 0
    truth = torch.load(path, weights_only=False) if compares else Truth.empty()
    found = {}
    for name in job.layouts:
        own = replace(plan, config=replace(plan.config, layout=parse_layout(name)))
        findings = check_layout(name, own, truth, compares=compares)
        check_apart(own, truth, findings)
        found[name] = (findings.cells, findings.digest.hexdigest())
        if name in job.faults:
            with replaced(*FAULTS[job.faults[name]]):
                faulty = check_layout("fault", replace(own, checks=("gradient",)), truth, compares=compares)
            found[name, job.faults[name]] = (faulty.cells, "")
    return found


def check_apart(plan, truth, findings):
    """The gradient of two calls, the second of one row (one token, where the model does not see)."""
    layout, limits, lengths = plan.config.layout, plan.limits, [len(sample) for sample in plan.samples]
    engine = Engine.build(replace(plan.config, max_tokens_per_rank=tight_budget(lengths, layout.cp, layout.dp)))
    for samples in calls(plan.samples):
        engine.forward_backward(samples, APART.objective(), normalise=APART.normalise, denominator=APART.denominator)
    gradients = engine.gradients()
    findings.saw(gradients)
    findings.add(
        "gradient",
        "two calls",
        limits.gradient,
        lambda: differences.parameters(gradients, truth.gradients[APART.name], limits.zero),
    )


def run(jobs, folder):
    """All jobs in one launch: (job, layout or (layout, fault)) -> cells of rank 0 and how many ranks were told other numbers."""
    plans, paths = [], [folder / f"{number}.pt" for number in range(len(jobs))]
    for job, path in zip(jobs, paths, strict=True):
        plan, truth = prepared(job, folder)
        torch.save(truth, path)
        plans.append(plan)

    def body():
        return [check(*each) for each in zip(plans, paths, jobs, strict=True)]

    results = launch(body, ranks=parse_layout(jobs[0].layouts[0]).ranks, timeout_s=250)
    table = {}
    for number, job in enumerate(jobs):
        for name, (cells, digest) in results[0][number].items():
            odd = sum(result[number][name][1] != digest for result in results)
            table[job.name, name] = (cells, odd)
    return table


def hold(table, job, layout):
    cells, odd = table[job, layout]
    missed = [cell for cell in cells if not cell.passed]
    assert cells and not missed, missed
    assert not odd, f"{odd} ranks of {layout} were told other numbers than rank 0"
