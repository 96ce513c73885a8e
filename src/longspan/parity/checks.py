"""What one layout is put through, inside its ranks: every check of DESIGN.md's table against a finished oracle.

Built on the public API alone. Every rank runs every check (they are collective); rank 0's cells are reported, and
each rank's digest of everything it was told travels back, so that ranks that disagree by one bit are found by the
parent.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from longspan.data import Sample
from longspan.engine import AdamW, Engine, EngineConfig
from longspan.objective import Objective
from longspan.parity import differences
from longspan.parity.cases import STEP_CASE, Case
from longspan.parity.cells import MOE_LEAK, Cell, Limits
from longspan.parity.probe import Probe

STEP = AdamW(
    lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, clip_norm=1.0
)  # eps: a zero gradient's rounding must not be normalised up
BOTH_ORDERS = "last part first, weightless last"
CALL_ORDERS = ("parts", BOTH_ORDERS)
NORMS = ("weights", "grad/norm")  # check and case of the gradient's norm at each step
ALL_CHECKS = ("start", "logprob", "gradient", "calls", "leak", "weights")


@dataclass(frozen=True, slots=True)
class Truth:
    """The oracle's answers, all plain tensors and numbers."""

    start: Mapping[str, Tensor]  # initial weights
    logprob: Sequence[Tensor]  # [L] a sample
    entropy: Sequence[Tensor]
    metrics: Mapping[str, Mapping[str, float]]  # by case name
    gradients: Mapping[str, Mapping[str, Tensor]]
    norms: Sequence[float]  # global gradient norm of each step
    weights: Mapping[str, Tensor]  # after the steps

    @classmethod
    def empty(cls) -> "Truth":
        """For ranks that do not compare."""
        return cls({}, [], [], {}, {}, [], {})


@dataclass(frozen=True, slots=True)
class Plan:
    """What to check, the same for every layout."""

    config: EngineConfig  # its layout and budget are replaced for each layout
    samples: Sequence[Sample]
    cases: Sequence[Case]
    limits: Limits
    checks: Sequence[str] = ALL_CHECKS
    steps: int = 3
    step_case: Case = STEP_CASE
    probes: Sequence[Probe] = ()
    exact_leak: bool = True  # False: experts group tokens, see MOE_LEAK
    calls: Sequence[str] = CALL_ORDERS  # what check "calls" compares with one call of everything
    teacher: EngineConfig | None = (
        None  # the second engine of cases that use one; its layout and budget are the first's
    )
    routed: Sequence[Sample] = ()  # the samples with the oracle's routes, for cases that count them


@dataclass(slots=True)
class Findings:
    """Cells of one layout on one rank, and a digest of every number the engine returned there."""

    layout: str
    compares: bool  # rank 0 does; the others only take part
    cells: list[Cell] = field(default_factory=list)
    digest: "hashlib._Hash" = field(default_factory=hashlib.blake2b)
    parts: dict[str, tuple[float, str]] = field(default_factory=dict)  # worst gradient of each part of the model

    def add(self, check: str, case: str, limit: float, measure: Callable[[], tuple[float, str]]) -> None:
        if self.compares:
            figure, where = measure()
            self.cells.append(Cell(self.layout, check, case, figure, limit, where))

    def saw(self, *values: object) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.digest.update(
                    value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
                )
            elif isinstance(value, Mapping):
                for name in sorted(value):
                    if not name.startswith(differences.NOT_NUMBERS):
                        self.saw(value[name])
            elif isinstance(value, list | tuple):
                self.saw(*value)
            else:
                self.digest.update(repr(value).encode())


def check_layout(name: str, plan: Plan, truth: Truth, *, compares: bool = True) -> Findings:
    """Run the plan's checks under `plan.config`'s layout. Collective. Ranks that do not compare never read `truth`.

    Two engines: one that packs everything into one row a data rank (log-probs, leak probe), one on the tightest budget
    that fits (everything), so that accumulation over micro-steps is part of every comparison.
    """
    findings = Findings(name, compares)
    lengths = [len(sample) for sample in plan.samples]
    layout = plan.config.layout
    if {"logprob", "leak"} & set(plan.checks):
        engine = Engine.build(replace(plan.config, max_tokens_per_rank=roomy_budget(lengths, layout.cp)))
        if "logprob" in plan.checks:
            _logprob("packed", engine, plan, truth, findings)
        if "leak" in plan.checks:
            _leak(engine, plan, findings)
        del engine
    engine = Engine.build(replace(plan.config, max_tokens_per_rank=tight_budget(lengths, layout.cp, layout.dp)))
    for check, run in CHECKS.items():
        if check in plan.checks:
            run(engine, plan, truth, findings)
    return findings


