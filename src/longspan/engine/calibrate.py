"""`longspan bench --calibrate FILE.json`: the constants of the cost model, measured on this machine.

Kernels are timed alone (attention at two document lengths, Gated DeltaNet, collectives); what a whole step costs beside
them is the difference of two engines' steps: more layers, more trained tokens, fewer tokens, images. Each constant is the one
that makes data/cost.py give the measured time, so its formulas stand only there. A difference below NOISE of its step counts
as that much. What this machine cannot show (links between nodes, anything over ranks on one rank) keeps the base's value and
is named. On a CPU the same code runs on toy sizes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.data import Image, Sample
from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.shape import ModelShape
from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.engine import Engine
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.launch import World, world
from longspan.layout import CPGroup, Layout, Mesh, make_seqinfo, resolve
from longspan.layout.comm import all_gather
from longspan.mixers import make_mixer, make_transport
from longspan.mixers.deltanet_choose import choose_delta_kernel
from longspan.mixers.kernels.choose import choose_kernel
from longspan.mixers.linear import DeltaShape, DeltaWeights, gated_delta, prepare_linear
from longspan.mixers.local import packed_attention
from longspan.models.loading import adapt, build_random
from longspan.models.tiny import tiny
from longspan.objective import Objective

__all__ = ["Asked", "Found", "calibrate_rank"]

NOISE = 0.02
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure with."""

    dtype: str
    compile: bool
    recompute: str
    repeats: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model and a row to measure with: Qwen3-1.7B's on a GPU."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tokens: int  # of a row
    document: int  # tokens of each of its samples
    layers: tuple[int, int]
    image: int  # pixels a side
    tower: dict[str, int]
    delta: DeltaShape
    message: int  # bytes of a large collective


GPU_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16, "patch_size": 16}
CPU_TOWER = {"hidden_size": 24, "intermediate_size": 32, "depth": 2, "num_heads": 3, "patch_size": 4}
GPU = Sizes(2048, 6144, 16, 8, 128, 151936, 32768, 2048, (2, 6), 1024, GPU_TOWER, DeltaShape(16, 32, 128, 128), 2**27)
CPU = Sizes(64, 192, 4, 2, 16, 512, 512, 64, (1, 4), 64, CPU_TOWER, DeltaShape(2, 4, 8, 8), 2**20)


@dataclass(frozen=True, slots=True)
class Found:
    """Constants by name, and the steps they must foretell: (what, predicted s, measured s)."""

    constants: dict[str, float] = field(default_factory=dict)
    checks: list[tuple[str, float, float]] = field(default_factory=list)


def calibrate_rank(asked: Asked, base: Machine) -> Found:
    """One rank's work, the same result on all: everything on one rank, else what only several can show (`base` then has the
    constants of one)."""
    here = world()
    sizes = GPU if here.device.type == "cuda" else CPU
    bench = Bench(asked, sizes, here)
    return bench.over_ranks(base) if here.ranks > 1 else bench.alone(base)


