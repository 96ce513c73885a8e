"""Kind A, normalisation: micro-steps, ranks, shards and several calls (cases/bugs.md)."""

import pytest
import torch
from kit import LIMIT, ZERO, Question, ask, build, changed, check, oracle, rows, truth
from torch import Tensor

from longspan.engine import SGD
from longspan.launch import launch
from longspan.objective import Fields, Objective, TokenOut
from longspan.parity import differences
from longspan.parity.cases import Case
from longspan.parity.faults import planted

CP = ("dp2-cp2-ring", "cp4-ring")
RULES = ("token", "sample", "sample_sum", "constant", "sum")
NINE_AND_ONE = rows((6, 14), ([3], range(4, 13)))
RAGGED = rows((16, 3, 9, 22), (range(5, 15), [], [8], range(0, 22, 3)))
ONE_TOKEN = rows((16,), ([11],))
LAST_PAIR = rows((16,), ([6, 7, 8, 9],))  # rank 3 of 4 keeps the chunks 3 and 4 of 8: tokens 6 to 9
POLICY = [
    changed(sample, fields={"advantage": torch.ones(len(sample)).double(), "old_logprob": own})
    for sample, own in zip(RAGGED, truth(Question(RAGGED))[0], strict=True)
]
QUESTIONS = {
    "a1": Question(NINE_AND_ONE, layouts=("cp2-ring", "dp2"), fault="denominator"),
    "a4 supervised": Question(POLICY),
    "a4 policy": Question(POLICY, Case("is", "importance_sampling")),
    "a16": Question(
        rows((5, 11, 2, 1)), Case("value", "value"), layouts=("cp2-ulysses", "dp2"), fault="value-denominator"
    ),
    "a16 beside ppo": Question(
        rows((5, 11, 2, 1)),
        Case("both", "ppo", {"clip": 0.2, "value": 0.5}),
        layouts=("cp2-ring", "dp2"),
        fault="value-denominator",
    ),
}
FOUR = {
    "a6": Question(
        RAGGED, Case("ppo", "ppo", {"clip": 0.2}), layouts=("dp2-cp2-ulysses", "dp2-cp2-ring"), fault="cp-factor"
    ),
    "a8 one token": Question(ONE_TOKEN, layouts=CP, fault="denominator-shard"),
    "a8 last pair": Question(LAST_PAIR, layouts=CP, fault="denominator-shard"),
}
STEPS, LR = 3, 0.5
STEP_LAYOUTS = ("dp4", "dp2-cp2-ulysses", "cp4-ulysses")


