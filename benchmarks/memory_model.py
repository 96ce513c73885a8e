"""The memory model against the allocator: one real micro-step and optimizer step a cell, random weights, one GPU.

    python benchmarks/memory_model.py --out FOLDER              # every cell: about three minutes on an H200
    python benchmarks/memory_model.py --only 1.7b/64k           # cells whose name starts so

A cell is a model shape, a row length and a policy, in a process of its own (a few at a time, as far as their predicted
peaks fit the GPU together: only bytes are measured). In it: build; gradients of zero and an optimizer step (so that
moments exist, as in every step but the first); gradients there again, as in every micro-step but the first; one
`forward_backward` with AdamW's moments; `optim_step`. Written, in GiB: what is allocated after each, the peaks of the last
two, what the model says of it (`predicted`, and by part), and `at_peak`: what autograd's and the engine's tensors are at
the peak, largest first, as (bytes a token, count, where they were made).
"""

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, Settings, settings
from peft import LoraConfig
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig, Qwen3VLConfig

from longspan import AdamW, Engine, EngineConfig, Image, Layout, Objective, Sample
from longspan.data.memory import MemoryModel
from longspan.data.shape import ModelShape
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.launch import world
from longspan.layout import Mesh, resolve
from longspan.models.loading import adapt, build_random
from longspan.models.tiny import tiny

GIB = 2**30
TOGETHER_GIB = 100.0  # of predicted peaks at a time
PROCESSES = 4
IMAGE = 1024  # pixels a side: 1,024 visual tokens
LORA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    model: str
    length: int
    recompute: str
    compile: bool = False
    images: int = 0
    lora: int = 0  # rank of the factors; 0 trains every weight

    @property
    def label(self) -> str:
        """What --only selects by."""
        extra = [f"lora{self.lora}"] * bool(self.lora) + [f"{self.images} images"] * bool(self.images)
        return "/".join(
            [self.model, f"{self.length // 1024}k", self.recompute, "compiled" if self.compile else "eager", *extra]
        )


CELLS = (
    Cell("1.7b", 65536, "selective", compile=True),
    Cell("1.7b", 131072, "full", compile=True),
    Cell("1.7b", 65536, "selective"),
    Cell("1.7b", 16384, "none"),
    Cell("0.6b", 131072, "selective"),
    Cell("0.6b", 32768, "none", compile=True),
    Cell("8b", 32768, "selective", lora=16),
    Cell("vl-2b", 32768, "selective", images=16),
    Cell("vl-2b", 16384, "none", images=8),
    Cell("moe-4l", 32768, "selective"),
)


def config_of(model: str, smoke: bool) -> PretrainedConfig:
    """Published shapes; moe-4l is four layers of Qwen3-30B-A3B."""
    if smoke:
        return tiny({"vl-2b": "qwen3_vl", "moe-4l": "qwen3_moe"}.get(model, "qwen3"))
    hidden, mlp, layers, heads, kv_heads = {
        "0.6b": (1024, 3072, 28, 16, 8),
        "1.7b": (2048, 6144, 28, 16, 8),
        "8b": (4096, 12288, 36, 32, 8),
        "vl-2b": (2048, 6144, 28, 16, 8),
        "moe-4l": (2048, 6144, 4, 32, 4),
    }[model]
    text: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 2**20,
        "tie_word_embeddings": model in ("0.6b", "1.7b", "vl-2b"),
    }
    if model == "moe-4l":
        experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
        return Qwen3MoeConfig(**text, **experts, architectures=["Qwen3MoeForCausalLM"])
    if model == "vl-2b":
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
        tower = {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": hidden,
        }
        return Qwen3VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**tower, "patch_size": 16, "deepstack_visual_indexes": [5, 11, 17]},
            tie_word_embeddings=True,
            architectures=["Qwen3VLForConditionalGeneration"],
        )
    return Qwen3Config(**text, architectures=["Qwen3ForCausalLM"])


