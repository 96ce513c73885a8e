"""What the tests of the megatron backend share: jobs that hold layouts against the oracle, with a fault planted last.

Few launches with many layouts each: importing megatron-core costs 8 s a process.
"""

import importlib
import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from longspan import launch
from longspan.launch import world
from longspan.layout import parse_layout
from longspan.models.loading import build_random
from longspan.models.tiny import tiny
from longspan.parity.cases import ALL, PPO, Case
from longspan.parity.checks import Truth, check_layout
from longspan.parity.compare import Request, prepare
from longspan.parity.reference import Reference

installed = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: see docs/megatron.md"
)
LENGTHS = (13, 1, 22, 7, 5, 3)  # the last row trains nothing; two rows are shorter than any CP
CASES = {
    "ppo": Case("ppo", "ppo", PPO),
    "together": Case("together", "ppo", {**PPO, **ALL, "value": 0.5, "value_clip": 0.2}, "sample"),
    "mtp": Case("mtp", "reinforce", {"mtp": 0.5}),
    "moe_aux": Case("moe_aux", "reinforce", {"moe_aux": 1.0}),
    "moe_z": Case("moe_z", "reinforce", {"moe_z": 1.0}, "sample"),
}


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
    """One model on layouts of as many ranks; the last layout once more with a fault planted."""

    model: str
    layouts: tuple[str, ...]
    cases: tuple[str, ...]
    fault: str | None = None
    dtype: str = "float64"
    checks: tuple[str, ...] = ("start", "logprob", "gradient", "weights")
    num_layers: int = 2

    @property
    def name(self) -> str:
        return self.model if self.num_layers == 2 else f"{self.model}-{self.num_layers}"

    def path(self, folder) -> str:
        """ "tiny:<family>", or a folder of the same model with more layers."""
        if self.num_layers == 2:
            return f"tiny:{self.model}"
        target = folder / f"model-{self.name}"
        if not target.exists():
            build_random(tiny(self.model, num_hidden_layers=self.num_layers), torch.float32, 0).save_pretrained(target)
        return str(target)


def prepared(job, folder):
    """The plan of a job; the oracle's answers go to `folder`."""
    request = Request(
        job.path(folder),
        {},
        dtype=job.dtype,
        backend="megatron",
        lengths=LENGTHS,
        checks=job.checks,
        steps=2,
        cases=tuple(CASES[name] for name in job.cases),
    )
    dtype = torch.float64 if job.dtype == "float64" else torch.float32
    plan, truth = prepare(request, Reference(request.model, dtype=dtype, value_head=True))
    torch.save(truth, folder / f"{job.name}.pt")
    return plan


def check(plan, path, layouts, fault):
    """In every rank: each layout's cells and digest, then the cells of the last layout with the fault planted."""
    compares = world().rank == 0
    truth = torch.load(path, weights_only=False) if compares else Truth.empty()
    found = {}
    for name in layouts:
        own = replace(plan, config=replace(plan.config, layout=parse_layout(name)))
        findings = check_layout(name, own, truth, compares=compares)
        found[name] = (findings.cells, findings.digest.hexdigest())
    if fault is not None:
        with replaced(*FAULTS[fault]):
            own = replace(own, checks=("gradient",))
            found["fault"] = (check_layout("fault", own, truth, compares=compares).cells, "")
    return found


def run(jobs, folder, more=None):
    """All jobs in one launch: (model, layout) -> cells of rank 0 and how many ranks were told other numbers."""
    plans = [prepared(job, folder) for job in jobs]

    def body():
        found = [check(plan, folder / f"{j.name}.pt", j.layouts, j.fault) for j, plan in zip(jobs, plans, strict=True)]
        return found, more(folder) if more is not None else None

    results = launch(body, ranks=parse_layout(jobs[0].layouts[0]).ranks, timeout_s=250)
    table = {}
    for number, job in enumerate(jobs):
        for name, (cells, digest) in results[0][0][number].items():
            odd = sum(result[0][number][name][1] != digest for result in results)
            table[job.name, name] = (cells, odd)
    return table, results[0][1]


def hold(table, model, layout):
    cells, odd = table[model, layout]
    missed = [cell for cell in cells if not cell.passed]
    assert cells and not missed, missed
    assert not odd, f"{odd} ranks of {layout} were told other numbers than rank 0"
