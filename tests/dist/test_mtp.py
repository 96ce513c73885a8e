"""Multi-token-prediction heads at cp 1 to 4 against a plain one on unpacked samples, fp64: the loss and every
parameter's gradient.

Apart: the gradient of the draft loss stays in `mtp.*`. Joint: it flows into the decoder too. Loading and exporting
`mtp.*`.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from longspan import AdamW, Engine, EngineConfig, Layout, Objective, Sample
from longspan.errors import UserError
from longspan.launch import launch
from longspan.models import load_model
from longspan.parity.oracle_attention import use_plain_layers
from longspan.parity.reference import load_plain

MODEL = "tiny:qwen3_5_mtp"
STEPS = 3
COEFFICIENT = 0.7
LAYOUTS = (
    Layout(),
    Layout(cp=2, mixer="ulysses"),
    Layout(cp=3, mixer="gather"),
    Layout(dp=2, cp=2, mixer="ulysses", linear="heads"),
)


def samples() -> list[Sample]:
    draw = np.random.default_rng(0)
    found = []
    for length in (1, 2, 3, 17, 30, 5):
        ids = draw.integers(0, 90, length + 1)
        found.append(Sample(ids[:-1], ids[1:], draw.integers(0, 2, length) * (length != 5)))
    return found


def trained() -> float:
    return float(sum(sample.num_trained for sample in samples()))


def train(layout: Layout) -> list[dict[str, Any]]:
    """Apart, then joint."""
    found = []
    for joint in (False, True):
        config = EngineConfig(MODEL, layout, dtype="float64", max_tokens_per_rank=64, mtp_steps=STEPS, mtp_joint=joint)
        engine, objective = Engine.build(config), Objective("cross_entropy", mtp=COEFFICIENT)
        parts = (samples()[1:], samples()[:1])  # the last call has one token: the other ranks have nothing to do
        told = [engine.forward_backward(part, objective, denominator=trained()) for part in parts]
        found.append({"loss": sum(metrics["loss/mtp"] for metrics in told), "gradients": engine.gradients()})
    return found


class PlainHead(nn.Module):
    """The definition, with transformers' own decoder layer; names as in checkpoints."""

    def __init__(self, decoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        config = decoder.config
        self.eps = config.rms_norm_eps
        self.layer = type(decoder.layers[1])(config, 1)  # layer 1 of the tiny config has full attention
        self.layer.load_state_dict({k.removeprefix("layers.0."): v for k, v in weights.items() if "layers.0." in k})
        for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            self.register_parameter(name, nn.Parameter(weights[f"{name}.weight"].clone()))

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + weight)

    def forward(self, decoder: nn.Module, hidden: Tensor, ids: Tensor, table: Tensor) -> list[Tensor]:
        length = len(ids)
        cos_sin = decoder.rotary_emb(hidden[None], torch.arange(length)[None, None].expand(3, 1, -1))
        found = []
        for step in range(1, STEPS + 1):
            following = [int(ids[t + step]) if t + step < length else 0 for t in range(length)]
            embeds = functional.embedding(torch.tensor(following), table)
            both = [self.rms(embeds, self.pre_fc_norm_embedding), self.rms(hidden, self.pre_fc_norm_hidden)]
            out = self.layer((torch.cat(both, 1) @ self.fc.T)[None], position_embeddings=cos_sin, attention_mask=None)
            hidden = self.rms(out[0], self.norm)
            found.append(hidden)
        return found


@functools.cache
def expected(joint: bool, fault: str = "") -> dict[str, Any]:
    adapter, _ = load_model(MODEL, torch.float64, 0)
    weights = {name: value.detach() for name, value in adapter.mtp.named_parameters()}
    model = load_plain(MODEL, torch.float64, 0)
    head = PlainHead(model.model, weights).double()
    head.layer.self_attn.config = model.model.layers[1].self_attn.config
    use_plain_layers(model)
    use_plain_norms(head)
    drafted, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample in samples():
        hidden = model.model(input_ids=sample.input_ids[None], use_cache=False).last_hidden_state[0]
        logprob = torch.log_softmax(model.lm_head(hidden), -1)
        mask, length = sample.mask.double(), len(sample.input_ids)
        total = total - sum(mask[t] * logprob[t, sample.target_ids[t]] for t in range(length)) / trained()
        table, output = model.model.embed_tokens.weight, model.lm_head.weight
        if not joint:
            hidden, table, output = hidden.detach(), table.detach(), output.detach()
        for step, states in enumerate(head(model.model, hidden, sample.input_ids, table), 1):
            logprob = torch.log_softmax(states @ output.T, -1)
            for t in range(length - step):
                target = sample.target_ids[t + step - (fault == "shift")]
                drafted = drafted - mask[t + step] * logprob[t, target] / trained() / STEPS
    (total + COEFFICIENT * drafted).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"mtp.{public(name)}": parameter.grad for name, parameter in head.named_parameters()}
    return {"loss": drafted.item(), "gradients": gradients}