@dataclass(frozen=True, slots=True)
class Bench:
    """Times kernels and steps."""

    asked: Asked
    sizes: Sizes
    here: World

    def alone(self, base: Machine) -> Found:
        """The constants that one rank shows, in the order in which each needs those before it."""
        found = self.attention() | self.delta() | self.host()
        machine = replace(base, **found)
        decoder, check = self.decoder(machine)
        machine = replace(machine, **decoder)
        vision = self.vision(machine)
        return Found(found | decoder | vision, [check(replace(machine, **vision))])

    def attention(self) -> dict[str, float]:
        """Forward and backward of one row, as few documents and as one: time = w T (L + half) / rate."""
        s = self.sizes
        short, long = self._attention_s(s.document), self._attention_s(s.tokens)
        slope = max(long - short, NOISE * long) / (s.tokens - s.document)
        flops = 3.5 * 2.0 * s.heads * s.head_dim * s.tokens
        return {
            "attention_flops": flops / slope,
            "attention_half_length": min(max(short / slope - s.document, 1.0), float(s.tokens)),
        }

    def _attention_s(self, length: int) -> float:
        s, where = self.sizes, self.here.device
        dtype = DTYPES[self.asked.dtype]
        kernel = choose_kernel(where, dtype, s.head_dim)
        shapes = [(s.tokens, heads, s.head_dim) for heads in (s.heads, s.kv_heads, s.kv_heads)]
        q, k, v = (torch.randn(shape, device=where, dtype=dtype, requires_grad=True) for shape in shapes)
        cu = torch.arange(0, s.tokens + 1, length, device=where, dtype=torch.int32)

        def run() -> None:
            out = packed_attention(q, k, v, cu, max_len=length, causal=True, scale=s.head_dim**-0.5, kernel=kernel)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        return self.seconds(run)

    def delta(self) -> dict[str, float]:
        """Gated DeltaNet's convolution and rule; not where a GPU has only the plain recurrence."""
        s, where, dtype = self.sizes, self.here.device, DTYPES[self.asked.dtype]
        if where.type == "cuda" and choose_delta_kernel(where, dtype).name != "fla":
            return {}
        shape, tokens = s.delta, s.tokens
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        info = make_seqinfo("contiguous", cu, CPGroup.alone(self.here.rank))
        prepared = prepare_linear(info, where, how="state", dtype=dtype)
        channels, heads = sum(shape.channels), shape.value_heads
        mixed, b, a = (
            torch.randn(tokens, width, device=where).to(dtype).requires_grad_() for width in (channels, heads, heads)
        )
        conv = torch.randn(channels, 4, device=where).to(dtype).requires_grad_()
        decay, bias = (torch.full((heads,), -2.0, device=where, dtype=dtype).requires_grad_() for _ in range(2))

        def run() -> None:
            out = gated_delta(mixed, b, a, DeltaWeights(conv, decay, bias), shape=shape, prepared=prepared, layer=0)
            torch.autograd.grad(out, (mixed, b, a, conv, decay, bias), torch.ones_like(out))

        return {"linear_token_s": self.seconds(run) / (tokens * heads * shape.value_dim / 128)}

    def host(self) -> dict[str, float]:
        """Between the device and pinned memory; on a CPU from memory to memory."""
        where, size = self.here.device, self.sizes.message
        there = torch.empty(size, dtype=torch.uint8, pin_memory=where.type == "cuda")
        here = torch.empty(size, dtype=torch.uint8, device=where)
        return {"host_bytes_s": size / self.seconds(lambda: here.copy_(there, non_blocking=True))}

    def decoder(self, machine: Machine) -> tuple[dict[str, float], Callable[[Machine], tuple[str, float, float]]]:
        """Dense layers, the head and the fixed time of a micro-step; and a check by a row of one document."""
        s, few, many = self.sizes, *self.sizes.layers
        rows = [s.document] * (s.tokens // s.document)
        shallow = self.engine(few)
        small = self.step_s(shallow, rows)
        del shallow
        deep = self.engine(many)
        whole = self.step_s(deep, rows)
        quarter = self.step_s(deep, rows[: max(1, len(rows) // 4)])
        headless = self.step_s(deep, rows, trained=False)
        one = self.step_s(deep, [s.tokens])
        model = self.model(deep, machine)
        part = len(rows) / max(1, len(rows) // 4)
        fixed = max((part * quarter - whole) / (part - 1.0), NOISE * whole)
        parts = {name: float(v.sum()) for name, v in model.parts(np.asarray(rows, dtype=np.float64), 1).items()}
        layer = (whole - small) / (many - few) - (fixed + parts["attention"]) / many
        head = max(whole - headless, NOISE * whole) / (1.0 - 1.0 / s.document)
        found = {
            "launch_s": fixed / many,
            "matmul_flops": machine.matmul_flops * parts["dense"] / many / max(layer, NOISE * whole / many),
            "head_flops": machine.head_flops * parts["head"] / head,
        }

        def check(final: Machine) -> tuple[str, float, float]:
            again = self.model(deep, final)
            return f"{many} layers, one document of {s.tokens:,} tokens", again(s.tokens, 1) + again.step_s, one

        return found, check

    def vision(self, machine: Machine) -> dict[str, float]:
        """A step with one image a sample against the same tokens without."""
        s = self.sizes
        text = self.text(s.layers[0])
        tower = s.tower | {"out_hidden_size": s.hidden}
        engine = self.engine_of(tiny("qwen3_vl", text=text | self.rope(), vision=tower, **self.ids()))
        reader = engine.adapter.reader
        assert reader is not None
        draw = np.random.default_rng(0)
        pixels = [draw.integers(0, 256, (s.image, s.image, 3), dtype=np.uint8) for _ in range(4)]
        (visual,) = reader.run_lengths(reader.grid(Image(pixels[0])))
        length = visual + 2 + s.document
        without = self.step_s(engine, [length] * 4)
        took = self.step_s(engine, [length] * 4, images=[Image(each) for each in pixels]) - without
        share, total = visual / length, 4.0 * length
        model = replace(self.model(engine, machine), visual_share=share, image_tokens=visual)
        said = float(model.parts(np.asarray([total]), 1)["vision"][0])
        return {"vision_flops": machine.vision_flops * said / max(took, NOISE * without)}

    def over_ranks(self, machine: Machine) -> Found:
        """Collectives of all ranks, an exchange of heads, and how much of FSDP's traffic shows."""
        s, mesh = self.sizes, self.mesh(Layout(dp=self.here.ranks))
        ranks = self.here.ranks
        big = torch.zeros(s.message // 4 // ranks, device=self.here.device)
        tiny_one = torch.zeros(8, device=self.here.device)
        gather = self.seconds(lambda: all_gather(big, mesh.all))
        latency = self.seconds(lambda: all_gather(tiny_one, mesh.all))
        found = {
            "gather_bytes_s": s.message / max(gather - latency, NOISE * gather),
            "latency_s": latency,
            "node_ranks": torch.cuda.device_count() if self.here.device.type == "cuda" else ranks,
        }
        machine = replace(machine, **found)
        if s.heads % ranks == 0:
            found |= self.exchange(mesh, machine)
        many = s.layers[1]
        rows = [s.document] * (s.tokens // s.document) * ranks
        engine = self.engine(many, Layout(dp=ranks))
        took = self.step_s(engine, rows)
        model = self.model(engine, replace(machine, gather_overlap=0.0, **found))
        hidden = replace(model, num_ranks=1)
        work = sum(float(v.sum()) for v in model.parts(np.asarray(rows, dtype=np.float64), 1).values()) / ranks
        traffic = model.step_s - hidden.step_s
        found["gather_overlap"] = min(max(1.0 - (took - work - hidden.step_s) / traffic, 0.0), 1.0)
        final = self.model(engine, replace(machine, **found))
        return Found(found, [(f"dp{ranks}, {many} layers, {sum(rows):,} tokens", work + final.step_s, took)])

    def exchange(self, mesh: Mesh, machine: Machine) -> dict[str, float]:
        """Ulysses over all ranks, beyond the attention itself."""
        s, where, dtype = self.sizes, self.here.device, DTYPES[self.asked.dtype]
        layout = Layout(cp=self.here.ranks, mixer="ulysses", index="contiguous")
        mixer = make_mixer(layout, make_transport(mesh.all, where))
        info = make_seqinfo("contiguous", torch.tensor([0, s.tokens], dtype=torch.int32), mesh.all)
        prepared, kernel = mixer.prepare(info, where), choose_kernel(where, dtype, s.head_dim)
        shapes = [(info.num_local, heads, s.head_dim) for heads in (s.heads, s.kv_heads, s.kv_heads)]
        q, k, v = (torch.randn(shape, device=where, dtype=dtype, requires_grad=True) for shape in shapes)

        def run() -> None:
            out = mixer.attend(q, k, v, prepared, scale=s.head_dim**-0.5, kernel=kernel)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        took = self.seconds(run)
        shape = ModelShape(s.hidden, 1, s.heads, s.kv_heads, s.head_dim, s.mlp, s.vocab)
        model = CostModel(shape, machine, mixer="ulysses", recompute="none", bytes_per_value=dtype.itemsize)
        parts = model.parts(np.asarray([float(s.tokens)]), self.here.ranks)
        beyond = max(took - float(parts["attention"][0]), NOISE * took)
        return {"exchange_bytes_s": machine.exchange_bytes_s * float(parts["exchange"][0]) / beyond}

    def text(self, layers: int) -> dict[str, Any]:
        s = self.sizes
        return {
            "hidden_size": s.hidden,
            "intermediate_size": s.mlp,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "vocab_size": s.vocab,
            "num_hidden_layers": layers,
            "max_position_embeddings": 2**20,
        }

    def rope(self) -> dict[str, Any]:
        """mRoPE sections of this head dim."""
        half = self.sizes.head_dim // 2
        section = [half - 2 * (half // 3), half // 3, half // 3]
        kind = {"rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True}
        return {"rope_parameters": kind | {"mrope_section": section}}

    def ids(self) -> dict[str, int]:
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return {name: self.sizes.vocab - 1 - number for number, name in enumerate(names)}

    def engine(self, layers: int, layout: Layout | None = None) -> Engine:
        return self.engine_of(tiny("qwen3", **self.text(layers)), layout)

    def engine_of(self, model: Any, layout: Layout | None = None) -> Engine:  # Any: a PretrainedConfig
        """An engine on random weights, drawn where it runs."""
        s = self.sizes
        layout = layout or Layout()
        layout = resolve(layout, heads=s.heads, kv_heads=s.kv_heads, recurrent=False, windowed=False)
        config = EngineConfig(
            model="calibration",
            layout=layout,
            dtype=self.asked.dtype,  # type: ignore[arg-type]  # checked by EngineConfig
            recompute=self.asked.recompute,  # type: ignore[arg-type]
            compile=self.asked.compile,
            max_tokens_per_rank=2 * s.tokens,
        )
        with self.here.device:
            adapter = adapt(
                build_random(model, torch.float64 if self.asked.dtype == "float64" else torch.float32, 0), None
            )
        mesh = self.mesh(layout)
        return Engine(config, adapter, mesh, FSDPBackend(config, adapter, mesh))

    def mesh(self, layout: Layout) -> Mesh:
        return Mesh(layout, ranks=self.here.ranks, rank=self.here.rank, device=self.here.device)

    def model(self, engine: Engine, machine: Machine) -> CostModel:
        return CostModel(
            ModelShape.from_config(engine.adapter.model.config.to_dict()),
            machine,
            engine.mesh.data_ranks,
            recompute=engine.config.recompute,
            bytes_per_value=DTYPES[self.asked.dtype].itemsize,
        )

    def step_s(
        self, engine: Engine, lengths: Sequence[int], *, trained: bool = True, images: Sequence[Image] = ()
    ) -> float:
        """Seconds of one forward_backward. trained=False: one token of each sample."""
        samples = []
        for number, length in enumerate(lengths):
            ids = torch.arange(length) % (self.sizes.vocab - 8)
            if images:
                known, reader = self.ids(), engine.adapter.reader
                assert reader is not None
                (visual,) = reader.run_lengths(reader.grid(images[number]))
                ids[0], ids[visual + 1] = known["vision_start_token_id"], known["vision_end_token_id"]
                ids[1 : visual + 1] = known["image_token_id"]
            mask = torch.ones(length) if trained else torch.zeros(length)
            mask[-1] = 1.0
            fields = {"advantage": torch.ones(length), "old_logprob": torch.full((length,), -6.0)}
            media = [images[number]] if images else []
            samples.append(Sample(ids, torch.zeros(length, dtype=torch.int64), mask, fields, media=media))
        objective = Objective("importance_sampling")

        def run() -> None:
            engine.forward_backward(samples, objective)

        return self.seconds(run)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of `repeats` calls after WARM_UP, the slowest rank's."""
        taken = []
        for number in range(WARM_UP + self.asked.repeats):
            self._meet()
            start = time.perf_counter()
            run()
            self._meet()
            taken += [time.perf_counter() - start] if number >= WARM_UP else []
        slowest: Tensor = torch.tensor(statistics.median(taken), dtype=torch.float64, device=self.here.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def _meet(self) -> None:
        """The device is idle, and all ranks are here."""
        if self.here.device.type == "cuda":
            torch.cuda.synchronize()
        if self.here.ranks > 1:
            dist.barrier()
