"""Cost and memory models: checked against measured steps of an H200 and against what autograd really allocates on
CPU."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from longspan.data.cost import CostModel, row_cost
from longspan.data.machine import Machine
from longspan.data.memory import GIB, MemoryModel
from longspan.data.plan import Limits, lower_bound, makespan
from longspan.data.planner import make_plan
from longspan.data.shape import ModelShape, VisionShape
from longspan.errors import UserError
from longspan.models.tiny import tiny

H200 = Machine.load("h200")
QWEN3 = ModelShape(hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=6144, vocab=151936, tied=True)
MIX = [16384, *[8192] * 2, *[4096] * 4, *[2048] * 4, *[1024] * 4, *[512] * 8]


def test_measured_steps_of_an_h200():
    """GPU.md, whole step of Qwen3-1.7B, layers compiled, full recomputation: 12.9k and 32.8k tokens/s at 64k tokens."""
    cost = CostModel(QWEN3, H200, recompute="full")
    assert QWEN3.weights == pytest.approx(1.72e9, rel=0.01)
    assert 65536 / cost(65536, 1) == pytest.approx(12_900, rel=0.08)
    assert sum(MIX) / row_cost(cost, MIX, 1).total_s == pytest.approx(32_800, rel=0.08)


@pytest.mark.parametrize("mixer", ["ulysses", "ring", "gather", "hybrid"])
def test_cp_costs_work_and_saves_time(mixer):
    cost = CostModel(QWEN3, H200, num_ranks=8, mixer=mixer, index="zigzag", ulysses=2)
    for length in (1000, 65536, 1_000_000):
        times = [cost(length, size) for size in (1, 2, 4, 8)]
        works = [size * time for size, time in zip((1, 2, 4, 8), times, strict=True)]
        assert times == sorted(times, reverse=True) and works == sorted(works)
    overhead = [8 * cost(length, 8) / cost(length, 1) for length in (1000, 65536, 1_000_000)]
    assert overhead == sorted(overhead, reverse=True)  # exchange weighs less in long documents


def test_parts_add_up_and_each_answers_its_setting():
    cost = CostModel(QWEN3, H200)
    lengths = np.array([1000.0, 50_000.0])
    assert np.allclose(sum(cost.parts(lengths, 2).values()), cost.times(lengths, 2))
    assert cost(50_000, 2) == cost.times(lengths, 2)[1]
    half = dataclasses.replace(cost, trained_share=0.5)
    assert half.parts(lengths, 1)["head"] == pytest.approx(cost.parts(lengths, 1)["head"] / 2)
    assert dataclasses.replace(cost, recompute="none")(5000, 1) < cost(5000, 1)
    contiguous = dataclasses.replace(cost, mixer="ring")
    balanced = dataclasses.replace(cost, mixer="ring", index="zigzag")
    assert contiguous(50_000, 4) > balanced(50_000, 4)
    window = dataclasses.replace(QWEN3, window=4096, windowed_layers=28)
    assert CostModel(window, H200)(65536, 1) < 0.5 * cost(65536, 1)
    moe = dataclasses.replace(QWEN3, experts=64, experts_per_token=4, expert_mlp=1024)
    assert CostModel(moe, H200, ep=8).parts(lengths, 1)["experts"].min() > 0
    tower = VisionShape(hidden=1024, layers=24, heads=16, mlp=4096)
    seeing = CostModel(dataclasses.replace(QWEN3, vision=tower), H200, visual_share=0.5)
    assert seeing.parts(lengths, 1)["vision"].min() > 0
    hybrid = dataclasses.replace(
        QWEN3, linear_layers=21, linear_key_heads=16, linear_value_heads=32, linear_head_dim=128
    )
    state, heads = (CostModel(hybrid, H200, linear=kind) for kind in ("state", "heads"))
    assert state.parts(lengths, 4)["linear"].min() > heads.parts(lengths, 4)["linear"].min()


def test_plans_with_a_cost_model_are_those_with_the_same_function():
    cost = CostModel(QWEN3, H200, num_ranks=8)
    lengths = np.random.default_rng(0).integers(100, 60_000, 64).tolist()
    limits = Limits(8, 1, 32768, sizes=(1, 2, 4, 8))
    plan = make_plan(lengths, limits, cost)
    assert plan == make_plan(lengths, limits, lambda length, size: cost(length, size), step_cost=cost.step_s)
    assert makespan(plan, lengths, cost) <= 1.1 * lower_bound(lengths, limits, cost)


def test_shapes_come_from_configs():
    moe = ModelShape.from_config(tiny("qwen3_moe").to_dict())
    assert moe.experts == 4 and moe.experts_per_token == 2 and moe.vocab == 97 and moe.kv_heads == 2
    vlm = ModelShape.from_config(tiny("qwen3_vl").to_dict())
    assert vlm.vision is not None and vlm.vision.layers == 2 and vlm.vision.merge == 4 and vlm.layers == 2
    assert ModelShape.from_config(tiny("mistral").to_dict()).window == 8
    for family in ("llama", "qwen3"):
        config = tiny(family)
        model = AutoModelForCausalLM.from_config(config)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert ModelShape.from_config(config.to_dict()).weights == pytest.approx(count, rel=0.02)
    with pytest.raises(UserError, match="no hidden_size"):
        ModelShape.from_config({"model_type": "x"})


def test_machine_files(tmp_path):
    path = tmp_path / "mine.json"
    H200.save(path)
    assert Machine.load(path) == H200
    with pytest.raises(UserError, match=r"no machine constants.*Shipped: \['h200'\]"):
        Machine.load("h9000")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if k != "node_ranks"}))
    with pytest.raises(UserError, match=r"missing names \['node_ranks'\]"):
        Machine.load(path)
    path.write_text(json.dumps(values | {"matmul_flops": -1}))
    with pytest.raises(UserError, match="matmul_flops is -1"):
        Machine.load(path)
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        Machine.load(path)


def allocated_peak(run) -> int:
    """Most bytes alive at once of all that `run` allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())


