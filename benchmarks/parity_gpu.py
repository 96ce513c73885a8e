"""What `longspan parity` checks, at real widths on one or two GPUs: fp32 to 1e-5, bf16 against its own unpacked error, two calls against one.

    python benchmarks/parity_gpu.py                               # everything but the 2B model at full depth
    python benchmarks/parity_gpu.py --only qwen3-vl-2b            # that one
    python benchmarks/parity_gpu.py --only qwen3/float64 qwen3/ranks

Models have random weights, published widths and few layers (qwen3-vl-2b: all 28 and 24). The oracle is plain Hugging Face
on the same GPU, one unpacked sample at a time, TF32 off (plain attention and recurrence where fla is installed). Parts:
    float32   every check of `longspan parity` for dp1 (parity/checks.py) against the fp64 oracle: limits are DESIGN.md's. One
              optimizer step: after a second one at lr 1e-3 the random model's PPO ratios overflow (norm 3e10), and
              relative figures mean nothing
    float64   the engine in fp64 against the fp64 oracle: with norms in fp64 on both sides (limit 1e-8), and as Hugging Face
              has them, in fp32, where the last bit of a matmul can flip one; and how far fp32 Hugging Face is from fp64
    bfloat16  engine against the fp32 oracle: unpacked (one call a sample), packed, micro-stepped, dynamic, recomputed,
              compiled. Limit: 1.2 times the figure of "unpacked"
    calls     after a real AdamW step, one call with all samples against two calls with a random half each; the worst of 20
              repetitions. fp32 limit 1e-5; bf16 has twice the limit of its gradients
    ranks     layouts of two ranks, which share the GPU where there is one (launch(device="shared")): bf16 limit 1.2 times the figure
              of "packed" on one rank (so "bfloat16" runs too), fp32 1e-5 to fp64
Figures. fp32, fp64: the largest absolute difference of a trained token's log-prob, the relative L2 of the worst parameter's
gradient. bf16 is held to ratios: both figures are taken down by what chance adds to a ratio, and the root mean square over tokens stands
beside them (parity/cells.py).
"""

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import Report, Settings, device, exact_convolutions, settings
from shapes import config_of
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from longspan import AdamW, Engine, EngineConfig, Layout, Sample
from longspan.engine.optim import local
from longspan.errors import LongspanError
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.parity import differences
from longspan.parity.cases import ALL, PPO, Case
from longspan.parity.cells import BFLOAT16_FACTOR, LIMITS
from longspan.parity.checks import check_layout, roomy_budget, tight_budget
from longspan.parity.compare import Request, prepare
from longspan.parity.oracle_attention import use_plain_layers
from longspan.parity.reference import Reference, auto_class
from longspan.parity.samples import default_samples, fill_fields

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3-1.7b", {"num_hidden_layers": 4}),
    "qwen3-vl": (
        "qwen3-vl-2b",
        {"num_hidden_layers": 4, "vision": {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}},
    ),
    "qwen3.5": ("qwen3.5-0.8b", {"num_hidden_layers": 4}),
    "qwen3-vl-2b": ("qwen3-vl-2b", {}),
}
DEEP = ("qwen3-vl-2b",)  # 2.1e9 parameters: gradients are compared on the GPU, and only in bf16 and fp32 packed
LENGTHS = (300, 1, 512, 37, 129, 3)
SMOKE_LENGTHS = (13, 1, 40, 7, 29, 3)
TOGETHER = {**PPO, **ALL, "value": 0.5, "value_clip": 0.2}
CASE = Case("together", "ppo", TOGETHER, "sum")  # no denominator: calls of one sample each add up to the same
ZERO = LIMITS["float32"].zero
REPETITIONS = 20
TWO_RANKS = (  # (layout, budget: see Variant)
    ("cp2-ulysses", "roomy"),
    ("cp2-ring", "roomy"),
    ("cp2-gather", "roomy"),
    ("dp2", "roomy"),
    ("cp2-ulysses", "tight"),
)


@dataclass(frozen=True)
class Variant:
    """One way to run the same batch."""

    name: str
    budget: str = "roomy"  # "roomy": one row; "tight": at least two micro-steps
    alone: bool = False  # one call a sample
    recompute: str = "selective"
    compile: bool = False
    dynamic: bool = False


VARIANTS = (
    Variant("unpacked", alone=True),
    Variant("packed"),
    Variant("micro-steps", budget="tight"),
    Variant("dynamic", budget="tight", dynamic=True),
    Variant("packed, full", recompute="full"),
    Variant("packed, none", recompute="none"),
    Variant("packed, compiled, selective", compile=True),
    Variant("packed, compiled, none", compile=True, recompute="none"),
)


