"""What the planner does inside the engine, on two gloo ranks: mixer="auto", and observed against predicted."""

import dataclasses
import logging
import time

import pytest
import torch

from longspan import Engine, EngineConfig, Layout, Sample, UserError, launch
from longspan.data.machine import Machine
from longspan.data.travel import COLLECTIVES, Travel
from longspan.engine import planning


def batch(lengths=(40, 9, 23)):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in lengths:
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        samples.append(Sample(ids[:-1], ids[1:], torch.ones(length), {"advantage": torch.ones(length)}))
    return samples


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("longspan.plan").addHandler(self)
        logging.getLogger("longspan.plan").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")


def nap(seconds):
    def loss(out, fields):
        time.sleep(seconds)
        return -out.logprob

    return loss


def auto(settings):
    records = Records()
    engine = Engine.build(EngineConfig(model="tiny:qwen3", dtype="float64", max_tokens_per_rank=40, **settings))
    engine.forward_backward(batch(), nap(0))
    return engine.mesh.layout, engine.planner.why, records.said


def test_auto_takes_the_cheapest_mixer_and_says_why(tmp_path):
    layout, why, said = launch(auto, {"layout": Layout(cp=2)}, ranks=2, timeout_s=60)[0]
    assert layout.mixer == "ulysses" and layout.index == "contiguous"
    assert (
        "mixer ulysses: the cheapest at cp=2 for a row of 80 tokens" in why
        and "; ring " in why
        and "hybrid cannot" in why
    )
    assert said == [f"INFO {why}"]
    slow = tmp_path / "slow.json"  # the user's own constants decide
    dataclasses.replace(Machine.load("h200"), name="slow", exchange_bytes_s=1.0, memory_gib=1.0).save(slow)
    layout, why, _ = launch(auto, {"layout": Layout(cp=2), "machine": str(slow)}, ranks=2, timeout_s=60)[0]
    assert f"mixer {layout.mixer}: the cheapest" in why


def observed(machine):
    records = Records()
    engine = Engine.build(
        EngineConfig(model="tiny:qwen3", layout=Layout(dp=2), max_tokens_per_rank=64, machine=machine)
    )
    reports = [engine.forward_backward(batch(), nap(0.1)) for _ in range(5)]
    reports.append(engine.forward_backward(batch(), nap(1.5)))
    return reports, records.said


def test_a_planted_slow_step_is_reported_with_its_reason(tmp_path):
    path = tmp_path / "mine.json"
    dataclasses.replace(Machine.load("h200"), name="mine").save(path)
    (reports, said), (_, other) = launch(observed, str(path), ranks=2, timeout_s=60)
    assert not other, "one rank speaks for all"
    assert any("the first call" in text for text in said)
    assert any("waiting for other ranks" in text for text in said)
    assert "WARNING" in said[-1] and "in this call alone" in said[-1], said
    for report in reports:
        assert {"plan/predicted_s", "plan/measured_s", "plan/idle_share"} <= set(report)
    assert reports[-1]["plan/measured_s"] > 1.5
    assert 0.05 < reports[-1]["plan/predicted_s"] < 1.2, "predicted from the steady steps"


def test_a_cpu_without_constants_says_nothing():
    reports, said = launch(observed, "auto", ranks=2, timeout_s=60)[0]
    assert said == []
    assert reports[0]["plan/predicted_s"] == 0 and reports[-1]["plan/predicted_s"] > 0


def budgets():
    engine = Engine.build(EngineConfig(model="tiny:qwen3_vl"))
    planner = engine.planner
    on_cpu = planner.limits([20000]).budget
    planner.room_gib = 1.2  # as a GPU would say
    text, seeing = planner.limits([1]).budget, planner.limits([1], 0.49).budget
    planner.room_gib, planner._budgets = 0.5, {}
    try:
        planner.limits([1])
    except UserError as error:
        return on_cpu, text, seeing, planner.memory_of(0.5).peak(seeing), str(error)


def test_auto_budget_is_what_the_memory_model_says():
    on_cpu, text, seeing, peak, refusal = launch(budgets, ranks=1, timeout_s=60)[0]
    assert on_cpu == 10000 * 2 and seeing < text
    assert peak <= (0.94 * 1.2 - 0.6) * 2**30
    assert "0.5 GiB a GPU are too little for this model on 1 ranks" in refusal and "Use at least" in refusal


def shares():
    """Memory models made over calls whose shares of visual tokens differ a little, and those shares."""
    made, real, seen = [], planning.memory_model, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "memory_model", lambda *given: made.append(given[-1]) or real(*given))
        engine = Engine.build(EngineConfig(model="tiny:qwen3_vl"))
    planner, engine.planner.room_gib = engine.planner, 1.2  # as a GPU would say
    for length in (90, 100, 110):
        admitted = engine._admit(batch((length,)), (), {})
        admitted = dataclasses.replace(admitted, media_tokens=((4,),))
        plan = planner.plan(admitted)
        assert planner.expect(admitted, plan).peak_gib == engine.reductions._peak_gib(admitted, plan.micro_steps[0][0])
        seen.append(4 / length)
    return made, seen


def test_a_memory_model_is_made_once_for_all_shares_that_are_rounded_alike():
    made, seen = launch(shares, ranks=1, timeout_s=60)[0]
    assert len(set(seen)) == 3 and made == [3 / 64], "every parameter is counted for each"
    assert all(2 / 64 < share <= 3 / 64 for share in seen)


def travels():
    """The engine's travel as it is here, and as GPUs that reach each other would have it; what a call says of its memory then."""
    settings = {"model": "tiny:qwen3", "max_tokens_per_rank": 40}
    plain = Engine.build(EngineConfig(layout=Layout(cp=2, mixer="ulysses"), **settings)).planner.travel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "symmetric_refusal", lambda group, device: None)
        engine = Engine.build(EngineConfig(layout=Layout(cp=2, mixer="ulysses"), **settings))
        dynamic = Engine.build(EngineConfig(layout=Layout(dp=2, mixer="ring"), dynamic_cp=True, **settings))
    planner, seen = engine.planner, []
    planner.room_gib = 1.2  # as a GPU would say
    expect = planner.expect
    planner.expect = lambda *call: seen.append(expect(*call)) or seen[-1]
    engine.forward_backward(batch(), nap(0))
    engine.forward_backward(batch((8,)), nap(0))
    model = planner.memory_of(0.0)
    return plain, [planner.travel, dynamic.planner.travel], seen, planner.buffers_gib, model


def test_an_engine_knows_how_its_attention_travels():
    over = Travel("ulysses", symmetric=True)
    for plain, found, seen, held, model in launch(travels, ranks=2, timeout_s=60):
        assert plain == COLLECTIVES
        assert found == [over, Travel("ring", symmetric=True, sizes=(1, 2))]
        assert [each.buffers_gib * 2**30 for each in seen] == [model.buffers(36, 2), model.buffers(4, 2)]
        assert held == seen[0].buffers_gib > seen[1].buffers_gib > 0, "buffers only grow"
        for expected, tokens in zip(seen, (36, 4), strict=True):
            assert expected.peak_gib * 2**30 == pytest.approx(model.peak(tokens, 2) - model.buffers(tokens, 2))
