"""What `longspan parity` checks, at real widths on one or two GPUs: fp32 to 1e-5, bf16 against its own unpacked error, two calls against one.

    python benchmarks/parity_gpu.py                       # everything but the 2B model at full depth
    python benchmarks/parity_gpu.py --only qwen3-vl-2b    # that one

Models have random weights, published widths and few layers (qwen3-vl-2b: all 28 and 24). The oracle is plain Hugging Face
in fp32 on the same GPU, one unpacked sample at a time, TF32 off (plain attention and recurrence where fla is installed). Rows:
    float32   every check of `longspan parity` for dp1 (parity/checks.py): limits are DESIGN.md's. One optimizer step: after a
              second one at lr 1e-3 the random model's PPO ratios overflow (norm 3e10), and relative figures mean nothing
    float64   the engine in fp64 against the fp64 oracle (limit 1e-8); and how far fp32 Hugging Face and the fp32 engine each
              are from that oracle: what 1e-5 between the two can mean at these widths
    bfloat16  engine against the fp32 oracle: unpacked (one call a sample), packed, micro-stepped, dynamic, recomputed,
              compiled. Limit: 1.2 times the figure of "unpacked"
    calls     after a real AdamW step, one call with all samples against two calls with a random half each; the worst of 20
              repetitions. fp32 limit 1e-5; in bf16 a micro-step's gradient is bf16 before it is added in fp32
    two GPUs  layouts of two ranks (--only ... also on one): bf16 limit 1.2 times the figure of "packed" on one, fp32 1e-5
Figures: log-prob largest absolute difference of a trained token; gradient relative L2 of the worst parameter.
"""

import gc
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import Report, Settings, device, exact_convolutions, settings
from shapes import config_of
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from longspan import AdamW, Engine, EngineConfig, Layout, Sample
from longspan.engine.optim import local
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.parity import differences, oracle_media
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
TWO_RANKS = ("cp2-ulysses", "cp2-ring", "cp2-gather", "dp2")


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


class WithoutTorchvision:
    """What the oracle asks for the folder's processor."""

    @staticmethod
    def from_pretrained(folder: str, backend: str) -> Qwen2VLImageProcessorPil:
        assert backend == "pil"
        return Qwen2VLImageProcessorPil.from_pretrained(folder)


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
        # AutoImageProcessor asks for torchvision even where the PIL processor is wanted
        oracle_media.AutoImageProcessor = WithoutTorchvision
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
    start = subject.reference.weights()
    plan, truth = prepare(request, subject.reference)
    subject.reference.set_weights(start)  # `prepare` stepped
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


def figures(found: Answers, wanted: Answers, samples: Sequence[Sample]) -> dict[str, tuple[float, str]]:
    """Check -> worst figure and its place."""
    errors = differences.each_parameter(found[1], wanted[1], ZERO)
    worst = max(errors, key=lambda name: errors[name])
    return {"logprob": differences.tokens(found[0], wanted[0], samples), "gradient": (errors[worst], worst)}


