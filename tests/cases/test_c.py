"""Kind C, dispatch: the same number of micro-steps on all ranks, outputs in the caller's order, partial batches."""

import pytest
from kit import LIMIT, Answer, Question, ask, check, distance, rows, truth

from longspan.data import Plan
from longspan.engine import Engine, EngineConfig
from longspan.launch import launch
from longspan.layout import Layout
from longspan.rl import Grpo, Loss, Prompt
from longspan.rl.evaluate import evaluate
from longspan.rl.rollout import EmbeddedSampler

UNEVEN = Question(rows([95] * 5 + [20] * 5))
BUDGET = 100
QUESTIONS = {
    f"c7 {count}": Question(rows(range(3, 3 + count)), layouts=("dp4",), fault="output-order" if count > 4 else None)
    for count in (1, 3, 5, 9)
}


def uneven() -> tuple[Answer, list[int]]:
    engine = Engine.build(
        EngineConfig("tiny:qwen3", Layout(dp=2), dtype="float64", value_head=True, max_tokens_per_rank=BUDGET)
    )
    plans: list[Plan] = []
    plan = engine.planner.plan
    engine.planner.plan = lambda batch: plans.append(plan(batch)) or plans[-1]
    logprob = [out["logprob"] for out in engine.forward(UNEVEN.samples)]
    metrics = engine.forward_backward(UNEVEN.samples, UNEVEN.case.objective())
    steps = [len(found.micro_steps) for found in plans]
    return Answer(logprob, metrics, engine.gradients()), steps


def test_c1_ranks_with_unequal_work_run_equal_steps():
    """Five rows of 95 and five of 20 at a budget of 100: forward and training end, with the oracle's gradient."""
    results = launch(uneven, ranks=2, timeout_s=60, device="cpu")
    figure, place = distance(results[0][0], UNEVEN, truth(UNEVEN))
    assert figure <= LIMIT, place
    assert [steps for _, steps in results] == [[3, 3], [3, 3]]


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS, ranks=4)


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_c7_any_number_of_rows_comes_back_in_order(count, answers):
    check(f"c7 {count}", QUESTIONS, answers)


class Five:
    """Five held-out prompts; the reward of a response is its prompt's number."""

    eos = (3,)
    max_prompt_tokens = 6

    def train_prompt(self, index: int) -> Prompt:
        return self.eval_prompts()[index % 5]

    def eval_prompts(self) -> list[Prompt]:
        return [Prompt(str(number), tuple(range(10 + number, 14 + number + number % 2))) for number in range(5)]

    def reward(self, prompt: Prompt, response: object) -> float:
        return float(prompt.id)

    def text(self, ids: object) -> str:
        return ""


def evaluated() -> list[tuple[dict[str, float], list[list[tuple[int, ...]]]]]:
    engine = Engine.build(EngineConfig("tiny:qwen3", Layout(dp=2), dtype="float64", max_tokens_per_rank=64))
    sampler = EmbeddedSampler(engine, eos=[3])
    sampler.load(engine.state_dict())
    found = []
    for batch in (2, 1, 5):
        config = Grpo(steps=1, prompts=2, group_size=2, max_new_tokens=3, loss=Loss("ppo"), sampler_prompts=batch)
        numbers, rollouts = evaluate(sampler, Five(), config, seed=0, group=engine.mesh.all)
        found.append((numbers, [[rollout.ids for rollout in group] for group in rollouts]))
    return found


def test_c12_a_held_out_set_of_five_in_batches_of_two():
    """Nothing is rounded or dropped: the mean is over five, the rollouts are those of any other batch size."""
    first, second = launch(evaluated, ranks=2, timeout_s=60, device="cpu")
    assert first == second
    (numbers, rollouts), *others = first
    assert numbers["eval/pass@1"] == numbers["eval/greedy"] == 2.0, "four prompts would give 1.5"
    assert len(rollouts) == 5 and all(other == (numbers, rollouts) for other in others)
