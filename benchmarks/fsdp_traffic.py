"""FSDP's traffic on two GPUs: gradients summed once a call or after every micro-step, weights gathered once or twice.

    python benchmarks/fsdp_traffic.py --out FOLDER          # about two minutes on two H200s
    python benchmarks/fsdp_traffic.py --smoke               # toy shape, gloo

Qwen3-1.7B's shape, random weights, bf16, selective, compiled. `chosen` is what the engine takes by its memory model; the others
are forced. Times of a whole `forward_backward` are the slower rank's; the order of the choices turns with each repeat, so
that drift meets all alike. `error`: distance of the gradients' norm from that of `each, twice`, relative.
"""

import gc
from typing import Any

import torch.distributed as dist
from common import Report, settings, wall_ms
from shapes import batch
from step import Case, build

from longspan import Layout, Objective
from longspan.engine.optim import gradient_norm
from longspan.engine.reductions import Traffic
from longspan.launch import launch

# (name, row lengths, layout, tokens a rank): rows of a micro-step fill the budget
CASES = (
    ("8 micro-steps of 8k", (8192,) * 16, Layout(dp=2), 8192),
    ("4 micro-steps of 16k", (16384,) * 8, Layout(dp=2), 16384),
    ("2 micro-steps of a 64k row", (65536,) * 2, Layout(cp=2), 32768),
    ("one 64k row", (65536,), Layout(cp=2), 32768),
)
CHOICES = {"each, twice": (0, 2), "once, twice": (1, 2), "once, once": (1, 1)}  # sums (0: one a micro-step), gathers


def measure(number: int, smoke: bool, repeats: int) -> list[dict[str, Any]]:
    """One case with every choice in turn."""
    name, lengths, layout, tokens = CASES[number]
    lengths, tokens = (tuple(length // 256 for length in lengths), tokens // 256) if smoke else (lengths, tokens)
    engine = build(Case("traffic", name, lengths, layout), smoke, tokens)
    samples, objective = batch(lengths, engine.adapter.vocab_size), Objective("ppo", clip=0.2, entropy=0.001)
    told = engine.forward_backward(samples, objective)
    steps = int(told["plan/micro_steps"])
    known = {"case": name, "layout": engine.mesh.layout.name, "micro_steps": steps}
    known["chosen"] = (
        f"{'once' if told['plan/reductions'] == 1 else 'each'}, {'once' if told['plan/gathers'] == 1 else 'twice'}"
    )
    held = engine.backend.held()
    known |= {"gradients_gib": held.gradients / 2**30, "weights_gib": held.layers / 2**30}
    found: dict[str, dict[str, Any]] = {choice: {"ms": [], "peak_gib": 0.0} for choice in CHOICES}
    for repeat in range(repeats + 1):
        for place in range(len(CHOICES)):
            choice = list(CHOICES)[(place + repeat) % len(CHOICES)]
            sums, gathers = CHOICES[choice]
            made = Traffic(sums or steps, gathers)
            engine.reductions.traffic = lambda plan, rooms, made=made: made
            engine.clear_gradients()
            gc.collect()
            ms, found[choice]["peak_gib"] = wall_ms(lambda: engine.forward_backward(samples, objective))
            found[choice]["ms"] += [ms] if repeat else []  # the first one warms up
            parameters = [parameter for _, parameter in engine.backend.named_parameters()]
            found[choice]["norm"] = float(gradient_norm(parameters, engine.mesh.all))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {choice: row["ms"] for choice, row in found.items()})
    base = found["each, twice"]["norm"]
    for choice, row in found.items():
        row["ms"] = [max(times) for times in zip(*(one[choice] for one in every), strict=True)]
        row["error"] = abs(row["norm"] - base) / base
    return [known | {"choice": choice} | row for choice, row in found.items()]


if __name__ == "__main__":
    asked = settings("FSDP's traffic", repeats=5)
    report = Report("fsdp_traffic", asked, __doc__ or "")
    for number, (name, *_) in enumerate(CASES):
        for row in (
            launch(measure, number, asked.smoke, asked.repeats, ranks=2, timeout_s=240)[0] if asked.wants(name) else ()
        ):
            report.add(**row)
    report.save(bars=lambda row: (row["case"], row["choice"], row["median_ms"]), unit="ms")
