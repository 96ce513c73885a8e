"""Dynamic CP in every family against the oracle (plain transformers, one unpacked sample, fp64): rows of 1, 2, 3 and 4
ranks side by side in one batch, ranks with nothing to do, every kind of loss.

The plans are written out, so that each size and an inert row really run; that the planner gives rows such sizes is
test_planner's. Each job runs once more with a planted fault (each row's loss multiplied by its CP size), which must fail.
"""

import functools
from dataclasses import dataclass

import torch

from longspan import Engine, EngineConfig, launch
from longspan.data import Plan, Row
from longspan.launch import world
from longspan.layout import parse_layout
from longspan.parity import differences
from longspan.parity.cases import PPO, Case
from longspan.parity.faults import planted
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

LIMIT, ZERO = 1e-8, 1e-12
LENGTHS = (13, 1, 40, 7, 29, 3)  # as in parity: the last row trains nothing, the second has one token

FOUR = Plan(
    (
        (Row((2,), 0, 4),),
        (Row((1,), 0, 1), Row((4, 3), 1, 3)),
        (Row((), 0, 1), Row((5,), 1, 1), Row((0,), 2, 2)),
    ),
    4,
)
HALVES = Plan(  # of heads dealt out: no row of 3 ranks
    (
        (Row((2, 1), 0, 4),),
        (Row((4,), 0, 2), Row((), 2, 2)),
        (Row((0,), 0, 1), Row((5,), 1, 1), Row((3,), 2, 2)),
    ),
    4,
)
THREE = Plan(((Row((2, 1), 0, 3),), (Row((4, 3), 0, 2), Row((), 2, 1)), (Row((5,), 0, 1), Row((0,), 1, 2))), 3)

VALUE = Case("together", "ppo", {**PPO, "kl": 0.1, "entropy": 0.01, "value": 0.5, "value_clip": 0.2}, "sample")
DISTILL = Case("distill_topk", "distill_topk")
GSPO = Case("gspo", "gspo", {"clip": 0.2})
ROUTERS = Case("routers", "reinforce", {"moe_aux": 1.0, "moe_z": 0.5})


@dataclass(frozen=True)
class Job:
    """One family under one layout and plan."""

    family: str
    layout: str
    plan: Plan
    cases: tuple[Case, ...]

    @property
    def model(self) -> str:
        return f"tiny:{self.family}"


ON_FOUR = (
    Job("qwen3_5", "cp4-gather-state", FOUR, (VALUE, DISTILL)),
    Job("qwen3_5", "cp4-ulysses-heads", HALVES, (VALUE, GSPO)),
)
ON_THREE = (
    Job("qwen3_moe", "cp3-ring", THREE, (VALUE, ROUTERS)),
    Job("qwen3_vl", "cp3-gather", THREE, (VALUE, DISTILL)),
    Job("qwen3_5_vl", "cp3-ring-contiguous", THREE, (GSPO,)),
)


def build(job):
    engine = Engine.build(
        EngineConfig(
            model=job.model, layout=parse_layout(job.layout), dtype="float64", dynamic_cp=True, value_head=True
        )
    )
    engine.planner.plan = lambda batch: job.plan
    return engine


def found(jobs, samples):
    """In each rank: log-probs, and gradients and metrics by case; the gradients under the fault last."""
    out = []
    for job in jobs:
        engine, batch = build(job), samples[job.family]
        assert {row.size for rows in job.plan.micro_steps for row in rows} <= set(engine.planner.sizes)
        logprobs = [each["logprob"] for each in engine.forward(batch)]
        results = []
        for case in job.cases:
            metrics = engine.forward_backward(batch, case.objective(), normalise=case.normalise)
            results.append((metrics, engine.gradients()))
            engine.clear_gradients()
        with planted("cp-factor-loss"):
            engine.forward_backward(batch, job.cases[0].objective(), normalise=job.cases[0].normalise)
        wrong = engine.gradients()
        engine.clear_gradients()
        out.append((logprobs, results, wrong) if world().rank == 0 else None)
    return out


def check(jobs):
    references = {job.family: Reference(job.model, dtype=torch.float64, value_head=True) for job in jobs}
    samples = {
        family: fill_fields(default_samples(reference, LENGTHS), reference) for family, reference in references.items()
    }
    answers = launch(functools.partial(found, jobs), samples, ranks=jobs[0].plan.num_ranks, timeout_s=110, device="cpu")
    for job, (logprobs, results, wrong) in zip(jobs, answers[0], strict=True):
        reference, batch = references[job.family], samples[job.family]
        with torch.no_grad():
            truth = [reference.outputs(sample).logprob for sample in batch]
        worst, where = differences.tokens(logprobs, truth, batch)
        assert worst <= LIMIT, f"{job}: log-prob {worst:.3g} at {where}"
        for number, (case, (metrics, gradients)) in enumerate(zip(job.cases, results, strict=True)):
            reference.clear()
            wanted = reference.run(batch, case)
            worst, where = differences.parameters(gradients, wanted.gradients, ZERO)
            assert worst <= LIMIT, f"{job.family} {job.layout} {case.name}: gradient {worst:.3g} in {where}"
            worst, where = differences.metrics(metrics, wanted.metrics)
            assert worst <= LIMIT, f"{job.family} {job.layout} {case.name}: {where}"
            if number == 0:
                assert differences.parameters(wrong, wanted.gradients, ZERO)[0] > 1e-2, "the planted fault is not seen"
    return answers


def test_recurrent_models_mix_one_to_four_ranks():
    """States passed on, and heads dealt out."""
    check(ON_FOUR)


def test_experts_images_and_both_mix_one_to_three_ranks():
    check(ON_THREE)
