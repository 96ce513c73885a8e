"""How a case asks: the engine under layouts and budgets in one launch of ranks, against the oracle, with a planted fault.

A `Question` is samples and an objective. `ask` runs many of them in one launch; `truth` is the oracle's answer (plain
Hugging Face, one unpacked sample at a time, fp64), and `distance` the worst of log-probs, gradients and metrics.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from longspan.data import Sample
from longspan.engine import Engine, EngineConfig
from longspan.launch import launch
from longspan.layout import parse_layout
from longspan.parity import differences
from longspan.parity.cases import Case
from longspan.parity.checks import roomy_budget, tight_budget
from longspan.parity.faults import planted
from longspan.parity.reference import Reference, Result
from longspan.parity.samples import fill_fields

LIMIT = 1e-8  # DESIGN.md, fp64
ZERO = 1e-10
SUPERVISED = Case("cross_entropy", "cross_entropy")


@dataclass(frozen=True)
class Question:
    samples: Sequence[Sample]
    case: Case = SUPERVISED
    model: str = "tiny:qwen3"
    layouts: tuple[str, ...] = ("dp2", "cp2-ulysses")
    fault: str | None = None  # planted under the last layout


@dataclass(frozen=True)
class Answer:
    logprob: list[Tensor]
    metrics: Mapping[str, float]
    gradients: Mapping[str, Tensor]


Answers = dict[str, dict[str, Answer]]  # question -> "layout tight" or "fault" -> answer


@cache
def oracle(model: str) -> Reference:
    return Reference(model, dtype=torch.float64, value_head=True)


def rows(
    lengths: Sequence[int], trained: Sequence[Sequence[int]] | None = None, *, model: str = "tiny:qwen3", seed: int = 1
) -> list[Sample]:
    """Samples of these lengths with every field; trained: positions with mask 1 in each, all by default."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = torch.ones(length) if trained is None else torch.zeros(length)
        if trained is not None:
            mask[list(trained[number])] = 1.0
        made.append(Sample(ids[:-1], ids[1:], mask))
    return fill_fields(made, oracle(model))


def changed(sample: Sample, **parts: object) -> Sample:
    """The sample with other ids, targets, mask or fields."""
    fields = {**sample.fields, **parts.pop("fields", {})}
    names = ("input_ids", "target_ids", "mask", "media", "group", "adapter")
    return Sample(**{name: parts.get(name, getattr(sample, name)) for name in names}, fields=fields)


def build(model: str, layout: str, lengths: Sequence[int], *, tight: bool, **settings: object) -> Engine:
    plan = parse_layout(layout)
    budget = tight_budget(lengths, plan.cp, plan.dp) if tight else roomy_budget(lengths, plan.cp)
    return Engine.build(
        EngineConfig(model, plan, dtype="float64", value_head=True, max_tokens_per_rank=budget, **settings)
    )


def answer(question: Question, layout: str, *, tight: bool) -> Answer:
    engine = build(question.model, layout, [len(sample) for sample in question.samples], tight=tight)
    logprob = [out["logprob"] for out in engine.forward(question.samples)]
    case = question.case
    metrics = engine.forward_backward(question.samples, case.objective(), case.normalise, case.denominator)
    return Answer(logprob, metrics, engine.gradients())


def _in_rank(questions: Mapping[str, Question]) -> Answers:
    found: Answers = {}
    for name, question in questions.items():
        found[name] = {
            f"{layout} {'tight' if tight else 'roomy'}": answer(question, layout, tight=tight)
            for number, layout in enumerate(question.layouts)
            for tight in ((True, False) if number == 0 else (True,))
        }
        if question.fault is not None:
            with planted(question.fault):
                found[name]["fault"] = answer(question, question.layouts[-1], tight=True)
    return found


def ask(questions: Mapping[str, Question], *, ranks: int = 2) -> Answers:
    """Every question under its layouts in at least two micro-steps, and under the first with all in one row a rank."""
    return launch(_in_rank, questions, ranks=ranks, timeout_s=120, device="cpu")[0]


def truth(question: Question) -> tuple[list[Tensor], Result]:
    reference = oracle(question.model)
    reference.clear()
    with torch.no_grad():
        logprob = [reference.outputs(sample).logprob for sample in question.samples]
    return logprob, reference.run(question.samples, question.case)


def distance(found: Answer, question: Question, true: tuple[list[Tensor], Result]) -> tuple[float, str]:
    logprob, result = true
    return max(
        differences.tokens(found.logprob, logprob, question.samples),
        differences.parameters(found.gradients, result.gradients, ZERO),
        differences.metrics(found.metrics, result.metrics),
    )


def check(name: str, questions: Mapping[str, Question], answers: Answers) -> dict[str, Answer]:
    """Every answer is the oracle's; the planted fault's is not. -> the answers without the fault."""
    question, found = questions[name], dict(answers[name])
    true = truth(question)
    fault = found.pop("fault", None)
    for where, own in found.items():
        figure, place = distance(own, question, true)
        assert figure <= LIMIT, f"{name} under {where}: {figure:.3g} at {place}"
    if fault is not None:
        assert distance(fault, question, true)[0] > 1e-4, f"{question.fault} was not seen"
    return found
