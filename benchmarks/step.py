"""The whole train step through Engine: random weights, bf16 over fp32 masters, PPO with entropy.

    python benchmarks/step.py --only one          # Qwen3-1.7B's shape on one GPU; "cp": two GPUs; "short": short rows, CP=2 against DP=2;
                                                  # "free": one GPU, layers compiled for any length
    python benchmarks/step.py --only models       # the other shapes of shapes.py, on one GPU
    python benchmarks/step.py --only "one/64k row/compiled/selective"

One `forward_backward` of 64k tokens without gradients from before, no optimizer: forward, recomputation, backward, gradient
reduction, the PPO loss with entropy. Layers are compiled one by one (`compile=True`) or run as they are. Time is wall clock around the call,
the device synchronised on both sides, so host work counts; the slower rank's. tokens/s: real tokens of all ranks.
Rows with images decode them on the host inside the step; `tower_ms` is the vision tower alone, forward + backward
without recomputation.
MFU: 6 * (parameters without the embedding) * T (4 * for frozen weights under LoRA) + 3 * causal attention forward FLOPs
(2 * sum(L^2) * H * D a layer), over 989 TFLOP/s a GPU; recomputation, DeltaNet's scans and the vision tower are not
counted. Peak: allocator's, with gradients; fp32 masters, no Adam moments. No kernel's time depends on random weights.
`device_ms`: one more step under torch's profiler, see timeline.py. "nccl": keys and heads travel by collectives.
Cases that share an engine run in one process, after each other; a case that runs out of memory is skipped.
"""

import copy
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from common import PEAK_TFLOPS, Report, Settings, causal_flops, settings, times_ms, wall_ms
from shapes import batch, config_of, lora_of, picture_batch
from timeline import device_time
from transformers import PretrainedConfig

from longspan import Engine, EngineConfig, Layout, Objective, Sample
from longspan.engine.batch import make_batch
from longspan.engine.config import DTYPES
from longspan.engine.fsdp import compiled
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.engine.steps import Keep
from longspan.errors import LongspanError, OutOfMemory
from longspan.launch import launch, world
from longspan.layout import Mesh, resolve
from longspan.mixers import Collective, make_mixer
from longspan.models.attention_bridge import use_vision_bridge
from longspan.models.loading import adapt, build_random
from longspan.models.qwen3_vl import run_tower

__all__ = ["Case", "batch", "build", "shape"]

SHORT = (*[1024, 2048, 1536, 1280, 1792] * 8, 2048, 2048)  # 65,536 tokens in rows of 1k to 2k
OTHERS = (  # (shape, recompute): what fits 64k tokens on one H200
    ("qwen3-vl-2b", "selective"),
    ("qwen3-8b", "full"),
    ("qwen3.5-0.8b", "selective"),
)


@dataclass(frozen=True)
class Case:
    """One engine and one batch."""

    part: str
    name: str
    lengths: tuple[int, ...]
    layout: Layout
    compile: bool = True
    recompute: str = "selective"
    model: str = "qwen3-1.7b"
    offload: tuple[str, ...] = ()
    collective: bool = False  # travels between ranks by NCCL where symmetric memory would do
    before: tuple[int, ...] = ()  # lengths of a call before the first: layers are then compiled for any length

    @property
    def label(self) -> str:
        """What --only selects by."""
        model = "" if self.model == "qwen3-1.7b" else f"{self.model}/"
        return f"{self.part}/{model}{self.name}/{'compiled' if self.compile else 'eager'}/{self.recompute}"

    @property
    def engine(self) -> tuple[Any, ...]:
        """Cases with the same one run on one engine."""
        return self.model, self.layout, self.compile, self.recompute, self.offload, self.collective


