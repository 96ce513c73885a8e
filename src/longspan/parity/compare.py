"""From a request to cells: the oracle once in this process, then one launch of ranks for each number of ranks.

bf16 has no fixed tolerance: its oracle is fp32, the unsharded engine in bf16 runs first, and every layout may stand
1.2 times as far from the oracle as that. A planted fault (faults.py) is applied in every rank around the whole check.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from longspan.data import Sample, check_samples
from longspan.engine import EngineConfig
from longspan.errors import LongspanError, RankError, RankLost, UserError
from longspan.launch import launch, world
from longspan.layout import Layout
from longspan.parity.cases import SMOOTH_STEP_CASE, STEP_CASE, Case, default_cases
from longspan.parity.cells import BFLOAT16_FACTOR, LIMITS, Cell
from longspan.parity.checks import ALL_CHECKS, NORMS, STEP, Findings, Plan, Truth, check_layout
from longspan.parity.faults import FAULTS, planted
from longspan.parity.probe import Probe, make_probes
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields, special_ids, text_ids, with_routes

ORACLE_DTYPE = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.float32}
UNSHARDED = "dp1"


@dataclass(frozen=True, slots=True)
class Request:
    """What to compare. samples: None for the default ones; their missing fields are filled in."""

    model: str
    layouts: Mapping[str, Layout]
    dtype: str = "float64"
    backend: str = "fsdp"
    seed: int = 0
    samples: Sequence[Sample] | None = None
    teacher: str | None = (
        None  # a second model of the same vocabulary; None: for a tiny model the same with another seed
    )
    lengths: Sequence[int] | None = None
    cases: Sequence[Case] | None = None
    checks: Sequence[str] = ALL_CHECKS
    steps: int = 3
    recompute: str = "selective"
    dynamic_cp: bool = False
    plant: str | None = None
    timeout_s: float = 600.0
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found: all cells in the order asked, the worst gradient of each part of the model, and which model."""

    cells: list[Cell]
    parts: Mapping[str, Mapping[str, tuple[float, str]]]  # layout -> part -> (figure, parameter)
    model_hash: str
    config: EngineConfig
    # layouts whose ranks died or were too slow, and what was said
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.cells) and not self.lost and all(cell.passed for cell in self.cells)


def compare(request: Request) -> Comparison:
    """Run the oracle here and every layout in its ranks."""
    reference = Reference(request.model, dtype=ORACLE_DTYPE[request.dtype], seed=request.seed, value_head=True)
    plan, truth = prepare(request, reference)
    with TemporaryDirectory(prefix="longspan-parity-") as folder:
        path = Path(folder) / "truth.pt"
        torch.save(truth, path)
        baseline: list[Cell] = []
        if request.dtype == "bfloat16":
            baseline, _ = _run(request, plan, path, {UNSHARDED: Layout()})
        cells, parts, lost = [], {}, {}
        for ranks in sorted({layout.ranks for layout in request.layouts.values()}):
            group = {name: layout for name, layout in request.layouts.items() if layout.ranks == ranks}
            try:
                found, worst_of = _run(request, plan, path, group)
            except RankLost as error:
                lost |= dict.fromkeys(group, str(error))
                continue
            cells += found
            parts |= worst_of
    order = list(request.layouts)
    cells.sort(key=lambda cell: order.index(cell.layout))
    if baseline:
        cells = [_against(cell, baseline) for cell in cells]
    return Comparison(cells, parts, model_hash(truth.start), plan.config, lost)


def model_hash(weights: Mapping[str, Tensor]) -> str:
    """blake2b of all weights in the order of their names."""
    digest = hashlib.blake2b(digest_size=20)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prepare(request: Request, reference: Reference) -> tuple[Plan, Truth]:
    """The samples with all fields, the cases, and the oracle's answers to them."""
    samples = request.samples
    if samples is None:
        samples = default_samples(reference, request.lengths)
    check_samples(samples, vocab_size=reference.model.config.get_text_config().vocab_size)
    samples = fill_fields(samples, reference)
    value_head, moe = reference.value_head is not None, is_moe(reference)
    mtp = reference.mtp is not None and reference.mtp.steps > 0
    config = EngineConfig(
        model=request.model,
        backend=request.backend,
        dtype=request.dtype,
        seed=request.seed,
        value_head=value_head,
        recompute=request.recompute,
        dynamic_cp=request.dynamic_cp,
        mtp_steps=reference.mtp.steps if mtp else 0,
    )
    teacher, cases = teacher_config(request, config), request.cases
    if cases is None:
        cases = default_cases(value_head=value_head, moe=moe, mtp=mtp, teacher=teacher is not None)
    plan = Plan(
        config=config,
        samples=samples,
        cases=cases,
        limits=LIMITS[request.dtype],
        checks=request.checks,
        steps=request.steps,
        step_case=SMOOTH_STEP_CASE if request.dtype == "bfloat16" else STEP_CASE,
        probes=probes_of(reference, samples) if "leak" in request.checks else (),
        exact_leak=not moe,
        teacher=teacher,
        routed=[with_routes(each, reference) for each in samples] if any(case.over_batch for case in cases) else (),
    )
    return plan, answers(reference, plan)


def teacher_config(request: Request, config: EngineConfig) -> EngineConfig | None:
    """The second engine of full distillation: the model asked for; a tiny model has as many sets of weights as seeds."""
    if request.teacher is not None and request.backend != "fsdp":
        raise UserError(f"teacher {request.teacher!r} needs backend 'fsdp', got {request.backend!r}. Leave it out.")
    if request.backend != "fsdp" or (request.teacher is None and not request.model.startswith("tiny:")):
        return None
    model = request.model if request.teacher is None else request.teacher
    return replace(config, model=model, seed=request.seed + 1, value_head=False, mtp_steps=0)