@dataclass
class Subject:
    """One model: its folder, the oracle and what the oracle said."""

    name: str
    folder: str
    reference: Reference
    samples: list[Sample]
    smoke: bool

    def engine(self, dtype: str, variant: Variant) -> Engine:
        lengths = [len(sample) for sample in self.samples]
        budget = roomy_budget(lengths, 1) if variant.budget == "roomy" else tight_budget(lengths, 1, 1)
        config = EngineConfig(
            model=self.folder,
            layout=Layout(),
            dtype=dtype,
            max_tokens_per_rank=budget,
            value_head=True,
            recompute=variant.recompute,
            compile=variant.compile,
            dynamic_cp=variant.dynamic,
        )
        return Engine.build(config)


def make_subject(name: str, folder: str, smoke: bool) -> Subject:
    """Write a random model as a Hugging Face folder and load the oracle from it."""
    shape, over = MODELS[name]
    config = config_of(shape, smoke, **({} if smoke else over))
    with torch.random.fork_rng(), device():
        torch.manual_seed(0)
        model = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.to(torch.float32).save_pretrained(folder)
    if "vision_config" in config.sub_configs:
        vision = config.vision_config
        area = (vision.patch_size * vision.spatial_merge_size) ** 2
        Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            size={"shortest_edge": area, "longest_edge": 16384 * area},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ).save_pretrained(folder)
    del model
    reference = Reference(folder, dtype=torch.float32, value_head=True, device=str(device()))
    if find_spec("fla") is not None:  # transformers would take its kernels: then DeltaNet is the plain recurrence
        use_plain_layers(reference.model)
    samples = fill_fields(default_samples(reference, SMOKE_LENGTHS if smoke else LENGTHS), reference)
    return Subject(name, folder, reference, samples, smoke)


