"""The whole train step through Engine: Qwen3-1.7B's shape with random weights, bf16 over fp32 masters, PPO.

    python benchmarks/step.py               # every layout that the machine's GPUs allow
    python benchmarks/step.py --only one    # one GPU; "cp": two GPUs; "short": short rows, CP=2 against DP=2
    python benchmarks/step.py --only "one/64k row/compiled/selective"

One `forward_backward` of 64k tokens, no optimizer: forward, recomputation, backward, gradient reduction, the PPO loss
with entropy. Layers are compiled one by one (`compile=True`) or run as they are. Time is wall clock around the call,
the device synchronised on both sides, so host work counts; the slower rank's. tokens/s: real tokens of all ranks.
MFU: 6 * (parameters without the embedding) * T + 3 * causal attention forward FLOPs (2 * sum(L^2) * H * D a layer),
over 989 TFLOP/s a GPU; recomputation is not counted. Peak: allocator's, with gradients; fp32 masters, no Adam moments.
Random weights are fine for speed: no kernel's time depends on them.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import PEAK_TFLOPS, Report, Settings, causal_flops, settings
from transformers import Qwen3Config

from longspan import Engine, EngineConfig, Layout, Objective, Sample
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.launch import launch, world
from longspan.layout import Mesh, resolve
from longspan.models.loading import adapt, build_random

SHORT = (*[1024, 2048, 1536, 1280, 1792] * 8, 2048, 2048)  # 65,536 tokens in rows of 1k to 2k


@dataclass(frozen=True)
class Case:
    """One engine and one batch."""

    part: str
    name: str
    lengths: tuple[int, ...]
    layout: Layout
    compile: bool = True
    recompute: str = "selective"

    @property
    def label(self) -> str:
        """What --only selects by."""
        return f"{self.part}/{self.name}/{'compiled' if self.compile else 'eager'}/{self.recompute}"


def cases(asked: Settings, gpus: int) -> list[Case]:
    """What this machine can run."""
    rows = asked.rows
    one = [
        Case("one", name, lengths, Layout(), compiled, recompute)
        for compiled, recompute in ((False, "selective"), (True, "selective"), (True, "full"))
        for name, lengths in rows.items()
    ]
    if gpus < 2:
        return [case for case in one if asked.wants(case.label)]
    short = (8, 12, 16, 12) if asked.smoke else SHORT
    two = [Case("cp", name, lengths, Layout(cp=2)) for name, lengths in rows.items()]
    two += [Case("short", "rows of 1-2k", short, layout) for layout in (Layout(dp=2), Layout(cp=2))]
    return [case for case in one + two if asked.wants(case.label)]


def shape(smoke: bool) -> Qwen3Config:
    """Qwen3-1.7B, or a toy."""
    toy = (97, 32, 64, 2, 8, 4, 2)
    full = (151936, 2048, 6144, 28, 128, 16, 8)
    vocab, hidden, mlp, layers, head_dim, heads, kv_heads = toy if smoke else full
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2**20,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )


def build(case: Case, smoke: bool, tokens: int) -> Engine:
    """Engine.build, for a config that is no folder: weights are drawn on the device."""
    here = world()
    layout = resolve(case.layout, heads=16, kv_heads=8, recurrent=False, windowed=False)
    config = EngineConfig(
        model="qwen3-1.7b-random",
        layout=layout,
        dtype="bfloat16" if here.device.type == "cuda" else "float32",
        max_tokens_per_rank=tokens,
        recompute=case.recompute,
        compile=case.compile and here.device.type == "cuda",
    )
    with here.device:
        adapter = adapt(build_random(shape(smoke), torch.float32, 0), None)
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    return Engine(config, adapter, mesh, FSDPBackend(config, adapter, mesh))


def batch(lengths: tuple[int, ...], vocab: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in lengths:
        ids = torch.randint(0, vocab, (length + 1,), generator=generator)
        fields = {"advantage": torch.randn(length, generator=generator), "old_logprob": -torch.ones(length) * 12}
        samples.append(Sample(input_ids=ids[:-1], target_ids=ids[1:], mask=torch.ones(length), fields=fields))
    return samples


def model_flops(engine: Engine, lengths: tuple[int, ...]) -> float:
    """FLOPs of forward and backward without recomputation."""
    known = engine.adapter.model.config
    parameters = engine.adapter.model.named_parameters()
    body = sum(parameter.numel() for name, parameter in parameters if "embed" not in name)
    attention = known.num_hidden_layers * causal_flops(lengths, known.num_attention_heads, known.head_dim)
    return 6 * (body + known.vocab_size * known.hidden_size) * sum(lengths) + 3 * attention


def measure(case: Case, smoke: bool, repeats: int) -> dict[str, Any]:
    """One case on this rank; the times are the slower rank's."""
    ranks, where = dist.get_world_size(), world().device
    tokens = sum(case.lengths)
    engine = build(case, smoke, -(-tokens // ranks // 8) * 8 + 64 * len(case.lengths))
    samples = batch(case.lengths, engine.adapter.vocab_size)
    objective = Objective("ppo", clip=0.2, entropy=0.001)
    times = []
    for repeat in range(repeats + 2):
        if where.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start = time.perf_counter()
        engine.forward_backward(samples, objective)
        if where.type == "cuda":
            torch.cuda.synchronize()
        times += [(time.perf_counter() - start) * 1e3] if repeat > 1 else []
    peak = torch.cuda.max_memory_allocated() / 2**30 if where.type == "cuda" else 0.0
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (times, peak))
    ms = [max(values) for values in zip(*(found[0] for found in every), strict=True)]
    median = statistics.median(ms)
    return {
        "case": case.name,
        "layout": engine.mesh.layout.name,
        "ranks": ranks,
        "kernel": engine.builder.kernel.name,
        "compile": case.compile,
        "recompute": case.recompute,
        "ms": ms,
        "tok_per_s": round(tokens / median * 1e3),
        "mfu": round(model_flops(engine, case.lengths) / median / 1e9 / PEAK_TFLOPS / ranks, 3),
        "peak_gib": round(max(found[1] for found in every), 2),
    }


def run() -> Report:
    asked = settings("whole train step", repeats=3)
    report = Report("step", asked, __doc__ or "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 2
    for case in cases(asked, gpus):
        ranks = case.layout.ranks
        row = launch(measure, case, asked.smoke, asked.repeats, ranks=ranks, timeout_s=240)[0]
        report.add(part=case.part, **row)
    return report


if __name__ == "__main__":
    run().save(
        bars=lambda row: (
            row["case"],
            f"{row['layout']} {'compiled' if row['compile'] else 'eager'}, {row['recompute']}",
            row["tok_per_s"],
        ),
        unit="tokens/s",
    )
