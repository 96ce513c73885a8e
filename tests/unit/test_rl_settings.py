"""Settings of the loops: schedules, and every relation between sizes refused at construction with names and values
(C10, O1).
"""

import re
from dataclasses import replace

import pytest

from longspan import AdamW, EngineConfig, Layout
from longspan.data import Limits, make_plan
from longspan.errors import UserError
from longspan.rl import Grpo, Loss, RunConfig, Schedule, Supervised
from longspan.rl.config import check_start

GOOD = {"steps": 4, "prompts": 8, "group_size": 4, "max_new_tokens": 2, "loss": Loss("ppo", {"clip": 0.2})}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mini_batch_prompts": 16}, "prompts=8 must be a multiple of mini_batch_prompts=16.*Use prompts=16"),
        ({"mini_batch_prompts": 3}, "prompts=8 must be a multiple of mini_batch_prompts=3.*Use prompts=9"),
        ({"mini_batch_prompts": 0}, "mini_batch_prompts=0 must be at least 1"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"prompts": 0}, "prompts=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"eval_samples": 0}, "eval_samples=0"),
        ({"sampler_prompts": 0}, "sampler_prompts=0"),
        ({"group_size": 1}, "group_size=1 leaves a rollout without a baseline"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"advantage": "best"}, "advantage='best' is not one of"),
        ({"old_logprob": "both"}, "old_logprob='both' must be one of"),
        ({"schedule": Schedule(warmup_steps=5)}, "schedule.warmup_steps=5 is more than the 4 optimizer steps"),
    ],
)
def test_o1_wrong_relations_are_refused_at_start(change, message):
    with pytest.raises(UserError, match=message):
        Grpo(**{**GOOD, **change})


def test_sizes_that_fit_are_taken():
    config = Grpo(**GOOD, mini_batch_prompts=2, epochs=3)
    assert config.updates == 12
    assert replace(config, schedule=Schedule(warmup_steps=48)).updates == 12
    assert Supervised(steps=2, samples=1).loss.name == "cross_entropy"


def test_loss_options_are_checked_at_construction():
    with pytest.raises(UserError, match="clip"):
        Loss("ppo", {"clip": -1.0})
    with pytest.raises(UserError):
        Loss("no_such_loss")
    with pytest.raises(UserError):
        RunConfig("x", keep_checkpoints=0)


def test_o1_longest_sample_against_the_budget():
    engine = EngineConfig("tiny:qwen3", layout=Layout(cp=2), max_tokens_per_rank=16)
    check_start(engine, longest_prompt=30, max_new_tokens=3)
    with pytest.raises(UserError, match=re.escape("33 tokens (prompt 30 + max_new_tokens 4 - 1)")) as caught:
        check_start(engine, longest_prompt=30, max_new_tokens=4)
    assert "max_tokens_per_rank=16 x cp=2 = 32" in str(caught.value)
    assert "max_tokens_per_rank to 17" in str(caught.value)


def test_c10_no_batch_is_truncated():
    """2 prompts x 4 samples on 6 data ranks: no multiple is needed, all 8 samples are planned, ranks without one run
    inert.
    """
    plan = make_plan([7] * 8, Limits(num_ranks=6, cp=1, budget=64, index="identity", sizes=None), cost=None)
    planned = sorted(sample for step in plan.micro_steps for row in step for sample in row.samples)
    assert planned == list(range(8))


def test_schedules():
    steps = 20
    ramp = [Schedule("constant", warmup_steps=4).factor(step, steps) for step in range(6)]
    assert ramp == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    linear, cosine = Schedule("linear", 0, 0.1), Schedule("cosine", 5, 0.1)
    assert [linear.factor(step, steps) for step in (0, 10, 20)] == pytest.approx([1.0, 0.55, 0.1])
    assert cosine.factor(4, steps) == cosine.factor(5, steps) == 1.0
    assert cosine.factor(steps, steps) == pytest.approx(0.1)
    falling = [cosine.factor(step, steps) for step in range(5, 21)]
    assert falling == sorted(falling, reverse=True)
    with pytest.raises(UserError, match="kind='step'"):
        Schedule("step")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"floor=2\.0"):
        Schedule("linear", 0, 2.0)
    assert AdamW(lr=1e-3).lr * linear.factor(10, steps) == pytest.approx(5.5e-4)
