"""The memory model of backend="megatron" against the bytes of tensors that live on each of two ranks: what is always there,
the peak of a forward_backward on top of it, and the peak of an optimizer step. Each within what the model leaves out or
counts too often, in bytes (`Figure`); nothing else is allowed for.

Left out, M = 4 bytes (8 in fp64) of a master, b of what computes, d data ranks, T tokens, h hidden, n micro-steps in flight:

    always     weights of one dimension and the tower's table of positions, N of them, N' trained: N (M + b, or M where they are
               one), M N' of gradients, 2 M N' / d of moments. Cutting n elements over d ranks leaves less than one element
    step       of the same slices, their clipped copies and square roots, when the accumulators are gone: 3 M N' / d - M N'
    experts    a rank that R more rows than the mean are sent to: 4 h + 4 m columns of each in b and three int64, at the end of
               what is made again: arrived, sorted, made and made in the sender's order; gate and up, activation, product
    routers    logits beside their softmax (fp32), and three of eight int64 a chosen expert: 4 experts + 24 chosen, a token
    ranks      LoRA: the r numbers a token between two factors are whole on each rank, and cut as inputs are here

Counted too often:

    fields     96 bytes a token of each of n micro-steps, of which 68 are always there: 6 int64, 3 fp32 and an fp64 number
    arriving   the gradient from the next stage, T h b (rows of it under sequence parallelism): at the top of a stage it is the
               hidden gradient itself. Interleaved, what is posted a move ahead: some moves receive nothing
    choices    two of those int64 are gone when experts' backward starts: 16 chosen, a token
    factors    LoRA: tp cuts one factor of each pair, the model none: E too many, like N' above. And its share of trained
               weights is taken of all of a layer, N included: N / (W + N) of the factors is left out
    start      LoRA: nothing before the first factor needs a gradient: the first norm's input (M), its output (b), its scale
    tower      the input of the last merger is the last block's output: b * width a patch

Not counted here, since a GPU does not hold them: what stands on the host (the call's samples, weights and packed rows, 90 to
260 bytes a token) and what leaves for another stage (gloo tells of no send that it is done before it is waited for: all of a
call's would count, where the model has one gradient); nor the metrics' sums and histograms (834 fp64 each whatever T).
Tensors are counted as torch's operators make them, each storage once; what a gloo collective or a CPU kernel allocates inside
is not. A gloo thread may hold what tp summed a moment longer: the least of three calls counts there. Toy widths, so many
tokens that weights do not matter. fp32 where tp sums: bf16 sums need copies on a CPU only.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from live import Direct, Live
from megatron_cases import installed, replaced
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from longspan import AdamW, Engine, EngineConfig, Image, Objective, Sample, launch
from longspan.data.stage_activations import FIELDS
from longspan.data.stage_memory import StageMemory
from longspan.data.stages import WHOLE
from longspan.errors import UserError
from longspan.layout import parse_layout
from longspan.models.loading import build_random
from longspan.models.tiny import tiny

TOKENS, DOCUMENT = 512, 16
PRESENT = 68  # bytes of FIELDS that every objective reads
ELEMENTS = 64  # parameters of a rank: a cut of each is whole elements
TEXT = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "num_hidden_layers": 4}
FAMILIES = {
    "qwen3": TEXT,
    "qwen3_moe": TEXT,
    "qwen3_vl": {"text": {**TEXT, "num_hidden_layers": 2}, "vision": {"out_hidden_size": 64}},
}


@dataclass(frozen=True)
class Cell:
    family: str
    layout: str
    dtype: str
    recompute: str
    lora: bool = False


CELLS = (
    Cell("qwen3", "tp2", "float32", "none"),
    Cell("qwen3", "tp2", "float32", "selective"),
    Cell("qwen3", "tp2-sp", "float32", "none"),
    Cell("qwen3", "tp2-sp", "float32", "full"),
    Cell("qwen3", "pp2", "float32", "selective"),
    Cell("qwen3", "pp2", "bfloat16", "full"),
    Cell("qwen3", "pp2-vpp2", "float32", "full"),
    Cell("qwen3", "cp2-ulysses", "float32", "selective"),
    Cell("qwen3", "dp2", "bfloat16", "selective"),
    Cell("qwen3_moe", "ep2", "float32", "selective"),
    Cell("qwen3_moe", "dp2", "float32", "full"),
    Cell("qwen3_vl", "pp2", "float32", "selective"),
    Cell("qwen3", "tp2-sp", "float32", "none", lora=True),
)
RANK, TARGETS, COLUMNS = 4, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], ("q_proj", "v_proj", "up_proj")
LORA = {"only": LoraConfig(r=RANK, target_modules=TARGETS)}


def sizes_of(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each storage."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def sends_uncounted(real):
    """Wire.send of a copy that no mode sees."""

    def send(self, x, group, target):
        with _disable_current_modes():
            copy = x.detach().clone()
        real(self, copy, group, target)

    return send


def landed(x: Tensor, device: torch.device) -> Tensor:
    """`sent`, as a GPU has it: a copy, where a CPU has a part of the packed row itself."""
    return x.clone(memory_format=torch.contiguous_format)


def samples(engine: Engine, count: int) -> tuple[list[Sample], float]:
    """Documents, each with an image where the model sees, and the share of visual tokens."""
    draw, made, visual, reader = np.random.default_rng(0), [], 0, engine.adapter.reader
    for _ in range(count):
        ids, media = draw.integers(0, 90, DOCUMENT).tolist(), []
        if reader is not None:
            media = [Image(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8))]
            (length,) = reader.run_lengths(reader.grid(media[0]))
            known = engine.adapter.ids
            ids[: length + 2] = [known.start, *[known.image] * length, known.end]
            visual += length
        fields = {"advantage": torch.ones(DOCUMENT), "old_logprob": torch.full((DOCUMENT,), -4.5)}
        made.append(Sample(ids, [1] * DOCUMENT, torch.ones(DOCUMENT), fields, media=media))
    return made, visual / (count * DOCUMENT)


def held(backend) -> dict[str, list[Tensor]]:
    """What a rank always holds, by the model's names."""
    parameters = list(backend.parameters.values())
    state = [
        value
        for optimizer in backend.optimizers.values()
        for slots in optimizer.state.values()
        for value in slots.values()
    ]
    return {
        "parameters": [*parameters, *backend.masters.values()],
        "gradients": [*backend.wide.values(), *(p.grad for p in parameters if p.grad is not None)],
        "optimizer": [value for value in state if isinstance(value, Tensor) and value.dim()],
    }


