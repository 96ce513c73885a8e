"""The megatron backend on one and two GPUs: parity at real widths, and its step beside the fsdp backend's. No TransformerEngine.

    python benchmarks/megatron_gpu.py --only parity            # 2 layers of Qwen3-1.7B's widths and vocabulary, against the fp64 oracle
    python benchmarks/megatron_gpu.py --only step              # Qwen3-1.7B's shape, 64k tokens, bf16 over fp32 masters
    python benchmarks/megatron_gpu.py --only parity/tp2-sp step/pp2     # some layouts: one, tp2-sp, tp2, cp2, pp2; steps: dp2 too

parity: fp32 and bf16 on one GPU (both backends) and, where there are two, megatron at tp2-sp, tp2, cp2 and pp2 (two micro-steps),
against plain Hugging Face in fp64 on one GPU, one unpacked sample at a time. fp32, 1e-5: largest log-prob difference, worst
gradient of a parameter (relative L2), gradient norm, worst weight after one AdamW step. bf16, 1.2 times the fsdp backend's
figure on one GPU: the largest log-prob difference and the worst gradient, taken down by what chance adds to a ratio
(parity/cells.py), and the root mean square of log-probs over tokens. Exit status 1 if a row of either backend misses its limits.
step: one `forward_backward` (PPO with entropy) and one `optim_step` (AdamW), wall clock of the slower rank, the device
synchronised on both sides; eager layers under selective recomputation in both backends. Peak: the allocator's, with
gradients, before and after the moments exist. pp2 runs the 64k row as one micro-step, so its stages wait for each other;
the mix as four. Engines of one number of ranks are built after each other in one process group. Every row goes to
megatron_gpu.jsonl in the output folder as soon as its engine is done, so that a run that is cut off leaves what it found.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from common import Report, Settings, device, settings, wall_ms
from shapes import batch, config_of

from longspan import AdamW, Engine, EngineConfig, Objective
from longspan.engine.engine import BACKENDS
from longspan.engine.planning import heads_per_rank
from longspan.errors import LongspanError
from longspan.launch import launch, world
from longspan.layout import Mesh, parse_layout, resolve
from longspan.models.loading import adapt, build_random
from longspan.parity import differences
from longspan.parity.cases import ALL, PPO, Case
from longspan.parity.cells import BFLOAT16_FACTOR, LIMITS
from longspan.parity.checks import STEP, Plan, Truth, roomy_budget, tight_budget
from longspan.parity.compare import Request, prepare
from longspan.parity.reference import Reference

__all__ = ["run"]

MODEL = "qwen3-1.7b"
LENGTHS = (300, 37, 1, 362)
CASE = Case("ppo with KL, entropy and value", "ppo", {**PPO, **ALL, "value": 0.5, "value_clip": 0.2}, "sample")
FP32 = LIMITS["float32"]
FP32_LIMITS = {"logprob": FP32.logprob, "gradient": FP32.gradient, "norm": FP32.metric, "weights": FP32.weights}
BF16_CHECKS = ("logprob", "logprob_rms", "gradient")
ALLOWED_S = {"parity": 20.0, "step": 45.0}  # of an engine, beside START_S of a launch: what hangs must end soon
START_S = 60.0
ROW, MIX = "64k row", "64k mix"


@dataclass(frozen=True)
class Way:
    """One engine: what --only selects by is its label."""

    part: str  # "parity" or "step"
    layout: str
    backend: str
    dtype: str
    rows: tuple[str, ...] = (ROW, MIX)  # of a step
    cuts: int = 1  # micro-steps of a step

    @property
    def label(self) -> str:
        return f"{self.part}/{'one' if self.ranks == 1 else self.layout}/{self.backend}"

    @property
    def ranks(self) -> int:
        return parse_layout(self.layout).ranks


DTYPES = ("float32", "bfloat16")
BASE = Way("parity", "dp1", "fsdp", "bfloat16")  # what bf16 is held against
PARITY = (
    BASE,
    *(Way("parity", "dp1", backend, dtype) for backend in ("fsdp", "megatron") for dtype in DTYPES),
    *(Way("parity", name, "megatron", dtype) for name in ("tp2-sp", "tp2", "cp2", "pp2") for dtype in DTYPES),
)
STEPS = (
    *(Way("step", "dp1", backend, "bfloat16") for backend in ("megatron", "fsdp")),
    *(Way("step", name, "megatron", "bfloat16") for name in ("tp2-sp", "cp2")),
    Way("step", "cp2", "fsdp", "bfloat16"),
    Way("step", "dp2", "fsdp", "bfloat16", rows=(MIX,)),
    Way("step", "pp2", "megatron", "bfloat16", rows=(MIX,), cuts=4),
    Way("step", "pp2", "megatron", "bfloat16", rows=(ROW,)),
)


def asked_ways(asked: Settings, ways: Sequence[Way]) -> list[Way]:
    """Each once, as far as there are GPUs; the first of PARITY whenever another is asked for."""
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else 2
    found = [way for way in dict.fromkeys(ways) if way.ranks <= ranks and asked.wants(way.label)]
    return [BASE, *(way for way in found if way != BASE)] if found and found[0].part == "parity" else found


def in_launches(
    measure: Callable[..., list[dict[str, Any]]],
    ways: Sequence[Way],
    asked: Settings,
    *arguments: Any,
    add: Callable[..., object],
) -> None:
    """`measure(way, *arguments)` in as many ranks as the ways have, one launch where nothing fails. What fails is named
    and left out, and the others go on in a fresh launch."""
    path = asked.out / "megatron_gpu.jsonl"
    asked.out.mkdir(parents=True, exist_ok=True)
    for ranks in sorted({way.ranks for way in ways}):
        todo = [way for way in ways if way.ranks == ranks]
        while todo:
            path.write_text("", encoding="utf-8")
            allowed = START_S + sum(ALLOWED_S[way.part] for way in todo)
            reason = ""
            try:
                launch(in_ranks, measure, todo, path, *arguments, ranks=ranks, timeout_s=allowed)
            except LongspanError as error:
                print(error, *getattr(error, "__notes__", ()), flush=True)
                reason = " ".join(str(error).split("\n")[-3:])
            done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for way, rows in zip(todo, done, strict=False):
                for row in rows:
                    add(way, **row)
            todo = todo[len(done) :]
            if reason and todo:
                add(todo.pop(0), skipped=reason[:400])
            path.unlink()


def in_ranks(measure: Callable[..., list[dict[str, Any]]], ways: Sequence[Way], path: Path, *arguments: Any) -> None:
    """Body of a rank: every way after the other, its rows written by rank 0 as they come."""
    for way in ways:
        start = time.perf_counter()
        rows = measure(way, *arguments)
        free()
        if world().rank == 0:
            rows = [row | {"took_s": round(time.perf_counter() - start, 1)} for row in rows]
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows) + "\n")
            print(f"{way.label} {way.dtype}: {rows[-1]['took_s']} s", flush=True)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parity(asked: Settings, report: Report) -> bool:
    """One row a way; whether all hold."""
    ways = asked_ways(asked, PARITY)
    if not ways:
        return True
    lengths = (13, 1, 22, 7) if asked.smoke else LENGTHS
    base: dict[str, float] = {}
    verdicts = []

    def add(way: Way, **row: Any) -> None:
        known = {"part": "parity", "layout": way.layout, "backend": way.backend, "dtype": way.dtype}
        if "skipped" in row:
            verdicts.append(False)
            report.add(**known, **row)
            return
        if way == BASE:
            base.update({name: BFLOAT16_FACTOR * row[name] for name in BF16_CHECKS})
        limits = FP32_LIMITS if way.dtype == "float32" else {name: base.get(name) for name in BF16_CHECKS}
        held = all(limit is not None and row[name] <= limit for name, limit in limits.items())
        verdicts.append(held)
        report.add(**known, **row, held=held, limits=limits)

    scratch = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=scratch, prefix="longspan-megatron-") as name:
        plan = write_truth(Path(name), lengths, asked.smoke)
        in_launches(distance, ways, asked, plan, Path(name) / "truth.pt", add=add)
    return all(verdicts)


def write_truth(folder: Path, lengths: Sequence[int], smoke: bool) -> Plan:
    """A random model's folder and what the fp64 oracle says of it, in fp32."""
    over = {} if smoke else {"num_hidden_layers": 2}
    with device():
        build_random(config_of(MODEL, smoke, **over), torch.float32, 0).save_pretrained(folder / "model")
    model = str(folder / "model")
    exact = Reference(model, dtype=torch.float64, value_head=True, device=device().type)
    exact.set_weights(Reference(model, dtype=torch.float32, value_head=True).weights())  # the value head's are drawn
    checks = ("logprob", "gradient", "weights")
    request = Request(model, {}, dtype="float32", lengths=lengths, cases=(CASE,), checks=checks, steps=1)
    plan, truth = prepare(request, exact)
    gradients = {case: narrow(found) for case, found in truth.gradients.items()}
    torch.save(replace(truth, start={}, gradients=gradients, weights=narrow(truth.weights)), folder / "truth.pt")
    del exact, truth
    free()
    return plan