def gradients(engine: Engine) -> dict[str, Tensor]:
    """The accumulated gradients where they are: one rank holds all of each."""
    found = {}
    for name, parameter in engine.backend.named_parameters():
        found[name] = local(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return found


def run_calls(engine: Engine, calls: Sequence[Sequence[Sample]]) -> dict[str, Tensor]:
    engine.clear_gradients()
    for samples in calls:
        engine.forward_backward(list(samples), CASE.objective(), normalise=CASE.normalise)
    return gradients(engine)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def exact_reference(subject: Subject) -> Reference:
    """The oracle in fp64, with the very weights of the fp32 one (the value head's are drawn)."""
    exact = Reference(subject.folder, dtype=torch.float64, value_head=True, device=str(device()))
    exact.set_weights(subject.reference.weights())
    return exact


def float32_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """parity's own checks."""
    request = Request(
        model=subject.folder,
        layouts={},
        dtype="float32",
        samples=subject.samples,
        cases=(Case("cross_entropy", "cross_entropy"), Case("together", "ppo", TOGETHER, "sample")),
        steps=1,
    )
    plan, truth = prepare(request, exact_reference(subject))
    free()
    for cell in check_layout("dp1", replace(plan, config=replace(plan.config, layout=Layout())), truth).cells:
        yield {"check": cell.check, "case": cell.case, "figure": cell.figure, "limit": cell.limit, "where": cell.where}


Answers = tuple[list[Tensor], dict[str, Tensor]]  # log-probs of each sample, gradient of each parameter


def oracle_answers(reference: Reference, samples: Sequence[Sample]) -> Answers:
    """Of CASE; gradients stay where they are."""
    with torch.no_grad():
        logprobs = [reference.outputs(sample).logprob for sample in samples]
    reference.clear()
    reference.run(samples, CASE)
    found = {}
    for name, parameter in reference.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return logprobs, {name: gradient.to(device()) for name, gradient in found.items()}


def engine_answers(engine: Engine, samples: Sequence[Sample], *, alone: bool = False) -> Answers:
    calls = [[sample] for sample in samples] if alone else [samples]
    logprobs = [out["logprob"] for call in calls for out in engine.forward(call)]
    return logprobs, run_calls(engine, calls)


def figures(found: Answers, wanted: Answers, samples: Sequence[Sample], dtype: str) -> dict[str, tuple[float, str]]:
    """Check -> worst figure and its place; see the file's head."""
    chance = LIMITS[dtype].chance
    told = {
        "logprob": differences.tokens(found[0], wanted[0], samples, chance),
        "gradient": differences.parameters(found[1], wanted[1], ZERO, chance),
    }
    return told | ({"logprob, spread": differences.token_spread(found[0], wanted[0], samples)} if chance else {})


def distance_rows(
    subject: Subject, dtype: str, oracle: Reference, variants: Sequence[Variant]
) -> Iterator[dict[str, Any]]:
    """Engine against the oracle, for each variant; the first one's figures are the others' limits in bf16."""
    wanted = oracle_answers(oracle, subject.samples)
    base: dict[str, float] = {}
    for variant in variants:
        free()
        engine = subject.engine(dtype, variant)
        found = engine_answers(engine, subject.samples, alone=variant.alone)
        for check, (figure, where) in figures(found, wanted, subject.samples, dtype).items():
            limit = limit_of(check, dtype, base.setdefault(check, figure))
            row = {"check": check, "case": variant.name, "figure": figure, "limit": limit, "where": where}
            yield row | {"kernel": engine.builder.kernel.name}
        del engine, found
    oracle.clear()


def limit_of(check: str, dtype: str, base: float) -> float:
    """base: the figure on one GPU."""
    if dtype == "bfloat16":
        return BFLOAT16_FACTOR * base
    return getattr(LIMITS[dtype], check)


@contextmanager
def wide_norms() -> Iterator[None]:
    """Hugging Face's RMS norms in the dtype of their input: both sides' modules are of these classes."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))

    before = {norm: norm.forward for norm in (Qwen3RMSNorm, Qwen3VLTextRMSNorm)}
    try:
        for norm in before:
            norm.forward = forward
        yield
    finally:
        for norm, own in before.items():
            norm.forward = own


def float64_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """fp64 engine against fp64 oracle; fp32 Hugging Face against fp64."""
    exact = Reference(subject.folder, dtype=torch.float64, value_head=True, device=str(device()))
    ways = [("engine fp64", nullcontext(), None)]
    if subject.name != "qwen3.5":  # its norms are another class
        ways.insert(0, ("engine fp64, norms in fp64 on both sides", wide_norms(), LIMITS["float64"]))
    for case, norms, limits in ways:
        with norms:
            wanted = oracle_answers(exact, subject.samples)
            found = engine_answers(subject.engine("float64", Variant("packed")), subject.samples)
        for check, (figure, where) in figures(found, wanted, subject.samples, "float64").items():
            limit = getattr(limits, check) if limits else None
            yield {"check": check, "case": case, "figure": figure, "limit": limit, "where": where}
        exact.clear()
        free()
    yield from own_rows(subject)


def own_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """How far Hugging Face in fp32 is from itself in fp64: what any fp32 program can be held to at these widths and depths."""
    wanted = oracle_answers(exact_reference(subject), subject.samples)
    found = oracle_answers(subject.reference, subject.samples)
    for check, (figure, where) in figures(found, wanted, subject.samples, "float32").items():
        yield {"check": check, "case": "Hugging Face fp32 from fp64", "figure": figure, "limit": None, "where": where}
    subject.reference.clear()


def calls_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """One call against two, after real steps."""
    draw = random.Random(0)
    for dtype in ("float32", "bfloat16"):
        free()
        engine = subject.engine(dtype, Variant("packed"))
        found = []
        for _ in range(3 if subject.smoke else REPETITIONS):
            run_calls(engine, [subject.samples])
            engine.optim_step(AdamW(lr=1e-4))
            order = draw.sample(range(len(subject.samples)), len(subject.samples))
            halves = [[subject.samples[i] for i in half] for half in (order[::2], order[1::2])]
            two = {name: gradient.clone() for name, gradient in run_calls(engine, halves).items()}
            found.append(differences.parameters(two, run_calls(engine, [subject.samples]), ZERO, LIMITS[dtype].chance))
        figure, where = max(found)
        limit = 1e-5 if dtype == "float32" else None
        every = [error for error, _ in found]
        yield {"check": "calls", "case": dtype, "figure": figure, "limit": limit, "where": where, "every": every}
        del engine


def save_truth(subject: Subject, path: Path) -> None:
    """What ranks in other processes compare with: the fp32 oracle for bf16, the fp64 one for fp32."""
    truths = {}
    for dtype, oracle in (("bfloat16", subject.reference), ("float32", exact_reference(subject))):
        logprobs, wanted = oracle_answers(oracle, subject.samples)
        truths[dtype] = [x.float().cpu() for x in logprobs], {name: x.float().cpu() for name, x in wanted.items()}
        oracle.clear()
    torch.save((subject.samples, truths), path)


def in_ranks(folder: str, path: Path) -> list[dict[str, Any]]:
    """Body of a rank: every layout of two ranks in both dtypes; rank 0 compares."""
    exact_convolutions()
    compares = world().rank == 0
    samples, truths = torch.load(path, weights_only=False, mmap=True)
    lengths = [len(sample) for sample in samples]
    rows: list[dict[str, Any]] = []
    for dtype, (logprobs, on_cpu) in truths.items():
        wanted = {name: gradient.to(world().device) for name, gradient in on_cpu.items()} if compares else {}
        for name, width in TWO_RANKS:
            free()
            layout = parse_layout(name)
            tight = width == "tight"
            budget = tight_budget(lengths, layout.cp, layout.dp) if tight else roomy_budget(lengths, 2)
            config = EngineConfig(model=folder, layout=layout, dtype=dtype, max_tokens_per_rank=budget, value_head=True)
            engine = Engine.build(config)
            found = [out["logprob"] for out in engine.forward(samples)]
            engine.forward_backward(samples, CASE.objective(), normalise=CASE.normalise)
            got = gathered(engine)
            if compares:
                for check, (figure, where) in figures((found, got), (logprobs, wanted), samples, dtype).items():
                    row = {"dtype": dtype, "check": check, "case": name + ", micro-steps" * tight, "figure": figure}
                    row["where"] = where
                    rows.append(row | {"kernel": engine.builder.kernel.name})
            del engine, got
    return rows


def gathered(engine: Engine) -> dict[str, Tensor]:
    """The accumulated gradients, whole, on every rank's device. Collective."""
    return {name: gradient.to(world().device) for name, gradient in engine.gradients().items()}


def two_rank_rows(folder: str, path: Path, base: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    shared = torch.cuda.device_count() == 1
    where = "two ranks of one GPU" if shared else "two ranks"
    device = "shared" if shared else "auto"
    for row in launch(in_ranks, folder, path, ranks=2, timeout_s=400, device=device)[0]:
        dtype = row.pop("dtype")
        yield {"part": f"{where}, {dtype}", **row, "limit": limit_of(row["check"], dtype, base[row["check"]])}


def rows_of(subject: Subject, wants: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
    """Every part of one rank that suits the model and is asked for."""
    deep, gpu = subject.name in DEEP, torch.cuda.is_available()
    variants = [v for v in VARIANTS if not v.compile or (gpu and subject.name == "qwen3")]
    if deep:
        variants = [v for v in variants if v.name in ("unpacked", "packed", "micro-steps")]
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "bfloat16": lambda: distance_rows(
            subject, "bfloat16", subject.reference, variants if wants("bfloat16") else variants[:2]
        ),
        "float32": lambda: (
            distance_rows(subject, "float32", exact_reference(subject), variants[1:2])
            if deep
            else float32_rows(subject)
        ),
    }
    if deep:
        packed = variants[1:2]
        parts["float32"] = lambda: distance_rows(subject, "float32", exact_reference(subject), packed)
        parts["own"] = lambda: own_rows(subject)
    else:
        parts["float64"] = lambda: float64_rows(subject)
    if subject.name == "qwen3":
        parts["calls"] = lambda: calls_rows(subject)
    for part, rows in parts.items():
        for row in rows() if wants(part) or (part == "bfloat16" and wants("ranks")) else ():
            yield {"part": part, **row}
        free()


def run() -> None:
    asked: Settings = settings("parity on one or two GPUs")
    exact_convolutions()
    report = Report("parity_gpu", asked, __doc__ or "")
    chosen = {entry.partition("/")[0] for entry in asked.only} or set(MODELS) - set(DEEP)
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name in [name for name in MODELS if name in chosen]:
        start = time.perf_counter()

        def wants(part: str, name: str = name) -> bool:
            return not asked.only or name in asked.only or f"{name}/{part}" in asked.only

        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            try:
                measure(report, make_subject(name, folder, asked.smoke), wants)
            except (LongspanError, RuntimeError, ValueError, ImportError) as error:  # the other models' rows remain
                print(error, flush=True)
                report.skip(f"{type(error).__name__}: {error}", model=name)
        free()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        report.save(bars=bar, unit="figure / limit (held: at most 1)")


def measure(report: Report, subject: Subject, wants: Callable[[str], bool]) -> None:
    """All rows of one model."""
    base: dict[str, float] = {}
    name, folder, path = subject.name, subject.folder, Path(subject.folder) / "truth.pt"
    start = time.perf_counter()
    for row in rows_of(subject, wants):
        held = None if row["limit"] is None else row["figure"] <= row["limit"]
        report.add(model=name, **row, held=held, at_s=round(time.perf_counter() - start, 1))
        if (row["part"], row["case"]) == ("bfloat16", "packed"):
            base[row["check"]] = row["figure"]
    report.save(bars=bar, unit="figure / limit (held: at most 1)")
    if not wants("ranks"):
        return
    save_truth(subject, path)
    subject.reference.model.to("meta")  # its memory belongs to the ranks now
    free()
    for row in two_rank_rows(folder, path, base):
        held = None if row["limit"] is None else row["figure"] <= row["limit"]
        report.add(model=name, **row, held=held, at_s=round(time.perf_counter() - start, 1))


def bar(row: Mapping[str, Any]) -> tuple[str, str, float] | None:
    """What the picture shows of a row."""
    if not row["limit"]:
        return None
    return f"{row['model']}, {row['part']}", f"{row['check']}: {row['case']}", row["figure"] / row["limit"]


if __name__ == "__main__":
    run()