@dataclass(frozen=True)
class Found:
    """Of one rank."""

    sizes: dict[str, int]  # bytes always there, by name
    call: int
    step: int
    model: StageMemory
    stage: int
    small: tuple[int, int]  # weights that the model leaves out: all, and those that train
    cut_factors: int  # elements of LoRA's factors that are on other tensor-parallel ranks
    rows: int  # most rows that experts here got in a layer, beyond the mean


def measure(folder, cell: Cell) -> Found:
    layout = parse_layout(cell.layout)
    engine = Engine.build(
        EngineConfig(
            f"{folder}/{cell.family}", layout=layout, backend="megatron", dtype=cell.dtype, recompute=cell.recompute,
            max_tokens_per_rank=TOKENS, lora=LORA if cell.lora else None,
        )
    )  # fmt: skip
    steps = 3 if layout.pp > 1 else 1
    batch, share = samples(engine, TOKENS // DOCUMENT * steps * layout.dp * layout.cp)
    objective, adam = Objective("ppo", clip=0.2), AdamW(lr=1e-3, clip_norm=1.0)
    engine.forward_backward(batch, objective)
    engine.optim_step(adam)
    rows = crowd(engine, batch) if layout.ep > 1 else 0
    engine.forward_backward(batch, objective)  # gradients are there, as in every micro-step but the first
    sizes = {name: sum(sizes_of(tensors).values()) for name, tensors in held(engine.backend).items()}
    named = engine.backend.parameters
    small = [p for name, p in named.items() if (p.dim() < 2 or "pos_embed" in name) and "lora_" not in name]
    factors = [p for name, p in named.items() if "lora_" in name and engine.backend.table[name].axis == "tp"]
    peaks = [peak(engine, lambda: engine.forward_backward(batch, objective)) for _ in range(3 if layout.tp > 1 else 1)]
    return Found(
        sizes,
        min(peaks),
        peak(engine, lambda: engine.optim_step(adam)),
        engine.planner.memory_of(share),
        engine.planner.stage,
        (sum(p.numel() for p in small), sum(p.numel() for p in small if p.requires_grad)),
        sum(p.numel() for p in factors) * (layout.tp - 1),
        rows,
    )


def crowd(engine: Engine, batch: list[Sample]) -> int:
    """Rows beyond the mean that this rank's experts get in the layer where they get most."""
    routes = torch.cat([out["routed_experts"] for out in engine.forward(batch, outputs=("routed_experts",))])
    chosen, ranks = routes.movedim(1, 0).flatten(1), engine.config.layout.ep  # [layers, T k]
    own = (chosen // (engine.adapter.model.config.num_experts // ranks) == engine.rank).sum(1)
    return int(own.max()) - chosen.shape[1] // ranks


def overlapped(folder) -> Found:
    """Ulysses over a transport that leaves the SMs alone."""
    with replaced("longspan.engine.steps:make_transport", lambda real: lambda group, device: Direct()):
        return measure(folder, CP)


def peak(engine: Engine, run) -> int:
    with (
        replaced("longspan.engine.megatron.pipeline:Wire.send", sends_uncounted),
        replaced("longspan.layout.shard:sent", lambda real: landed),
        Live([x for tensors in held(engine.backend).values() for x in tensors]) as live,
    ):
        run()
    return live.peak


AUTO = ("tp2-sp", "pp2")


def auto(folder, layout: str):
    """max_tokens_per_rank="auto" as a GPU of 1 GiB would have it, and a call that is planned with H200's constants."""
    engine = Engine.build(
        EngineConfig(f"{folder}/qwen3", layout=parse_layout(layout), backend="megatron", machine="h200")
    )
    report = engine.forward_backward(samples(engine, 12)[0], Objective("ppo", clip=0.2))
    planner = engine.planner
    planner.room_gib = 1.0
    budget = planner.limits([1]).budget
    planner.room_gib, planner._budgets = 0.3, {}
    try:
        planner.limits([1])
    except UserError as error:
        return budget, planner.memory_of(0.0).peak(budget), str(error), report


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family, over in FAMILIES.items():
        build_random(tiny(family, **over), torch.float32, 0).save_pretrained(folder / family)
    results = launch(
        lambda: ([measure(folder, cell) for cell in CELLS], [auto(folder, name) for name in AUTO], overlapped(folder)),
        ranks=2,
        timeout_s=120,
    )
    found = {cell: [result[0][number] for result in results] for number, cell in enumerate(CELLS)}
    return found | {"auto": [result[1] for result in results], "overlapped": [result[2] for result in results]}


@dataclass(frozen=True)
class Figure:
    """Bytes: what lives, what the model says, how much it leaves out and counts too often at most."""

    measured: int
    said: float
    less: float
    more: float

    @property
    def holds(self) -> bool:
        return self.said - self.more <= self.measured <= self.said + self.less


def always_there(found: Found, model: StageMemory) -> dict[str, Figure]:
    """By name: parameters, gradients, optimizer."""
    real, (small, trained) = found.model, found.small
    wide = max(4, real.bytes_per_value)
    both = wide + (real.bytes_per_value if real.bytes_per_value < wide else 0)
    frozen_share = small / (found.sizes["parameters"] / both) if real.lora_columns + real.lora_rows else 0.0
    figures = {}
    for name, count, size in (
        ("parameters", small, both),
        ("gradients", trained, wide),
        ("optimizer", trained, 2 * wide / real.data_ranks),
    ):
        said = model.static(found.stage)[name]
        less = size * count + ELEMENTS * 2 * wide + frozen_share * found.sizes["gradients"] * size / wide
        figures[name] = Figure(found.sizes[name], said, less, size * found.cut_factors + ELEMENTS * 2 * wide)
    return figures


def of_a_call(cell: Cell, found: Found, model: StageMemory, static: dict[str, Figure]) -> Figure:
    """On a CPU the head's rows take two more copies of its logits. A gradient that leaves is not counted."""
    real, b, shape = found.model, found.model.bytes_per_value, found.model.shape
    own, vision = real.cut.own(shape), shape.vision
    moments = model.moments(TOKENS, parse_layout(cell.layout).cp, rank=found.stage)
    sums = {name: sum(parts.values()) for name, parts in moments.items() if name != "step"}
    sums["head"] = sums.get("head", -float("inf")) + 2 * TOKENS * shape.vocab * 4
    hidden = TOKENS * real.cut.rows * own.hidden * b
    said = sum(figure.said for figure in static.values()) + max(sums.values()) - (found.stage > 0) * hidden
    patches = TOKENS * real.visual_share * vision.merge if vision else 0.0
    less = sum(figure.less for figure in static.values())
    less += max(0, found.rows) * ((4 * own.hidden + 4 * own.expert_mlp) * b + 3 * 8)
    less += TOKENS * (4 * shape.experts + 24 * shape.experts_per_token)
    flights = real.flights[found.stage]
    more = sum(figure.more for figure in static.values())
    more += TOKENS * ((FIELDS - PRESENT) * flights + 16 * shape.experts_per_token)
    more += max(0, -found.rows) * ((4 * own.hidden + 4 * own.expert_mlp) * b + 3 * 8)
    more += ((found.stage < real.cut.pp - 1) + (real.cut.vpp > 1)) * hidden
    more += flights * patches * b * vision.hidden if vision and found.stage == 0 else 0.0
    if cell.lora:
        columns, rows = (sum(name in COLUMNS for name in TARGETS), sum(name not in COLUMNS for name in TARGETS))
        products = columns * (1 - real.cut.rows) + rows * (1 - 1 / real.cut.tp)
        less += TOKENS * shape.layers * RANK * b * products
        more += TOKENS * real.cut.rows * (own.hidden * (4 + b) + 4)
    return Figure(found.call, said, less, more)


def of_a_step(found: Found, model: StageMemory, static: dict[str, Figure]) -> Figure:
    said = sum(figure.said for figure in static.values()) + sum(
        model.moments(TOKENS, rank=found.stage)["step"].values()
    )
    slices = (3 / found.model.data_ranks - 1) * max(4, found.model.bytes_per_value)  # the accumulators are gone
    less = sum(figure.less for figure in static.values()) + slices * found.small[1]
    more = sum(figure.more for figure in static.values()) + slices * found.cut_factors
    return Figure(found.step, said, less, more)


def figures(cell: Cell, found: Found, model: StageMemory) -> dict[str, Figure]:
    """`model` is found.model, or one with a fault in it: bounds are of the former."""
    static = always_there(found, model)
    return static | {"call": of_a_call(cell, found, model, static), "step": of_a_step(found, model, static)}


@installed
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_model_holds_what_each_rank_holds(measured, cell):
    for found in measured[cell]:
        for name, it in figures(cell, found, found.model).items():
            print(
                f"{cell.layout} {cell.recompute} {cell.dtype} stage {found.stage} {name}: {it.measured} said / measured "
                f"{it.said / it.measured:.4f}, more by {it.measured - it.said:.0f}, in -{it.more:.0f} to {it.less:.0f}"
            )
            assert it.holds, (name, it)


TP, PP = Cell("qwen3", "tp2", "float32", "selective"), Cell("qwen3", "pp2", "float32", "selective")
CP, SP = Cell("qwen3", "cp2-ulysses", "float32", "selective"), Cell("qwen3", "tp2-sp", "float32", "none")
MOE, BF16 = Cell("qwen3_moe", "ep2", "float32", "selective"), Cell("qwen3", "dp2", "bfloat16", "selective")
WRONG_SETTINGS = {
    "one micro-step in flight": (PP, {"flights": (1, 1)}),
    "interleaved as if not": (Cell("qwen3", "pp2-vpp2", "float32", "full"), {"flights": (2, 1)}),
    "tp cuts nothing": (TP, {"cut": WHOLE}),
    "experts repeated": (MOE, {"ep": 1}),
    "masters forgotten": (BF16, {"bytes_per_value": 4}),
}
WRONG_TERMS = {  # each at most a tenth of its call
    "out is made again": (BF16, "_again", lambda real: lambda self, how, size: real(self, how, size) + self._spared(how)),
    "v is not exchanged": (CP, "_attention", lambda real: lambda self, size: real(self, 1)),
    "what is exchanged stays": (CP, "backward", lambda real: lambda self, *a, **k: real(self, *a, **k) + 8 * self._input / 2),
    "a norm's input is a copy": (TP, "_norm", lambda real: lambda self, *a, copied=True: real(self, *a)),
    "embeddings stay whole": (SP, "between", lambda real: lambda self, *, sends: real(self, sends=sends) + self._input),
    "nothing is sent on": (PP, "between", lambda real: lambda self, *, sends: real(self, sends=False)),
    "experts exchange in place": (MOE, "_experts_alive", lambda real: lambda self: real(self) / 2),
}  # fmt: skip


@installed
def test_overlapped_ulysses_holds_what_the_plain_one_is_said_to(measured):
    """A layer that runs again keeps one output either way, and makes both again. Control: a second one kept."""
    for found in measured["overlapped"]:
        call = figures(CP, found, found.model)["call"]
        assert call.holds, call
        own = found.model.cut.own(found.model.shape)
        second = TOKENS * own.layers * own.heads * own.head_dim * found.model.bytes_per_value
        assert not dataclasses.replace(call, said=call.said + second).holds


@installed
@pytest.mark.parametrize("fault", WRONG_SETTINGS)
def test_a_wrong_setting_is_found(measured, fault):
    cell, wrong = WRONG_SETTINGS[fault]
    made = [figures(cell, found, dataclasses.replace(found.model, **wrong)) for found in measured[cell]]
    assert not all(figure.holds for of_rank in made for figure in of_rank.values())


@installed
@pytest.mark.parametrize("fault", WRONG_TERMS)
def test_a_wrong_term_is_found(measured, fault):
    cell, name, make = WRONG_TERMS[fault]
    with replaced(f"longspan.data.stage_activations:StageActivations.{name}", make):
        calls = [figures(cell, found, dataclasses.replace(found.model))["call"] for found in measured[cell]]
    assert not all(call.holds for call in calls)
    assert all(abs(call.said / call.measured - 1) < 0.1 for call in calls), "it is a small one"


@installed
def test_sequence_parallelism_saves_what_it_is_said_to(measured):
    plain, cut = (measured[Cell("qwen3", name, "float32", "none")][0] for name in ("tp2", "tp2-sp"))
    saved = plain.call - cut.call
    said = [figures(Cell("qwen3", "tp2", "float32", "none"), found, found.model)["call"].said for found in (plain, cut)]
    assert saved > 0.1 * plain.call and abs(said[0] - said[1] - saved) <= TOKENS * (FIELDS - PRESENT)


@installed
@pytest.mark.parametrize("number", range(len(AUTO)), ids=AUTO)
def test_an_auto_budget_is_what_the_fullest_stage_holds(measured, number):
    (budget, peak, refusal, report), (other, *_) = (found[number] for found in measured["auto"])
    assert budget == other, "every rank plans alike, also where it holds another stage"
    assert peak <= (0.94 - 0.6) * 2**30 < 1.02 * peak
    assert "0.3 GiB a GPU are too little for this model on tp=" in refusal and "more tp, pp, ep or dp" in refusal
    assert 0 <= report["plan/idle_share"] < 1 and report["plan/predicted_s"] > 0
    if AUTO[number] == "pp2":
        assert 0 < report["plan/bubble_share"] <= report["plan/idle_share"] + 1e-9
    else:
        assert "plan/bubble_share" not in report