def distance_rows(subject: Subject, dtype: str, variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Engine against the oracle, for each variant; the first one's figures are the others' limits in bf16."""
    wanted = oracle_answers(subject.reference, subject.samples)
    base: dict[str, float] = {}
    for variant in variants:
        free()
        engine = subject.engine(dtype, variant)
        found = engine_answers(engine, subject.samples, alone=variant.alone)
        for check, (figure, where) in figures(found, wanted, subject.samples).items():
            fixed = getattr(LIMITS["float32"], check)
            limit = fixed if dtype == "float32" else BFLOAT16_FACTOR * base.setdefault(check, figure)
            row = {"check": check, "case": variant.name, "figure": figure, "limit": limit, "where": where}
            yield row | {"kernel": engine.builder.kernel.name}
        del engine, found
    subject.reference.clear()


def float64_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """fp64 engine against fp64 oracle; fp32 Hugging Face and fp32 engine against fp64."""
    exact = Reference(subject.folder, dtype=torch.float64, value_head=True, device=str(device()))
    wanted = oracle_answers(exact, subject.samples)
    packed = Variant("packed")
    pairs: dict[str, Answers] = {"engine": engine_answers(subject.engine("float64", packed), subject.samples)}
    for check, (figure, where) in figures(pairs["engine"], wanted, subject.samples).items():
        limit = getattr(LIMITS["float64"], check)
        yield {"check": check, "case": "engine fp64", "figure": figure, "limit": limit, "where": where}
    exact.set_weights(subject.reference.weights())  # the value head's, drawn in fp32
    wanted = oracle_answers(exact, subject.samples)
    free()
    pairs = {"Hugging Face fp32": oracle_answers(subject.reference, subject.samples)}
    pairs["engine fp32"] = engine_answers(subject.engine("float32", packed), subject.samples)
    for case, found in pairs.items():
        for check, (figure, where) in figures(found, wanted, subject.samples).items():
            yield {"check": check, "case": f"{case} from fp64", "figure": figure, "limit": None, "where": where}
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
            errors = differences.each_parameter(two, run_calls(engine, [subject.samples]), ZERO)
            worst = max(errors, key=lambda name: errors[name])
            found.append((errors[worst], worst))
        figure, where = max(found)
        limit = 1e-5 if dtype == "float32" else None
        every = [error for error, _ in found]
        yield {"check": "calls", "case": dtype, "figure": figure, "limit": limit, "where": where, "every": every}
        del engine


def save_truth(subject: Subject, path: Path) -> None:
    """What ranks in other processes compare with."""
    logprobs, wanted = oracle_answers(subject.reference, subject.samples)
    on_cpu = {name: gradient.cpu() for name, gradient in wanted.items()}
    torch.save((subject.samples, logprobs, on_cpu), path)


def in_ranks(folder: str, path: Path, smoke: bool) -> list[dict[str, Any]]:
    """Body of a rank: every layout of two ranks in both dtypes; rank 0 compares."""
    exact_convolutions()
    samples, logprobs, on_cpu = torch.load(path, weights_only=False)
    compares = world().rank == 0
    wanted = {name: gradient.to(world().device) for name, gradient in on_cpu.items()} if compares else {}
    del on_cpu
    budget = roomy_budget([len(sample) for sample in samples], 2)
    rows: list[dict[str, Any]] = []
    for name in TWO_RANKS:
        for dtype in ("float32", "bfloat16"):
            free()
            config = EngineConfig(
                model=folder, layout=parse_layout(name), dtype=dtype, max_tokens_per_rank=budget, value_head=True
            )
            engine = Engine.build(config)
            found = [out["logprob"] for out in engine.forward(samples)]
            engine.forward_backward(samples, CASE.objective(), normalise=CASE.normalise)
            got = engine.gradients()
            if compares:
                got = {key: gradient.to(world().device) for key, gradient in got.items()}
                for check, (figure, where) in figures((found, got), (logprobs, wanted), samples).items():
                    row = {"dtype": dtype, "check": check, "case": name, "figure": figure, "where": where}
                    rows.append(row | {"kernel": engine.builder.kernel.name})
            del engine, got
    return rows


def two_rank_rows(folder: str, path: Path, smoke: bool, base: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    for row in launch(in_ranks, folder, path, smoke, ranks=2, timeout_s=200)[0]:
        dtype = row.pop("dtype")
        limit = BFLOAT16_FACTOR * base[row["check"]] if dtype == "bfloat16" else 1e-5
        yield {"part": f"two ranks, {dtype}", **row, "limit": limit}


def rows_of(subject: Subject) -> Iterator[dict[str, Any]]:
    """Every part that suits the model."""
    deep, gpu = subject.name in DEEP, torch.cuda.is_available()
    variants = [v for v in VARIANTS if not v.compile or (gpu and subject.name == "qwen3")]
    if deep:
        variants = [v for v in variants if v.name in ("unpacked", "packed", "micro-steps")]
        parts = [("float32", distance_rows(subject, "float32", variants[1:2]))]
    else:
        parts = [("float32", float32_rows(subject))]
    parts.append(("bfloat16", distance_rows(subject, "bfloat16", variants)))
    if not deep:
        parts.append(("float64", float64_rows(subject)))
    if subject.name == "qwen3":
        parts.append(("calls", calls_rows(subject)))
    for part, rows in parts:
        for row in rows:
            yield {"part": part, **row}


def run() -> None:
    asked: Settings = settings("parity on one GPU")
    exact_convolutions()
    report = Report("parity_gpu", asked, __doc__ or "")
    wanted = [name for name in MODELS if (name in asked.only if asked.only else name not in DEEP)]
    two = torch.cuda.device_count() > 1 or not torch.cuda.is_available()
    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name in wanted:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            subject = make_subject(name, folder, asked.smoke)
            base: dict[str, float] = {}
            try:
                for row in rows_of(subject):
                    held = None if row["limit"] is None else row["figure"] <= row["limit"]
                    report.add(model=name, **row, held=held)
                    if (row["part"], row["case"]) == ("bfloat16", "packed"):
                        base[row["check"]] = row["figure"]
                path = Path(folder) / "truth.pt"
                save_truth(subject, path)
                del subject
                free()
                for row in two_rank_rows(folder, path, asked.smoke, base) if two else ():
                    report.add(model=name, **row, held=row["figure"] <= row["limit"])
            except (RuntimeError, ValueError, ImportError) as error:  # one model's failure leaves the others' rows
                report.skip(f"{type(error).__name__}: {error}", model=name)
        free()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        report.save(bars=bar, unit="figure / limit (held: at most 1)")


def bar(row: Mapping[str, Any]) -> tuple[str, str, float] | None:
    """What the picture shows of a row."""
    if not row["limit"]:
        return None
    return f"{row['model']}, {row['part']}", f"{row['check']}: {row['case']}", row["figure"] / row["limit"]


if __name__ == "__main__":
    run()