def cases(asked: Settings, gpus: int) -> list[Case]:
    """What this machine can run, cases of one engine next to each other."""
    rows = asked.rows
    ways = ((True, "selective"), (True, "none"), (True, "full"), (False, "selective"))
    found = [
        Case("one", name, lengths, Layout(), compiled, recompute)
        for compiled, recompute in ways
        for name, lengths in rows.items()
    ]
    found += [
        Case("models", name, lengths, Layout(), True, recompute, model)
        for model, recompute in OTHERS
        for name, lengths in rows.items()
    ]
    other = (40,) if asked.smoke else (61440,)
    found += [Case("free", name, lengths, Layout(), recompute="none", before=other) for name, lengths in rows.items()]
    if gpus > 1:
        short = (8, 12, 16, 12) if asked.smoke else SHORT
        found += [
            Case("cp", name, lengths, Layout(cp=2), recompute=recompute)
            for recompute in ("selective", "none")
            for name, lengths in rows.items()
        ]
        found += [Case("short", "rows of 1-2k", short, layout) for layout in (Layout(cp=2), Layout(dp=2))]
        found += [Case("nccl", name, lengths, Layout(cp=2), collective=True) for name, lengths in rows.items()]
    return [case for case in found if asked.wants(case.label)]


def shape(smoke: bool) -> PretrainedConfig:
    """Qwen3-1.7B, or a toy."""
    return config_of("qwen3-1.7b", smoke)


def build(case: Case, smoke: bool, tokens: int) -> Engine:
    """Engine.build, for a config that is no folder: weights are drawn on the device."""
    here = world()
    with here.device:
        adapter = adapt(build_random(config_of(case.model, smoke), torch.float32, 0), None)
    heads = {"heads": adapter.num_heads, "kv_heads": adapter.num_kv_heads}
    layout = resolve(case.layout, **heads, recurrent=adapter.recurrent, windowed=adapter.windowed)
    config = EngineConfig(
        model=f"{case.model}-random",
        layout=layout,
        dtype="bfloat16" if here.device.type == "cuda" else "float32",
        max_tokens_per_rank=tokens,
        recompute=case.recompute,
        compile=case.compile and here.device.type == "cuda",
        lora=lora_of(case.model),
        offload=case.offload,
    )
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    engine = Engine(config, adapter, mesh, FSDPBackend(config, adapter, mesh))
    if case.collective:
        engine.builder.mixer = make_mixer(layout, Collective())
    return engine


def model_flops(engine: Engine, lengths: tuple[int, ...]) -> float:
    """FLOPs of forward and backward without recomputation."""
    known = engine.adapter.model.config.get_text_config()
    body = head = 0.0
    tower = tuple(engine.adapter.parts()["vision"]) + tuple(engine.adapter.parts()["merger"])
    for name, parameter in engine.adapter.model.named_parameters():
        if "embed" not in name and not (tower and name.startswith(tower)):
            body += (6 if parameter.requires_grad else 4) * parameter.numel()
    if known.tie_word_embeddings:
        head = 6 * known.vocab_size * known.hidden_size
    kinds = getattr(known, "layer_types", None) or ["full_attention"] * known.num_hidden_layers
    attention = kinds.count("full_attention") * causal_flops(lengths, known.num_attention_heads, known.head_dim)
    return (body + head) * sum(lengths) + 3 * attention