def load_teacher(config: EngineConfig, student: Reference) -> Reference:
    """The oracle's second model. Raises UserError where its vocabulary is not the first one's."""
    teacher = Reference(config.model, dtype=student.dtype, seed=config.seed, mtp_steps=0, device=str(student.device))
    sizes = [each.model.config.get_text_config().vocab_size for each in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the teacher {config.model} has a vocabulary of {sizes[1]} ids, the model {sizes[0]}: they must be one."
        )
    return teacher


def answers(reference: Reference, plan: Plan) -> Truth:
    """Everything the oracle has to say about a plan."""
    start = reference.weights()
    with torch.no_grad():
        outputs = [reference.outputs(sample) for sample in plan.samples]
    metrics, gradients = {}, {}
    teacher = None
    if plan.teacher is not None and any(case.uses_teacher for case in plan.cases):
        teacher = load_teacher(plan.teacher, reference)
    for case in plan.cases:
        reference.clear()
        result = reference.run(plan.samples, case, teacher)
        metrics[case.name], gradients[case.name] = result.metrics, result.gradients
    reference.clear()
    norms = []
    for _ in range(plan.steps if "weights" in plan.checks else 0):
        reference.run(plan.samples, plan.step_case)
        norms.append(
            reference.adamw(
                lr=STEP.lr, betas=STEP.betas, eps=STEP.eps, weight_decay=STEP.weight_decay, clip_norm=STEP.clip_norm
            )
        )
    return Truth(
        start=start,
        logprob=[out.logprob for out in outputs],
        entropy=[out.entropy for out in outputs],
        metrics=metrics,
        gradients=gradients,
        norms=norms,
        weights=reference.weights(),
    )


def probes_of(reference: Reference, samples: Sequence[Sample]) -> list[Probe]:
    """Leak probes for this model: the value loss where there is a value head, else cross-entropy on an untied head."""
    return make_probes(
        samples,
        text_ids=text_ids(reference),
        special=special_ids(reference),
        embedding=name_of(reference, reference.model.get_input_embeddings().weight),
        loss="value" if reference.value_head is not None else "cross_entropy",
    )


def name_of(reference: Reference, wanted: torch.nn.Parameter) -> str:
    return next(name for name, parameter in reference.named_parameters() if parameter is wanted)


def is_moe(reference: Reference) -> bool:
    return any("expert" in name for name, _ in reference.named_parameters())


Parts = dict[str, tuple[float, str]]  # part of the model -> worst gradient and its parameter


def _run(
    request: Request, plan: Plan, truth: Path, layouts: Mapping[str, Layout]
) -> tuple[list[Cell], dict[str, Parts]]:
    """One launch for layouts of one size. Ranks that fail are a miss of their layouts. Ranks that died or ran out of time show
    nothing, of a layout or of a planted fault: RankLost, unless the fault is one that hangs."""
    ranks = next(iter(layouts.values())).ranks
    try:
        results = launch(
            _in_rank,
            plan,
            truth,
            layouts,
            request.plant,
            ranks=ranks,
            timeout_s=request.timeout_s,
            device=request.device,
        )
    except (RankError, UserError) as error:
        unknown = isinstance(error, RankLost) and (request.plant is None or not FAULTS[request.plant].hangs)
        if unknown or (isinstance(error, UserError) and request.plant is None):
            raise
        return [Cell(name, "run", "", float("inf"), 0.0, brief(error)) for name in layouts], {}
    cells = []
    for name in layouts:
        cells += results[0][name].cells
        cells.append(rank_cell(name, [result[name].digest for result in results]))
    return cells, {name: results[0][name].parts for name in layouts}


def brief(error: LongspanError) -> str:
    """First and last line of a failure: which rank, and what it said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def rank_cell(layout: str, digests: Sequence[str]) -> Cell:
    """How many ranks were told other numbers than rank 0, by their digests."""
    odd = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    where = f"ranks {', '.join(odd)} differ from rank 0" if odd else ""
    return Cell(layout, "ranks", "all numbers", float(len(odd)), 0.0, where)


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank found of one layout."""

    cells: list[Cell]
    digest: str
    parts: Parts


def _in_rank(plan: Plan, path: Path, layouts: Mapping[str, Layout], plant: str | None) -> dict[str, Told]:
    """Body of one rank: every layout in turn."""
    compares = world().rank == 0
    truth = torch.load(path, weights_only=False) if compares else Truth.empty()
    out = {}
    with planted(plant):
        for name, layout in layouts.items():
            own = replace(plan, config=replace(plan.config, layout=layout))
            findings: Findings = check_layout(name, own, truth, compares=compares)
            out[name] = Told(findings.cells, findings.digest.hexdigest(), findings.parts)
    return out


def _against(cell: Cell, baseline: Sequence[Cell]) -> Cell:
    """The same cell, held to 1.2 times what the unsharded engine in the same dtype has; exact limits stay (cells.py)."""
    if cell.check not in ("logprob", "gradient", "metrics", "weights", "calls"):
        return cell
    base = next(other for other in baseline if (other.check, other.case) == (cell.check, cell.case)).figure
    gradient = max((other.figure for other in baseline if other.check == "gradient"), default=base)
    if cell.check == "calls":
        base = 2.0 * gradient
    elif (cell.check, cell.case) == NORMS:
        base = gradient
    return replace(cell, limit=BFLOAT16_FACTOR * base)