@pytest.mark.parametrize(
    ("family", "recompute", "dtype"),
    [
        ("qwen3", "none", torch.bfloat16),
        ("qwen3", "full", torch.bfloat16),
        ("llama", "full", torch.float32),
        ("qwen3_moe", "none", torch.float32),
    ],
)
def test_activations_against_what_autograd_allocates(family, recompute, dtype):
    """Never below the true peak, and at most 10 % above it."""
    tokens = 2048  # so many that the weights do not matter
    config = tiny(family, hidden_size=64, intermediate_size=160, head_dim=16, num_hidden_layers=6)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    ids = torch.zeros(1, tokens, dtype=torch.long)

    def run() -> None:
        model.model(ids, use_cache=False).last_hidden_state.sum().backward()

    run()
    model.zero_grad()
    shape = ModelShape.from_config(config.to_dict())
    parts = MemoryModel(shape, 1, recompute, bytes_per_value=dtype.itemsize).moments(tokens)["layer"]
    outside = sum(p.numel() * p.element_size() for p in model.parameters())  # gradients, in the model's dtype
    outside += tokens * 2 * 16 * dtype.itemsize  # rope's cos and sin
    if recompute == "none":
        outside += tokens * 64 * (4 + 2 * dtype.itemsize)  # the final norm
    predicted, true = (parts["activations"] + parts["layer"] + outside) * 1.02, allocated_peak(run)
    assert true <= predicted <= 1.1 * true, predicted / true


def test_memory_grows_with_tokens_and_shrinks_with_ranks_and_policy():
    peaks = [MemoryModel(QWEN3, 1, policy).peak(65536) for policy in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert MemoryModel(QWEN3, 8).peak(4096) < MemoryModel(QWEN3, 1).peak(4096)
    assert MemoryModel(QWEN3, 1, offload=("optimizer",)).peak(4096) < MemoryModel(QWEN3, 1).peak(4096)
    moe = dataclasses.replace(QWEN3, experts=64, experts_per_token=4, expert_mlp=1024)
    assert MemoryModel(moe, 8, ep=8).peak(4096) < MemoryModel(moe, 8).peak(4096)
    assert MemoryModel(QWEN3, 1, "full", mlp_tile=4096).peak(65536) < MemoryModel(QWEN3, 1, "full").peak(65536)
    model = MemoryModel(QWEN3, 8)
    budget = model.budget(139)
    assert model.peak(budget) <= (0.94 * 139 - 0.6) * GIB < model.peak(budget + 4096)


SMALL = dataclasses.replace(QWEN3, hidden=1024, mlp=3072)
TOWER = VisionShape(hidden=1024, layers=24, heads=16, mlp=4096, deepstack=3)


@pytest.mark.parametrize(
    ("shape", "tokens", "settings", "gib"),
    [
        (SMALL, 131072, {"recompute": "selective"}, 40.86),
        (QWEN3, 65536, {"recompute": "selective", "compile": True}, 74.16),
        (QWEN3, 65536, {"recompute": "selective"}, 49.51),
        (QWEN3, 131072, {"recompute": "full", "compile": True}, 51.38),
        (QWEN3, 16384, {"recompute": "none"}, 77.09),
        (dataclasses.replace(QWEN3, vision=TOWER), 32768, {"recompute": "selective", "visual_share": 0.5}, 53.08),
    ],
)
def test_measured_peaks_of_an_h200(shape, tokens, settings, gib):
    """benchmarks/results/memory_model.json: never below the allocator's peak, at most 4 % above."""
    assert gib <= MemoryModel(shape, 1, **settings).peak(tokens) / GIB <= 1.04 * gib


def test_measured_peaks_of_tiled_rows():
    """benchmarks/results/longest.json and docs/log.md: steps of one micro-step, which has no gradients when activations peak. Control:
    layers that hold their MLPs whole."""

    def said(tokens, tile):
        model = MemoryModel(QWEN3, 1, "full", compile=True, mlp_tile=tile)
        return (model.peak(tokens) - model.parts(tokens)["gradients"]) / GIB

    assert 104.0 <= said(524288, 16384) <= 1.04 * 104.0 and 32.12 <= said(65536, 16384) <= 1.04 * 32.12
    assert said(524288, 0) > 1.1 * 104.0


def test_too_little_memory_says_what_would_do():
    with pytest.raises(UserError, match=r"20\.0 GiB a GPU are too little.*Use at least .* GiB, or at least \d+ ranks"):
        MemoryModel(QWEN3, 1).budget(20)
    with pytest.raises(UserError, match="more ranks would not help"):
        MemoryModel(QWEN3, 64).budget(2)
