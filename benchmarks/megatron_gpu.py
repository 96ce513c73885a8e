"""The megatron backend on one GPU: parity at real widths, and its step beside the fsdp backend's. No TransformerEngine.

    python benchmarks/megatron_gpu.py --only parity    # 2 layers of Qwen3-1.7B's widths and vocabulary, against the fp32 oracle
    python benchmarks/megatron_gpu.py --only step      # Qwen3-1.7B's shape, 64k tokens, bf16 over fp32 masters

parity: both backends, fp32 and bf16, tp1, against plain Hugging Face in fp32 on the same device, one unpacked sample at
a time: largest log-prob difference, worst gradient of a parameter (relative L2), gradient norm, worst weight after one
AdamW step. fp32 must hold 1e-5; in bf16 log-probs and gradients may be 1.2 times as far as the fsdp backend's. Exit status 1 otherwise.
step: one `forward_backward` (PPO with entropy) and one `optim_step` (AdamW), wall clock, the device synchronised on
both sides; eager layers under selective recomputation in both backends; every backend in a process of its own. Peak:
the allocator's, with gradients, before and after the moments exist.
"""

import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import Report, Settings, device, settings
from shapes import batch, config_of

from longspan import AdamW, Engine, EngineConfig, Layout, Objective
from longspan.engine.engine import BACKENDS
from longspan.launch import launch, world
from longspan.layout import Mesh, resolve
from longspan.models.loading import adapt, build_random
from longspan.parity import differences
from longspan.parity.cases import ALL, PPO, STEP_CASE, Case
from longspan.parity.cells import BFLOAT16_FACTOR
from longspan.parity.checks import STEP, Plan, Truth, roomy_budget
from longspan.parity.compare import Request, prepare
from longspan.parity.reference import Reference

__all__ = ["run"]

MODEL = "qwen3-1.7b"
LENGTHS = (300, 37, 1, 362)
CASE = Case("ppo with KL, entropy and value", "ppo", {**PPO, **ALL, "value": 0.5, "value_clip": 0.2}, "sample")
FP32_LIMIT = 1e-5
CHECKED = {"float32": ("logprob", "gradient", "norm", "weights"), "bfloat16": ("logprob", "gradient")}
WAYS = (("float32", "fsdp"), ("float32", "megatron"), ("bfloat16", "fsdp"), ("bfloat16", "megatron"))


def parity(asked: Settings, report: Report) -> bool:
    """One row a backend and dtype; whether all hold."""
    lengths = (13, 1, 22, 7) if asked.smoke else LENGTHS
    with TemporaryDirectory(prefix="longspan-megatron-") as name:
        folder = Path(name)
        over = {} if asked.smoke else {"num_hidden_layers": 2}
        with device():
            build_random(config_of(MODEL, asked.smoke, **over), torch.float32, 0).save_pretrained(folder / "model")
        reference = Reference(str(folder / "model"), dtype=torch.float32, value_head=True, device=device().type)
        request = Request(
            str(folder / "model"),
            {},
            dtype="float32",
            lengths=lengths,
            cases=(CASE,),
            checks=("logprob", "gradient", "weights"),
            steps=1,
        )
        plan, truth = prepare(request, reference)
        torch.save(truth, folder / "truth.pt")
        del reference
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows = launch(_distances, plan, folder / "truth.pt", ranks=1, timeout_s=240)[0]
    found = {(row["dtype"], row["backend"]): row for row in rows}
    held = True
    for (dtype, backend), row in found.items():
        base = found[dtype, "fsdp"]
        limits = {x: FP32_LIMIT if dtype == "float32" else BFLOAT16_FACTOR * base[x] for x in CHECKED[dtype]}
        row["held"] = all(row[name] <= limit for name, limit in limits.items()) or backend == "fsdp"
        held &= row["held"]
        report.add(part="parity", **row)
    return held


