"""Kind L: one mode for all passes. (Groups, GAE and masks are tested beside the code, in tests/unit.)"""

import pytest
from kit import build, changed, rows

from longspan.engine import Engine, EngineConfig
from longspan.errors import UserError
from longspan.launch import launch
from longspan.layout import Layout
from longspan.models.tiny import tiny
from longspan.objective import Objective
from longspan.parity.reference import auto_class

RAGGED = rows((11, 4, 17))


def passes() -> tuple[dict[str, float], float, bool]:
    """Metrics of a training pass on the engine's own log-probs, its KL off them (control), and whether modes stayed."""
    engine = build("tiny:qwen3", "cp2-ring", [11, 4, 17], tight=True)
    modes = {name: module.training for name, module in engine.backend.policy.named_modules()}
    own = [out["logprob"] for out in engine.forward(RAGGED)]
    samples = [
        changed(s, fields={"old_logprob": logprob, "ref_logprob": logprob})
        for s, logprob in zip(RAGGED, own, strict=True)
    ]
    objective = Objective("ppo", kl=0.1)
    metrics = engine.forward_backward(samples, objective)
    same = modes == {name: module.training for name, module in engine.backend.policy.named_modules()}
    off = [changed(s, fields={"ref_logprob": s.fields["ref_logprob"] - 0.1}) for s in samples]
    return metrics, engine.forward_backward(off, objective)["loss/kl"], same


def test_l11_ratio_one_and_kl_zero_before_the_first_step():
    for metrics, control, same in launch(passes, ranks=2, timeout_s=60, device="cpu"):
        assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0 and metrics["loss/kl"] == 0.0
        assert metrics["kl/old_mean"] == 0.0 and same and control > 1e-3


def test_l11_a_model_with_dropout_is_refused_at_start(tmp_path):
    config = tiny("qwen3", attention_dropout=0.1)
    auto_class(config).from_config(config).save_pretrained(tmp_path)

    def refused() -> str:
        with pytest.raises(UserError) as caught:
            Engine.build(EngineConfig(str(tmp_path), Layout()))
        return str(caught.value)

    message = launch(refused, ranks=1, timeout_s=60, device="cpu")[0]
    assert "attention_dropout=0.1" in message and "set it to 0" in message