def stepped(layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """A10: losses and weights of three steps of plain gradient descent over the same rows."""
    engine = build("tiny:qwen3", layout, [len(sample) for sample in RAGGED], tight=True)
    losses = []
    for _ in range(STEPS):
        losses.append(engine.forward_backward(RAGGED, Objective("cross_entropy"))["loss/total"])
        engine.optim_step(SGD(lr=LR))
    return losses, engine.state_dict()


def in_calls() -> dict[str, Tensor]:
    """A2: calls a, b and c, where c has no weight, then a step."""
    engine = build("tiny:qwen3", "cp2-ring", [len(sample) for sample in RAGGED], tight=True)
    total = float(sum(sample.num_trained for sample in RAGGED))
    silent = changed(RAGGED[0], mask=torch.zeros(len(RAGGED[0])))
    for part in (RAGGED[:1], RAGGED[1:], [silent]):
        engine.forward_backward(part, Objective("cross_entropy"), denominator=total)
    engine.optim_step(SGD(lr=LR))
    return engine.state_dict()


def own_ppo(out: TokenOut, fields: Fields) -> Tensor:
    ratio = torch.exp(out.logprob - fields.old_logprob)
    return -torch.minimum(ratio * fields.advantage, ratio.clamp(0.8, 1.2) * fields.advantage)


def custom(rule: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A13: gradients of the built-in loss and of its twin."""
    engine = build("tiny:qwen3", "cp2-ring", [len(sample) for sample in RAGGED], tight=True)
    denominator = 7.0 if rule == "constant" else None
    found = []
    for loss in (Objective("ppo", clip=0.2), own_ppo):
        engine.forward_backward(RAGGED, loss, normalise=rule, denominator=denominator)
        found.append(engine.gradients())
        engine.clear_gradients()
    return found[0], found[1]


def on_four() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    found = {layout: stepped(layout) for layout in STEP_LAYOUTS}
    with planted("cp-factor"):
        return found | {"fault": stepped("cp4-ulysses")}


def on_two() -> dict[str, object]:
    found: dict[str, object] = {rule: custom(rule) for rule in RULES}
    found["a2"] = in_calls()
    with planted("lost-call"):
        return found | {"a2 fault": in_calls()}


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS) | ask(FOUR, ranks=4)


@pytest.fixture(scope="module")
def others():
    return launch(on_two, ranks=2, timeout_s=120, device="cpu")[0]


def descended(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle's losses and weights after gradient descent."""
    reference = oracle("tiny:qwen3")
    start, losses = reference.weights(), []
    for _ in range(steps):
        reference.clear()
        result = reference.run(RAGGED, Case("ce", "cross_entropy"))
        losses.append(result.metrics["loss/total"])
        reference.set_weights({name: w - LR * result.gradients[name] for name, w in reference.weights().items()})
    weights = reference.weights()
    reference.set_weights(start)
    return losses, weights


def test_a1_rows_of_one_and_nine_tokens_weigh_a_tenth_each(answers):
    found = check("a1", QUESTIONS, answers)
    assert all(
        own.metrics["tok/trained"] == 10 and abs(own.metrics["tok/weight_sum"] - 1) < 1e-12 for own in found.values()
    )


def test_a2_a_step_after_three_calls_is_the_whole_batchs(others):
    weights = descended(1)[1]
    assert differences.parameters(others["a2"], weights, ZERO)[0] <= LIMIT
    assert differences.parameters(others["a2 fault"], weights, ZERO)[0] > 1e-4


def test_a4_supervised_and_policy_gradients_are_one_vector(answers):
    first, second = (check(f"a4 {name}", QUESTIONS, answers) for name in ("supervised", "policy"))
    for where, own in first.items():
        assert differences.parameters(own.gradients, second[where].gradients, ZERO)[0] <= 1e-12, where


def test_a6_tokens_are_counted_once_on_data_and_context_ranks(answers):
    count = sum(sample.num_trained for sample in RAGGED)
    for own in check("a6", FOUR, answers).values():
        assert own.metrics["tok/trained"] == count == 19


@pytest.mark.parametrize("name", ["a8 one token", "a8 last pair"])
def test_a8_ranks_without_a_loss_token_do_not_scale_the_others(name, answers):
    check(name, FOUR, answers)


def test_a10_three_steps_under_any_ulysses_size():
    found = launch(on_four, ranks=4, timeout_s=60, device="cpu")[0]
    losses, weights = descended(STEPS)
    for layout in STEP_LAYOUTS:
        own, moved = found[layout]
        assert max(abs(a - b) for a, b in zip(own, losses, strict=True)) <= LIMIT, layout
        assert differences.parameters(moved, weights, ZERO)[0] <= LIMIT, layout
    assert differences.parameters(found["fault"][1], weights, ZERO)[0] > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_a13_a_custom_loss_gets_the_built_in_normaliser(rule, others):
    built_in, own = others[rule]
    assert differences.parameters(own, built_in, ZERO)[0] <= 1e-13
    other = others["token" if rule != "token" else "sample"][1]
    assert differences.parameters(other, built_in, ZERO)[0] > 1e-4, "control: another rule is another gradient"


@pytest.mark.parametrize("name", ["a16", "a16 beside ppo"])
def test_a16_value_losses_are_normalised_like_the_policys(name, answers):
    check(name, QUESTIONS, answers)