def measure(group: list[Case], smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """The cases of one engine on this rank; the times are the slower rank's."""
    ranks = dist.get_world_size()
    tokens = max(-(-sum(case.lengths) // ranks // 8) * 8 + 64 * len(case.lengths) for case in group)
    engine = build(group[0], smoke, tokens)
    found = []
    for case in group:
        known = {"part": case.part, "model": case.model, "case": case.name, "layout": engine.mesh.layout.name}
        known |= {"ranks": ranks, "kernel": engine.builder.kernel.name, "compile": case.compile}
        known |= {"recompute": case.recompute, "collective": case.collective}
        try:
            found.append(known | _measure(engine, case, repeats, smoke))
        except OutOfMemory as error:
            engine.clear_gradients()
            found.append(known | {"skipped": str(error)})
        gc.collect()
    return found


def _measure(engine: Engine, case: Case, repeats: int, smoke: bool) -> dict[str, Any]:
    ranks = dist.get_world_size()
    if engine.adapter.reader is None:
        samples = batch(case.lengths, engine.adapter.vocab_size)
    else:
        samples = picture_batch(case.lengths, engine.adapter, *([16] if smoke else []))
    objective = Objective("ppo", clip=0.2, entropy=0.001)
    if case.before:
        engine.forward_backward(batch(case.before, engine.adapter.vocab_size), objective)
    runs = []
    for _ in range(repeats + 2):
        engine.clear_gradients()
        runs.append(wall_ms(lambda: engine.forward_backward(samples, objective)))
    times, peak = [ms for ms, _ in runs[2:]], runs[-1][1]
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (times, peak))
    ms = [max(values) for values in zip(*(one[0] for one in every), strict=True)]
    median = statistics.median(ms)
    row = {
        "ms": ms,
        "tok_per_s": round(sum(case.lengths) / median * 1e3),
        "mfu": round(model_flops(engine, case.lengths) / median / 1e9 / PEAK_TFLOPS / ranks, 3),
        "peak_gib": round(max(one[1] for one in every), 2),
    }
    if engine.adapter.reader is not None:
        row |= _tower(engine, samples, repeats)
    if case.part in ("one", "free", "cp", "short", "nccl") and world().device.type == "cuda":
        engine.clear_gradients()
        row["device_ms"] = device_time(lambda: engine.forward_backward(samples, objective))
    return row


def _tower(engine: Engine, samples: list[Sample], repeats: int) -> dict[str, Any]:
    """A tower of the same shape alone, blocks compiled, on the images of one batch; and the host's time for their patches."""
    where = world().device
    one = make_batch(samples, engine.adapter, weights={}, fields=("temperature",), dtype=torch.float32)
    start = time.perf_counter()
    step = next(engine.builder.steps(one, engine.planner.plan(one), Keep()))
    seconds = time.perf_counter() - start
    inside = engine.adapter.model.model.visual
    known = copy.deepcopy(inside.config)
    known._attn_implementation_internal = "eager"  # a name with "flash" fails while a tower is built
    tower = type(inside)(known).to(where, DTYPES[engine.config.dtype])
    use_vision_bridge(tower)
    for block in tower.blocks if engine.config.compile else ():
        block.compile(backend=compiled.backend_of(compiled.PLAIN, deterministic=False))

    def both() -> None:
        out = run_tower(tower, step.media, step.context)
        torch.autograd.backward([x.float().square().sum() for x in (out.pooler_output, *out.deepstack_features)])

    ms = times_ms(both, repeats=repeats)
    return {"tower_ms": ms, "patches": len(step.media.pixels), "host_patches_s": round(seconds, 3)}


def grouped(wanted: list[Case]) -> Iterator[list[Case]]:
    for _, group in groupby(wanted, key=lambda case: case.engine):
        yield list(group)


def run() -> Report:
    asked = settings("whole train step", repeats=3)
    report = Report("step", asked, __doc__ or "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2
    for group in grouped(cases(asked, gpus)):
        try:
            rows = launch(measure, group, asked.smoke, asked.repeats, ranks=group[0].layout.ranks, timeout_s=240)[0]
        except LongspanError as error:
            print(error, flush=True)
            report.skip(
                " ".join(str(error).split("\n")[-3:]),
                part=group[0].part,
                model=group[0].model,
                recompute=group[0].recompute,
            )
            continue
        for row in rows:
            report.add(**row)
    return report


if __name__ == "__main__":
    run().save(
        bars=lambda row: (
            f"{row['model']}, {row['case']}",
            f"{row['layout']} {'compiled' if row['compile'] else 'eager'}, {row['recompute']}",
            row["tok_per_s"],
        ),
        unit="tokens/s",
    )