def roomy_budget(lengths: Sequence[int], cp: int) -> int:
    return sum(lengths) + 2 * cp * (len(lengths) + 1)


def tight_budget(lengths: Sequence[int], cp: int, dp: int) -> int:
    """Fits the longest sample; at least two micro-steps when there is work for them."""
    longest = -(-max(lengths) // (2 * cp)) * 2
    half = -(-sum(lengths) // (2 * cp * dp))
    return max(longest, half) + 2


def _start(engine: Engine, plan: Plan, truth: Truth, findings: Findings) -> None:
    """The engine starts from the oracle's weights, bit for bit."""
    weights = engine.state_dict()
    findings.saw(weights)
    findings.add("start", "weights", 0.0, lambda: differences.parameters(weights, truth.start, plan.limits.zero))


def _tight_logprob(engine: Engine, plan: Plan, truth: Truth, findings: Findings) -> None:
    _logprob("cut", engine, plan, truth, findings)


def _logprob(case: str, engine: Engine, plan: Plan, truth: Truth, findings: Findings) -> None:
    outputs = engine.forward(plan.samples, outputs=("logprob", "entropy"))
    for name in ("logprob", "entropy"):
        got = [output[name] for output in outputs]
        findings.saw(got)
        title = case if name == "logprob" else f"{case} {name}"
        largest = partial(_token_distance, name, got, plan, truth)
        findings.add("logprob", title, plan.limits.logprob, largest)
        if plan.limits.chance:
            findings.add(
                "logprob", f"{title}, spread", plan.limits.logprob, partial(_token_spread, name, got, plan, truth)
            )


def _token_distance(name: str, got: Sequence[Tensor], plan: Plan, truth: Truth) -> tuple[float, str]:
    want = truth.logprob if name == "logprob" else truth.entropy
    return differences.tokens(got, want, plan.samples, plan.limits.chance)


def _token_spread(name: str, got: Sequence[Tensor], plan: Plan, truth: Truth) -> tuple[float, str]:
    return differences.token_spread(got, truth.logprob if name == "logprob" else truth.entropy, plan.samples)


def _gradient(engine: Engine, plan: Plan, truth: Truth, findings: Findings) -> None:
    """Every case: gradients of all parameters and all metrics."""
    teacher = _teacher(engine, plan)
    for case in plan.cases:
        engine.clear_gradients()
        objective = case.objective()
        metrics = engine.forward_backward(
            plan.routed if objective.shares_routes else plan.samples,
            objective,
            normalise=case.normalise,
            denominator=case.denominator,
            teacher=teacher if case.uses_teacher else None,
        )
        gradients = engine.gradients()
        findings.saw(metrics, gradients)
        measure = partial(_gradient_distance, case.name, gradients, plan, truth)
        findings.add("gradient", case.name, plan.limits.gradient, measure)
        measure = partial(_metric_distance, case.name, metrics, truth)
        findings.add("metrics", case.name, plan.limits.metric, measure)
        if findings.compares:
            _note_parts(findings, engine, gradients, truth.gradients[case.name], plan.limits.zero)
    engine.clear_gradients()


def _teacher(engine: Engine, plan: Plan) -> Engine | None:
    """The second engine under the first one's layout and budget. Collective."""
    if plan.teacher is None or not any(case.uses_teacher for case in plan.cases):
        return None
    alike = {"layout": engine.config.layout, "max_tokens_per_rank": engine.config.max_tokens_per_rank}
    return Engine.build(replace(plan.teacher, **alike))


def _gradient_distance(case: str, gradients: Mapping[str, Tensor], plan: Plan, truth: Truth) -> tuple[float, str]:
    return differences.parameters(gradients, truth.gradients[case], plan.limits.zero, plan.limits.chance)


def _metric_distance(case: str, metrics: Mapping[str, float], truth: Truth) -> tuple[float, str]:
    return differences.metrics(metrics, truth.metrics[case])


def _note_parts(
    findings: Findings, engine: Engine, got: Mapping[str, Tensor], want: Mapping[str, Tensor], zero: float
) -> None:
    """Worst gradient of the adapter's parts over the cases so far, for the certificate."""
    distances = differences.each_parameter(got, want, zero)
    for part, prefixes in {**engine.adapter.parts(), "value head": ("value_head.",), "mtp head": ("mtp.",)}.items():
        own = [(figure, name) for name, figure in distances.items() if name.startswith(tuple(prefixes))]
        if own and prefixes:
            findings.parts[part] = max(max(own), findings.parts.get(part, (0.0, "")))


def _calls(engine: Engine, plan: Plan, truth: Truth, findings: Findings) -> None:
    """k calls with parts of the batch equal one call with all of it, in any order, a call without weight last."""
    trained = float(sum(sample.num_trained for sample in plan.samples))
    objective = plan.step_case.objective()
    parts = [list(plan.samples[start::3]) for start in range(3)]
    parts = [part for part in parts if part]
    silent = [_silenced(plan.samples[0])]
    one = _accumulated(engine, [list(plan.samples)], objective, trained)
    turned = [parts[-1], *parts[:-1]]
    orders = {"parts": parts, BOTH_ORDERS: [*turned, silent]}
    for case in plan.calls:
        several = _accumulated(engine, orders[case], objective, trained)
        findings.saw(several)
        measure = partial(differences.parameters, several, one, plan.limits.zero, plan.limits.chance)
        findings.add("calls", case, plan.limits.calls, measure)


def _accumulated(
    engine: Engine, calls: list[list[Sample]], objective: Objective, denominator: float
) -> dict[str, Tensor]:
    engine.clear_gradients()
    for samples in calls:
        engine.forward_backward(samples, objective, normalise="token", denominator=denominator)
    gradients = engine.gradients()
    engine.clear_gradients()
    return gradients


def _silenced(sample: Sample) -> Sample:
    return Sample(
        sample.input_ids,
        sample.target_ids,
        torch.zeros(len(sample)),
        fields=sample.fields,
        media=sample.media,
        group=sample.group,
        adapter=sample.adapter,
    )


def _leak(engine: Engine, plan: Plan, findings: Findings) -> None:
    """Change one token of one document: nothing of any other may change by one bit."""
    limit = plan.limits.leak if plan.exact_leak else max(plan.limits.leak, MOE_LEAK)
    for probe in plan.probes:
        before, after = (
            [output["logprob"] for output in engine.forward(samples, outputs=("logprob",))]
            for samples in (probe.before, probe.after)
        )
        findings.saw(before, after)
        measure = partial(differences.bits, before, after, probe.document)
        findings.add("leak", f"{probe.name}: log-probs", limit, measure)
        rows = [_embedding_gradient(engine, samples, probe) for samples in (probe.before, probe.after)]
        findings.saw(rows)
        findings.add("leak", f"{probe.name}: embedding gradients", limit, partial(_row_distance, rows, probe))


def _row_distance(rows: Sequence[Tensor], probe: Probe) -> tuple[float, str]:
    figure, where = differences.bits([row[None] for row in rows[0]], [row[None] for row in rows[1]], skip=-1)
    return figure, where and f"embedding row {probe.outside_rows[int(where.split()[1].rstrip(','))]}"


def _embedding_gradient(engine: Engine, samples: Sequence[Sample], probe: Probe) -> Tensor:
    """Gradient rows of ids that stand only in the other documents. The value loss keeps a tied head out of them."""
    engine.clear_gradients()
    engine.forward_backward(samples, Objective(probe.loss), normalise="sum")
    gradients = engine.gradients()
    engine.clear_gradients()
    return gradients[probe.embedding][probe.outside_rows]


def _weights(engine: Engine, plan: Plan, truth: Truth, findings: Findings) -> None:
    """Optimizer steps: the norm of each and the weights after all. Last, since it moves the weights."""
    engine.clear_gradients()
    norms = []
    for _ in range(plan.steps):
        engine.forward_backward(plan.samples, plan.step_case.objective(), normalise=plan.step_case.normalise)
        norms.append(engine.optim_step(STEP)["grad/norm"])
    findings.saw(norms)
    weights = engine.state_dict()
    findings.saw(weights)
    findings.add(*NORMS, plan.limits.metric, lambda: differences.norms(norms, truth.norms))
    findings.add(
        "weights",
        f"{plan.steps} steps",
        plan.limits.weights,
        lambda: differences.parameters(weights, truth.weights, plan.limits.zero, plan.limits.chance),
    )


CHECKS: dict[str, Callable[[Engine, Plan, Truth, Findings], None]] = {
    "start": _start,
    "logprob": _tight_logprob,
    "gradient": _gradient,
    "calls": _calls,
    "weights": _weights,
}