def use_plain_norms(head: PlainHead) -> None:
    wrapper = nn.Module()
    wrapper.layer = head.layer
    wrapper.set_attn_implementation = wrapper.set_experts_implementation = lambda name: None
    use_plain_layers(wrapper)


def public(name: str) -> str:
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else f"{name}.weight"


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of the loss and of every parameter's gradient, relative L2."""
    assert found["gradients"].keys() == wanted["gradients"].keys()
    errors = [abs(found["loss"] - wanted["loss"])]
    for name, want in wanted["gradients"].items():
        errors.append(((found["gradients"][name] - want).norm() / want.norm()).item())
    return max(errors)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gradients_are_those_of_unpacked_samples(layout: Layout) -> None:
    """Law 1: steps that read 3 tokens ahead cross neither a sample nor a rank edge. The control is off by one."""
    for apart, joint in launch(train, layout, ranks=layout.ranks, timeout_s=50):
        errors = worst(apart, expected(False)), worst(joint, expected(True))
        print(f"{layout.name}: {max(errors):.1e}")
        assert max(errors) < 1e-10
        assert worst(apart, expected(True)) > 1e-3 and worst(apart, expected(False, "shift")) > 1e-3


def cut(budgets: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Micro-steps -> loss and gradients at the budget that makes so many; 0: two calls with parts of the batch; -1: the same
    without the whole batch's denominator, the planted fault."""
    found = {}
    for number, budget in budgets.items():
        config = EngineConfig(
            MODEL, Layout(), dtype="float64", max_tokens_per_rank=budget, mtp_steps=STEPS, mtp_joint=True
        )
        engine = Engine.build(config)
        batch, objective = even_samples(), Objective("cross_entropy", mtp=COEFFICIENT)
        calls = [batch] if number > 0 else [batch[5:], batch[:5]]
        whole = None if number < 0 else float(sum(sample.num_trained for sample in batch))
        told = [engine.forward_backward(call, objective, denominator=whole) for call in calls]
        assert number < 1 or told[0]["plan/micro_steps"] == number
        found[number] = {"loss": sum(metrics["loss/mtp"] for metrics in told), "gradients": engine.gradients()}
    return found


def even_samples() -> list[Sample]:
    """Eight of one length, so that a budget of k lengths makes 8 / k micro-steps."""
    draw = np.random.default_rng(1)
    rows = [draw.integers(0, 90, 13) for _ in range(8)]
    return [Sample(ids[:-1], ids[1:], draw.integers(0, 2, 12)) for ids in rows]


def test_the_draft_loss_does_not_depend_on_micro_steps_or_calls() -> None:
    found = launch(cut, {1: 96, 2: 48, 4: 24, 8: 12, 0: 48, -1: 48}, ranks=1, timeout_s=50)[0]
    for number in (2, 4, 8, 0):
        assert worst(found[number], found[1]) < 1e-10, number
    assert worst(found[-1], found[1]) > 1e-3


def carry(folder: str, out: str) -> None:
    """Load, train the decoder alone for a step, export."""
    engine = Engine.build(EngineConfig(folder, Layout(), max_tokens_per_rank=64))
    engine.forward_backward(samples(), Objective("cross_entropy"))
    assert not [name for name in engine.gradients() if name.startswith("mtp.")]
    engine.optim_step(AdamW(lr=1e-2, weight_decay=0.1))
    engine.export(out)


def test_the_head_is_loaded_and_exported_under_its_own_names(tmp_path: Path) -> None:
    adapter, _ = load_model(MODEL, torch.float32, 0)
    adapter.model.save_pretrained(tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    head = {f"mtp.{name}": torch.randn_like(value) for name, value in adapter.mtp.named_parameters()}
    save_file(weights | head, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    launch(carry, str(tmp_path / "in"), str(tmp_path / "out"), ranks=1, timeout_s=50)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys() | head.keys()
    assert all(torch.equal(found[name], value) for name, value in head.items())
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"])
    head.pop("mtp.fc.weight")
    save_file(weights | head, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"fc\.weight"):
        load_model(str(tmp_path / "in"), torch.float32, 0)


def build(model: str, **settings: Any) -> None:
    engine = Engine.build(EngineConfig(model, Layout(), max_tokens_per_rank=64, **settings))
    engine.forward_backward(samples(), Objective("cross_entropy", mtp=1.0))


@pytest.mark.parametrize(("model", "settings"), [("tiny:qwen3_5", {"mtp_steps": 1}), (MODEL, {})])
def test_what_cannot_train_a_head_is_refused(model: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="multi-token-prediction"):
        launch(functools.partial(build, model, **settings), ranks=1, timeout_s=50)