def _distances(plan: Plan, path: Path) -> list[dict[str, Any]]:
    """In the rank: how far every backend stands from the oracle."""
    truth: Truth = torch.load(path, weights_only=False)
    rows = []
    for dtype, backend in WAYS:
        config = replace(
            plan.config,
            layout=Layout(),
            dtype=dtype,
            backend=backend,
            max_tokens_per_rank=roomy_budget([len(sample) for sample in plan.samples], 1),
        )
        engine = Engine.build(config)
        outputs = [out["logprob"] for out in engine.forward(plan.samples)]
        case = plan.cases[0]
        engine.forward_backward(plan.samples, case.objective(), normalise=case.normalise)
        zero = plan.limits.zero
        gradient, where = differences.parameters(engine.gradients(), truth.gradients[case.name], zero)
        engine.clear_gradients()
        engine.forward_backward(plan.samples, STEP_CASE.objective(), normalise=STEP_CASE.normalise)
        norm = engine.optim_step(STEP)["grad/norm"]
        rows.append(
            {
                "dtype": dtype,
                "backend": backend,
                "kernel": engine.builder.kernel.name,
                "logprob": differences.tokens(outputs, truth.logprob, plan.samples)[0],
                "gradient": gradient,
                "gradient_where": where,
                "norm": abs(norm / truth.norms[0] - 1.0),
                "weights": differences.parameters(engine.state_dict(), truth.weights, zero)[0],
            }
        )
        del engine
    return rows


def step(asked: Settings, report: Report) -> None:
    """One row a backend and batch."""
    for backend in ("megatron", "fsdp"):
        for row in launch(_step, backend, asked, ranks=1, timeout_s=280)[0]:
            report.add(part="step", **row)


def _build(backend: str, smoke: bool, tokens: int) -> Engine:
    """Engine.build, for a config that is no folder: weights are drawn on the device."""
    here = world()
    with here.device:
        adapter = adapt(build_random(config_of(MODEL, smoke), torch.float32, 0), None)
    heads = {"heads": adapter.num_heads, "kv_heads": adapter.num_kv_heads}
    layout = resolve(Layout(), **heads, recurrent=adapter.recurrent, windowed=adapter.windowed)
    dtype = "bfloat16" if here.device.type == "cuda" else "float32"
    config = EngineConfig(f"{MODEL}-random", layout=layout, backend=backend, dtype=dtype, max_tokens_per_rank=tokens)
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    return Engine(config, adapter, mesh, BACKENDS[backend](config, adapter, mesh))


def _step(backend: str, asked: Settings) -> list[dict[str, Any]]:
    rows = asked.rows
    engine = _build(backend, asked.smoke, max(sum(lengths) + 64 * len(lengths) for lengths in rows.values()))
    objective = Objective("ppo", clip=0.2, entropy=0.001)
    found = []
    for name, lengths in rows.items():
        samples = batch(lengths, engine.adapter.vocab_size)
        call = partial(engine.forward_backward, samples, objective)
        _timed(call)  # kernels compile and the allocator settles
        engine.clear_gradients()
        times = []
        for _ in range(asked.repeats):
            engine.clear_gradients()
            ms, peak = _timed(call)
            times.append(ms)
        known = {"backend": backend, "case": name, "kernel": engine.builder.kernel.name, "ms": times}
        speed = round(sum(lengths) / statistics.median(times) * 1e3)
        found.append(known | {"tok_per_s": speed, "peak_gib": peak})
    engine.optim_step(AdamW(lr=1e-6))
    engine.forward_backward(samples, objective)
    ms, peak = _timed(partial(engine.optim_step, AdamW(lr=1e-6)))
    found.append({"backend": backend, "case": "optim_step", "kernel": "", "ms": [ms], "peak_gib": peak})
    return found


def _timed(call: Any) -> tuple[float, float]:
    """(ms, peak GiB) of one call."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return (time.perf_counter() - start) * 1e3, round(peak, 2)


def run() -> int:
    asked = settings("the megatron backend on one GPU", repeats=1)
    report = Report("megatron_gpu", asked, __doc__ or "")
    held = parity(asked, report) if asked.wants("parity") else True
    if asked.wants("step"):
        step(asked, report)
    report.save(
        bars=lambda row: (row["case"], row["backend"], row["tok_per_s"]) if "tok_per_s" in row else None,
        unit="tokens/s",
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(run())