def predicted(cell: Cell, smoke: bool) -> MemoryModel:
    """What the model says, under the settings of the cell; the engine's own planner has the same (engine/planning.py)."""
    config = config_of(cell.model, smoke)
    shape, width = ModelShape.from_config(config.to_dict()), 0
    if cell.lora:
        inputs = (
            6 * shape.hidden + shape.heads * shape.head_dim + shape.mlp - shape.hidden
        )  # q, k, v, gate, up; o; down
        width = inputs + len(LORA) * cell.lora
    outputs = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 2 * shape.mlp + 2 * shape.hidden
    factors = shape.layers * cell.lora * (width + outputs)
    return MemoryModel(
        shape,
        1,
        cell.recompute,
        trainable_share=factors / shape.weights if cell.lora else 1.0,
        head_trained=not cell.lora,
        visual_share=cell.images * (IMAGE // 32) ** 2 / cell.length,
        lora_width=width,
        compile=cell.compile,
    )


def build(cell: Cell, smoke: bool) -> Engine:
    """Engine.build for a config that is no folder; weights are drawn on the device."""
    here = world()
    model = config_of(cell.model, smoke)
    text = model.get_text_config()
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    layout = resolve(Layout(), heads=heads, kv_heads=kv_heads, recurrent=False, windowed=False)
    on_gpu = here.device.type == "cuda"
    config = EngineConfig(
        model=cell.label,
        layout=layout,
        dtype="bfloat16" if on_gpu else "float32",
        max_tokens_per_rank=cell.length,
        recompute=cell.recompute,
        compile=cell.compile and on_gpu,
        lora={"only": LoraConfig(r=cell.lora, target_modules=LORA)} if cell.lora else None,
    )
    with here.device:
        adapter = adapt(build_random(model, torch.float32, 0), None)
    mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
    return Engine(config, adapter, mesh, FSDPBackend(config, adapter, mesh))


def sample(engine: Engine, cell: Cell, smoke: bool) -> Sample:
    """One row of exactly `length` tokens: text, and the images one after another before it."""
    draw = np.random.default_rng(0)
    side = 16 if smoke else IMAGE
    ids: list[int] = []
    media = [Image(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)) for _ in range(cell.images)]
    for image in media:
        reader, known = engine.adapter.reader, engine.adapter.ids
        ids += [known.start, *[known.image] * reader.run_lengths(reader.grid(image))[0], known.end]
    ids = [*ids, *draw.integers(0, min(90, engine.adapter.vocab_size), cell.length).tolist()][: cell.length]
    fields = {"advantage": torch.ones(cell.length), "old_logprob": -torch.ones(cell.length) * 12}
    mask = [0.0 if i + 1 < len(ids) and ids[i + 1] > 90 else 1.0 for i in range(len(ids))]
    return Sample(input_ids=ids, target_ids=[*ids[1:], 1], mask=mask, fields=fields, media=media)


