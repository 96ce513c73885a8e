"""mixer="auto": the cheapest that the model can run at the CP size, by the cost model."""

from dataclasses import replace

import pytest
from peft import LoraConfig

from longspan import Engine, EngineConfig
from longspan.data.cost import CostModel
from longspan.data.machine import Machine
from longspan.data.shape import ModelShape
from longspan.data.stage_memory import Trained
from longspan.engine import planning
from longspan.engine.memory_model import lora_widths, trained_of
from longspan.engine.mixer_choice import choose_mixer, mixer_layouts
from longspan.layout import Layout
from longspan.models.loading import load_model
from longspan.models.lora import add_adapters

H200 = Machine.load("h200")


def choose(heads: int, kv_heads: int, *, cp: int, layout: Layout | None = None, **facts):
    shape = ModelShape(hidden=2048, layers=28, heads=heads, kv_heads=kv_heads, head_dim=128, mlp=6144, vocab=151936)

    def cost(each: Layout) -> CostModel:
        return CostModel(shape, H200, cp, mixer=each.mixer, index=each.index, ulysses=each.ulysses)

    known = {"recurrent": False, "windowed": False} | facts
    found = choose_mixer(layout or Layout(cp=cp), cost, size=cp, heads=heads, **known)
    return found, cost


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "facts", "mixer"),
    [
        (16, 8, 2, {}, "ulysses"),
        (32, 8, 8, {}, "ulysses"),
        (14, 2, 4, {}, "hybrid"),  # 14 heads cannot be dealt to 4 ranks, but to 2
        (15, 3, 4, {}, "ring"),
        (15, 3, 4, {"windowed": True}, "gather"),
        (15, 15, 4, {"recurrent": True}, "ring"),  # both in token order; passing keys is cheaper than gathering them
        (64, 1, 2, {}, "gather"),  # one KV head: gathering its keys costs less than swapping 64 heads
    ],
)
def test_the_cheapest_that_runs(heads, kv_heads, cp, facts, mixer):
    found, cost = choose(heads, kv_heads, cp=cp, **facts)
    assert found.layout.mixer == mixer, found.why
    assert found.why.startswith(f"mixer {mixer}: the cheapest at cp={cp}")
    best, length = found.layout, 8192 * cp
    others, _ = mixer_layouts(Layout(cp=cp), size=cp, heads=heads, **({"recurrent": False, "windowed": False} | facts))
    assert cost(best)(length, cp) == min(cost(each)(length, cp) for each in others)


def test_why_the_others_cannot():
    found, _ = choose(14, 2, cp=4)
    assert "ulysses cannot run (ulysses=4 needs query heads divisible by 4, got 14)" in found.why
    found, _ = choose(15, 3, cp=4)
    assert "hybrid cannot run (no part of cp=4 divides 15 heads)" in found.why


def test_a_named_mixer_and_one_rank_are_left_alone():
    for layout in (Layout(cp=4, mixer="gather"), Layout()):
        found, _ = choose(16, 8, cp=layout.cp, layout=layout)
        assert found.layout == layout and found.why == ""


def test_an_index_asked_for_is_kept():
    found, _ = choose(14, 2, cp=4, layout=Layout(cp=4, index="contiguous"))
    assert found.layout.index == "contiguous" and found.layout.mixer == "hybrid", found.why


def test_an_engine_chooses_once(monkeypatch):
    made = []
    monkeypatch.setattr(
        planning, "choose_mixer", lambda *args, **facts: made.append(facts["size"]) or choose_mixer(*args, **facts)
    )
    engine = Engine.build(EngineConfig("tiny:qwen3", max_tokens_per_rank=64))
    assert made == [1] and engine.planner.why == ""


@pytest.mark.parametrize(
    ("family", "settings", "trained"),
    [
        ("qwen3_vl", {}, Trained()),
        ("qwen3_vl", {"freeze": ("vision", "merger")}, Trained(vision=0.0)),
        ("qwen3_vl", {"freeze": ("embeddings",)}, Trained(embeddings=False)),
        ("qwen3", {"freeze": ("language",)}, Trained(layers=0.0, vision=0.0)),
    ],
)
def test_what_trains_is_counted_by_name(family, settings, trained):
    """As under megatron, where a rank has its own part of the weights only."""
    adapter, _ = load_model(f"tiny:{family}")
    found = trained_of(EngineConfig(f"tiny:{family}", **settings), adapter)
    assert found == (replace(trained, vision=0.0) if family == "qwen3" else trained)


def test_the_width_of_adapters_is_told_by_how_their_linears_are_cut():
    adapter, _ = load_model("tiny:qwen3")  # 32 hidden, 4 and 2 heads of 8, 48 columns
    add_adapters(adapter, {"only": LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"])}, 0)
    assert lora_widths(adapter.units()[0]) == (2 * (32 + 4), 48 + 4)