def narrow(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in tensors.items()}


def distance(way: Way, plan: Plan, path: Path) -> list[dict[str, Any]]:
    """In the ranks: how far one engine stands from the oracle. Rank 0 compares, on its device."""
    lengths, layout = [len(sample) for sample in plan.samples], parse_layout(way.layout)
    budget = tight_budget(lengths, layout.cp, layout.dp) if layout.pp > 1 else roomy_budget(lengths, layout.cp)
    config = replace(
        plan.config, layout=layout, dtype=way.dtype, backend=way.backend, max_tokens_per_rank=max(budget, max(lengths))
    )
    engine = Engine.build(config)
    outputs = [out["logprob"] for out in engine.forward(plan.samples)]
    case = plan.cases[0]
    engine.forward_backward(plan.samples, case.objective(), normalise=case.normalise)
    gradients = engine.gradients()
    engine.clear_gradients()
    engine.forward_backward(plan.samples, plan.step_case.objective(), normalise=plan.step_case.normalise)
    norm = engine.optim_step(STEP)["grad/norm"]
    weights = engine.state_dict() if way.dtype == "float32" else {}
    if engine.rank:
        return []
    truth: Truth = torch.load(path, weights_only=False, mmap=True)
    there = world().device

    def worst(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> tuple[float, str]:
        sides = [{name: value.to(there) for name, value in side.items()} for side in (found, wanted)]
        return differences.parameters(*sides, plan.limits.zero, LIMITS[way.dtype].chance)

    row: dict[str, Any] = {"kernel": engine.builder.kernel.name}
    row["logprob"], _ = differences.tokens(outputs, truth.logprob, plan.samples, LIMITS[way.dtype].chance)
    row["logprob_rms"], _ = differences.token_spread(outputs, truth.logprob, plan.samples)
    row["gradient"], row["gradient_where"] = worst(gradients, truth.gradients[case.name])
    row["norm"] = abs(norm / truth.norms[0] - 1.0)
    return [row | ({"weights": worst(weights, truth.weights)[0]} if weights else {})]


def step(asked: Settings, report: Report) -> None:
    """One row a way and batch."""

    def add(way: Way, **row: Any) -> None:
        report.add(part="step", layout=way.layout, backend=way.backend, **row)

    in_launches(time_step, asked_ways(asked, STEPS), asked, asked, add=add)


def build(way: Way, smoke: bool, tokens: int) -> Engine:
    """Engine.build, for a config that is no folder: weights are drawn on the device."""
    here = world()
    with here.device:
        adapter = adapt(build_random(config_of(MODEL, smoke), torch.float32, 0), None)
    wanted = parse_layout(way.layout)
    heads, kv_heads = heads_per_rank(wanted, adapter)
    layout = resolve(
        wanted, heads=heads, kv_heads=kv_heads, recurrent=adapter.recurrent, windowed=adapter.windowed, model=MODEL
    )
    dtype = way.dtype if here.device.type == "cuda" else "float32"
    config = EngineConfig(
        f"{MODEL}-random", layout=layout, backend=way.backend, dtype=dtype, max_tokens_per_rank=tokens
    )
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    return Engine(config, adapter, mesh, BACKENDS[way.backend](config, adapter, mesh))


def time_step(way: Way, asked: Settings) -> list[dict[str, Any]]:
    rows = {name: asked.rows[name] for name in way.rows}
    layout, left = parse_layout(way.layout), torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    shared = layout.dp * layout.cp * way.cuts
    tokens = max(-(-sum(lengths) // shared // 8) * 8 + 64 * len(lengths) for lengths in rows.values())
    engine = build(way, asked.smoke, tokens)
    free()
    objective = Objective("ppo", clip=0.2, entropy=0.001)
    found = []
    for name, lengths in rows.items():
        samples = batch(lengths, engine.adapter.vocab_size)
        call = partial(engine.forward_backward, samples, objective)
        warm = call()  # kernels compile and the allocator settles
        times, peaks = zip(*(timed(call, before=engine.clear_gradients) for _ in range(asked.repeats)), strict=True)
        speed = round(sum(lengths) / statistics.median(times) * 1e3)
        known = {
            "case": name,
            "micro_steps": warm["plan/micro_steps"],
            "kernel": engine.builder.kernel.name,
            "ms": list(times),
            "left_gib": left / 2**30,
        }
        found.append(known | {"tok_per_s": speed, "peak_gib": max(peaks)})
    engine.optim_step(AdamW(lr=1e-6))
    engine.forward_backward(samples, objective)
    ms, peak = timed(partial(engine.optim_step, AdamW(lr=1e-6)))
    return [*found, {"case": "optim_step", "ms": [ms], "peak_gib": peak}]


def timed(call: Callable[[], Any], before: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """(ms, peak GiB) of one call: the slower and the fuller rank's."""
    before()
    mine = wall_ms(call)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return max(ms for ms, _ in every), round(max(peak for _, peak in every), 2)


def save(report: Report) -> None:
    report.save(
        bars=lambda row: (row["case"], f"{row['backend']} {row['layout']}", row["tok_per_s"]) if "tok_per_s" in row else None,
        unit="tokens/s",
    )  # fmt: skip


def run() -> int:
    asked = settings("the megatron backend on one and two GPUs", repeats=1)
    report = Report("megatron_gpu", asked, __doc__ or "")
    held = parity(asked, report)
    save(report)
    step(asked, report)
    save(report)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(run())
