"""Kind N, what a Tinker-style server builds on: settings of each call, masks, returned losses, tenants.

The server itself is not built; `longspan serve` says so. These are the properties at the engine's level.
"""

import pytest
import torch
from kit import LIMIT, ZERO, build, changed, oracle, rows
from peft import LoraConfig
from torch import Tensor

from longspan.cli import main
from longspan.engine import SGD, Engine, EngineConfig
from longspan.errors import UserError
from longspan.launch import launch
from longspan.layout import Layout
from longspan.objective import Objective
from longspan.parity import differences
from longspan.parity.cases import Case

FIRST, SECOND = rows((11, 4)), rows((9, 6), seed=2)
TIGHT, WIDE = Case("tight", "ppo", {"clip": 0.05}), Case("wide", "ppo", {"clip": 0.6})
HALF = [changed(s, mask=(torch.arange(len(s)) % 2).float()) for s in FIRST]


def queued() -> dict[str, object]:
    """Two calls with different clips before one step: metrics of each, gradients together; and each alone."""
    engine = build("tiny:qwen3", "cp2-ring", [11, 4], tight=True)
    calls = [
        engine.forward_backward(samples, case.objective(), "sum") for samples, case in ((FIRST, TIGHT), (SECOND, WIDE))
    ]
    together = engine.gradients()
    engine.clear_gradients()
    engine.forward_backward([*FIRST, *SECOND], TIGHT.objective(), "sum")  # the fault: one setting for both
    merged = engine.gradients()
    engine.clear_gradients()
    return {"calls": calls, "together": together, "merged": merged, "masked": masked(engine), "losses": losses(engine)}


def masked(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Quadratic penalty at advantage 0 and old log-prob 0: gradients, with other masked targets, and all trained."""
    found = []
    for change in ("none", "targets", "mask"):
        samples = []
        for sample in HALF:
            zero = torch.zeros(len(sample)).double()
            sample = changed(sample, fields={"advantage": zero, "old_logprob": zero})
            if change == "targets":
                targets = torch.where(sample.mask > 0, sample.target_ids, (sample.target_ids + 7) % 90)
                junk = torch.where(sample.mask > 0, zero, torch.full_like(zero, 5.0))
                sample = changed(sample, target_ids=targets, fields={"old_logprob": junk, "advantage": junk})
            samples.append(changed(sample, mask=torch.ones(len(sample))) if change == "mask" else sample)
        engine.forward_backward(samples, Objective("dro", beta=0.1), "sum")
        found.append(engine.gradients())
        engine.clear_gradients()
    return found[0], found[1], found[2]


def losses(engine: Engine) -> tuple[float, float, str]:
    """-sum(weight * log-prob) by the client, forward_backward's number, and what forward says to outputs=("loss",)."""
    count = sum(sample.num_trained for sample in HALF)
    outputs = engine.forward(HALF)
    own = -sum(float((out["logprob"] * s.mask / count).sum()) for out, s in zip(outputs, HALF, strict=True))
    told = engine.forward_backward(HALF, Objective("cross_entropy"))["loss/cross_entropy"]
    engine.clear_gradients()
    with pytest.raises(UserError) as caught:
        engine.forward(HALF, outputs=("loss",))
    assert "loss" not in outputs[0]
    return own, told, str(caught.value)


@pytest.fixture(scope="module")
def found():
    return launch(queued, ranks=2, timeout_s=60, device="cpu")[0]


def test_n1_each_call_keeps_its_own_loss_settings(found):
    reference = oracle("tiny:qwen3")
    reference.clear()
    for told, samples, case in zip(found["calls"], (FIRST, SECOND), (TIGHT, WIDE), strict=True):
        result = reference.run(samples, Case(case.name, case.loss, case.settings, "sum"))  # adds to the gradient
        assert differences.metrics(told, result.metrics)[0] <= LIMIT
    assert differences.parameters(found["together"], result.gradients, ZERO)[0] <= LIMIT
    assert differences.parameters(found["merged"], result.gradients, ZERO)[0] > 1e-3


def test_n3_a_penalty_is_masked_by_the_mask_not_by_advantage_zero(found):
    first, other, trained = found["masked"]
    assert all(torch.equal(gradient, other[name]) for name, gradient in first.items())
    assert max(float(gradient.abs().max()) for gradient in first.values()) > 0
    assert differences.parameters(trained, first, ZERO)[0] > 1e-3


def test_n4_forward_gives_log_probs_that_make_the_loss_and_no_placeholder(found):
    own, told, refusal = found["losses"]
    assert told > 1.0 and abs(own - told) <= 1e-12 * told
    assert "['loss'] are unknown" in refusal and "logprob" in refusal


LORA = {
    name: LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False) for name in ("small", "large")
}


def tenants() -> dict[str, dict[str, Tensor]]:
    """The small tenant's call and step end while the large one's gradients still wait."""
    engine = Engine.build(EngineConfig("tiny:qwen3", Layout(cp=2), dtype="float64", lora=LORA, max_tokens_per_rank=40))
    objective = Objective("cross_entropy")
    engine.forward_backward([changed(s, adapter="large") for s in SECOND], objective)
    waiting = engine.gradients()
    engine.forward_backward([changed(s, adapter="small") for s in FIRST[:1]], objective)
    before = engine.state_dict()
    engine.optim_step(SGD(lr=0.5), adapter="small")
    after, kept = engine.state_dict(), engine.gradients()
    engine.optim_step(SGD(lr=0.5), adapter="large")
    return {"waiting": waiting, "before": before, "after": after, "kept": kept, "end": engine.state_dict()}


def test_n7_a_tenant_steps_without_waiting_for_the_others():
    told = launch(tenants, ranks=2, timeout_s=60, device="cpu")[0]
    own = [name for name in told["before"] if ".small." in name]
    other = [name for name in told["before"] if ".large." in name]
    assert own and len(own) == len(other)
    assert not any(torch.equal(told["before"][name], told["after"][name]) for name in own)
    assert all(torch.equal(told["before"][name], told["after"][name]) for name in other)
    assert all(torch.equal(told["waiting"][name], told["kept"][name]) for name in other)
    for name in other:
        assert torch.equal(told["end"][name], told["before"][name] - 0.5 * told["waiting"][name])
    assert all(torch.equal(told["end"][name], told["after"][name]) for name in own)


def test_n7_there_is_no_server_yet(capsys):
    assert main(["serve"]) == 2
    assert "'serve' is no command" in capsys.readouterr().err