def measure(cell: Cell, smoke: bool) -> dict[str, Any]:
    """One cell, in this process."""
    started = time.perf_counter()
    engine = build(cell, smoke)
    row = sample(engine, cell, smoke)
    allocated = {"built": _allocated()}
    _zero_gradients(engine)
    allocated["gradients"] = _allocated()
    _reset()
    engine.optim_step(AdamW(lr=1e-5))
    allocated["moments"], first_step = _allocated(), _peak()
    _zero_gradients(engine)
    before = _allocated()
    _reset()
    _record(True)
    engine.forward_backward([row], Objective("ppo", clip=0.2, entropy=0.001))
    peak, at_peak = _peak(), _live_at_peak(cell.length)
    _record(False)
    allocated["after"] = _allocated()
    _reset()
    engine.optim_step(AdamW(lr=1e-5))
    return {
        "allocated_gib": allocated,
        "before_gib": before,
        "forward_backward_gib": peak,
        "first_step_gib": first_step,
        "optim_step_gib": _peak(),
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0,
        "outside_gib": _outside(),
        "weights": sum(parameter.numel() for parameter in engine.adapter.model.parameters()),
        "trainable": sum(p.numel() for _, p in engine.backend.named_parameters()),
        "kernel": engine.builder.kernel.name,
        "engine_model": repr(engine.planner.memory_of(cell.images * (IMAGE // 32) ** 2 / cell.length)),
        "seconds": time.perf_counter() - started,
        "at_peak": at_peak,
    }


def _zero_gradients(engine: Engine) -> None:
    for _, parameter in engine.backend.named_parameters():
        parameter.grad = torch.zeros_like(parameter)


def _allocated() -> float:
    if not torch.cuda.is_available():
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / GIB


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0


def _reset() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _outside() -> float:
    """What this process holds of the GPU beside the allocator: context, cuBLAS, NCCL. 0 where other cells run beside it."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return max(0.0, (total - free - torch.cuda.memory_reserved()) / GIB)


def _record(on: bool) -> None:
    if torch.cuda.is_available():
        mode = {"enabled": "all", "context": "alloc", "stacks": "python", "max_entries": 1_000_000} if on else {}
        torch.cuda.memory._record_memory_history(**(mode or {"enabled": None}))


def _live_at_peak(tokens: int) -> list[dict[str, Any]]:
    """Tensors made since recording began that live at the peak: grouped by size and place, largest first."""
    if not torch.cuda.is_available():
        return []
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    total = peak = 0
    when = -1
    sizes: dict[int, int] = {}
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_requested":
            total -= sizes.pop(event["addr"], 0)
        if total > peak:
            peak, when = total, number
    live: dict[int, Any] = {}
    for event in events[: when + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    groups: Counter[tuple[int, str]] = Counter()
    for event in live.values():
        groups[(event["size"], _place(event.get("frames", [])))] += 1
    ranked = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:60]
    found = [
        {"gib": size * count / GIB, "bytes_a_token": size / tokens, "count": count, "where": where}
        for (size, where), count in ranked
    ]
    return [{"gib": peak / GIB, "bytes_a_token": peak / tokens, "count": len(live), "where": "all"}, *found]


def _place(frames: list[Any]) -> str:
    """The innermost frames that name a file of interest."""
    named = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py") and "torch/nn/modules/module" not in frame["filename"]
    ]
    return " < ".join(named[:4])


def _bar(row: Mapping[str, Any]) -> tuple[str, str, float]:
    return "predicted / measured", row["case"], row["ratio"]


def run_all(asked: Settings) -> None:
    """Cells in processes of their own, as many at a time as the GPU holds."""
    report = Report("memory_model", asked, __doc__ or "")
    waiting = [cell for cell in CELLS if asked.wants(cell.label)]
    running: list[tuple[Cell, float, Path, subprocess.Popen[bytes]]] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            for cell in list(waiting):
                need = predicted(cell, asked.smoke).peak(cell.length) / GIB
                if running and (len(running) >= PROCESSES or need + sum(r[1] for r in running) > TOGETHER_GIB):
                    continue
                path = Path(folder) / f"{CELLS.index(cell)}.json"
                command = [sys.executable, __file__, "--only", cell.label, "--out", str(path)]
                command += ["--smoke"] if asked.smoke else []
                log = path.with_suffix(".log").open("wb")
                running.append((cell, need, path, subprocess.Popen([*command, "--repeats", "0"], stderr=log)))
                waiting.remove(cell)
            time.sleep(0.2)
            for entry in [entry for entry in running if entry[3].poll() is not None]:
                running.remove(entry)
                _collect(report, entry[0], entry[2], asked.smoke)
                report.save(bars=_bar, unit="ratio")  # a limit on the whole run then loses only the cells not reached


def _collect(report: Report, cell: Cell, path: Path, smoke: bool) -> None:
    if not path.exists():
        report.skip(path.with_suffix(".log").read_text()[-180:].replace("\n", " "), case=cell.label, **asdict(cell))
        return
    found = json.loads(path.read_text())
    model = predicted(cell, smoke)
    parts = {name: value / GIB for name, value in model.parts(cell.length).items()}
    said = sum(parts.values())
    ratio = said / found["forward_backward_gib"] if found["forward_backward_gib"] else 0.0
    report.add(
        case=cell.label, ratio=round(ratio, 3), predicted_gib=said, **asdict(cell), **found, parts_gib=parts, ranks=1
    )
    for group in found["at_peak"][:14]:
        print(
            f"   {group['gib']:8.2f} GiB  {group['count']:4d} x {group['bytes_a_token']:10.1f} B/token  {group['where'][:150]}"
        )


def main() -> None:
    asked = settings("memory model against the allocator")
    if asked.out.suffix == ".json":  # a cell's own process, started by run_all
        (cell,) = (cell for cell in CELLS if cell.label in asked.only)
        if asked.smoke:
            cell = Cell(cell.model, 64, cell.recompute, cell.compile, min(cell.images, 2), min(cell.lora, 2))
        asked.out.write_text(json.dumps(measure(cell, asked.smoke)))
        return
    run_all(asked)


if __name__ == "__main__":
    main()
