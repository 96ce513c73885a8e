"""Kind I, mixture of experts: auxiliary losses alone, pads that are not counted, experts without a token."""

import pytest
import torch
from kit import Question, ask, build, changed, check, rows
from torch import Tensor

from longspan.engine import SGD
from longspan.launch import launch
from longspan.objective import Objective
from longspan.parity.cases import Case

MOE = "tiny:qwen3_moe"
SILENT = [changed(s, fields={"advantage": torch.zeros(len(s)).double()}) for s in rows((11, 3, 18), model=MOE)]
WEAK, STRONG = (Case("aux", "reinforce", {"moe_aux": size}) for size in (0.01, 0.02))
QUESTIONS = {
    "i1": Question(SILENT, WEAK, MOE, layouts=("dp2", "cp2-ring-zigzag", "cp2-ulysses"), fault="aux-shard"),
    "i3": Question(SILENT, STRONG, MOE, layouts=("dp2", "cp2-ring-zigzag"), fault="aux-detached"),
    "i5": Question(
        rows((1, 3, 5, 9), model=MOE),
        Case("z", "reinforce", {"moe_aux": 0.5, "moe_z": 0.1}),
        MOE,
        layouts=("dp2", "cp2-ring-zigzag"),
        fault="aux-pads",
    ),
}


@pytest.fixture(scope="module")
def answers():
    return ask(QUESTIONS)


def routers(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if ".gate." in name}


def test_i1_the_auxiliary_gradient_alone_does_not_depend_on_cp(answers):
    for own in check("i1", QUESTIONS, answers).values():
        assert all(float(gradient.norm()) > 0 for gradient in routers(own.gradients).values())


def test_i3_the_routers_gradient_doubles_with_the_coefficient(answers):
    weak, strong = check("i1", QUESTIONS, answers), check("i3", QUESTIONS, answers)
    for where, own in strong.items():
        for name, gradient in routers(own.gradients).items():
            half = weak[where].gradients[name]
            assert float(half.norm()) > 0 and float((gradient - 2 * half).norm()) <= 1e-12 * float(half.norm())


def test_i5_pads_are_in_no_statistic(answers):
    """Rows of 1, 3, 5 and 9 tokens, without pads on one rank and padded to multiples of 4 under zigzag."""
    found = check("i5", QUESTIONS, answers)
    for name in ("loss/moe_aux", "loss/moe_z"):
        values = [own.metrics[name] for own in found.values()]
        assert max(values) - min(values) <= 1e-12 * max(values)


def starved(layout: str, folder: str) -> tuple[dict[str, float], bool]:
    """All tokens to the experts 0 and 1 (on two ranks of experts, the second has none): train, step, save, load."""
    samples = rows((7, 4), model=MOE)
    engine = build(MOE, layout, [7, 4], tight=False)
    layers = engine.forward(samples, ("routed_experts",))[0]["routed_experts"].shape[1]
    chosen = torch.tensor([0, 1]).expand(1, layers, 2)
    kept = [changed(s, fields={"routed_experts": chosen.expand(len(s), -1, -1).clone()}) for s in samples]
    engine.forward_backward(kept, Objective("cross_entropy"))
    gradients = engine.gradients()
    engine.optim_step(SGD(lr=0.1))
    engine.save(folder)
    before = engine.state_dict()
    engine.forward_backward(kept, Objective("cross_entropy"))
    engine.optim_step(SGD(lr=0.1))
    engine.load(folder)
    same = all(torch.equal(before[name], weight) for name, weight in engine.state_dict().items())
    experts = {name: gradient for name, gradient in gradients.items() if ".experts." in name}
    used = min(float(gradient[:2].norm()) for gradient in experts.values())
    idle = max(float(gradient[2:].abs().max()) for gradient in experts.values())
    return {"used": used, "idle": idle, "count": float(len(experts))}, same


@pytest.mark.parametrize("layout", ["dp2", "ep2"])
def test_i10_experts_without_a_token_step_and_load(layout, tmp_path):
    for found, same in launch(starved, layout, str(tmp_path / layout), ranks=2, timeout_s=60, device="cpu"):
        assert found["count"] > 0 and found["used"] > 0 and found["idle"] == 0.0 and same
