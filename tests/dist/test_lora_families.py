"""LoRA beyond one text decoder, in fp64 against peft on plain transformers: the vision tower in it or not, recurrent layers, a
value head stepping with the only adapter; its exports in peft and in transformers; what is refused.

Targets are regular expressions, one adapter is rank-stabilised. The oracle injects the same config into its own model and takes
the engine's factors, one unpacked sample at a time.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ragged
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from ragged import RULE
from torch import Tensor
from transformers import AutoModelForImageTextToText

from longspan import AdamW, Engine, EngineConfig, Sample
from longspan.errors import UserError
from longspan.launch import launch
from longspan.layout import parse_layout
from longspan.parity.cases import Case
from longspan.parity.differences import parameters, tokens
from longspan.parity.reference import Reference
from longspan.parity.samples import default_samples, fill_fields

CASE = Case("ppo", "ppo", {"clip": 0.2, "value": 0.5}, **RULE)
STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1, "clip_norm": 0.05}
DRAWN = {"init_lora_weights": False}  # both factors random: an adapter that starts at zero hides half of its errors


@dataclass(frozen=True)
class Adapted:
    """A model and what its adapter targets."""

    model: str
    settings: dict[str, Any]

    def config(self) -> LoraConfig:
        return LoraConfig(**DRAWN, **self.settings)


TOWER = Adapted(
    "tiny:qwen3_vl",
    {
        "r": 4,
        "use_rslora": True,
        "target_modules": r".*(visual.*(qkv|linear_fc1|linear_fc2)|layers\.1.*(q_proj|down_proj))",
    },
)
CHOSEN = {
    "tower": TOWER,
    "no tower": Adapted("tiny:qwen3_vl", {"r": 2, "target_modules": r".*language_model.*(k_proj|o_proj|up_proj)"}),
    "recurrent": Adapted(
        "tiny:qwen3_5_vl", {"r": 2, "target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]}
    ),
    "experts' attention": Adapted("tiny:qwen3_moe", {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
}


def build(adapted: Adapted, layout: str, **settings: Any) -> Engine:
    own = {"dtype": "float64", "max_tokens_per_rank": 96, "value_head": True} | settings
    return Engine.build(EngineConfig(adapted.model, parse_layout(layout), lora={"a": adapted.config()}, **own))


Told = tuple[
    dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]
]  # weights before, gradients, weights after 2 steps


def train(jobs: list[tuple[Adapted, str, list[Sample]]]) -> list[Told]:
    found = []
    for adapted, layout, samples in jobs:
        engine = build(adapted, layout)
        before = engine.state_dict()
        for _ in range(2):
            ragged.train(engine, samples, CASE)
            gradients = engine.gradients()
            engine.optim_step(AdamW(**STEP))
        found.append((before, gradients, engine.state_dict()))
    return found


def oracle(adapted: Adapted, before: dict[str, Tensor], samples: list[Sample], fault: bool = False) -> Told:
    reference = Reference(adapted.model, dtype=torch.float64, value_head=True)
    inject_adapter_in_model(adapted.config(), reference.model, adapter_name="a")
    reference.set_weights(before)
    for layer in reference.model.modules():
        if fault and isinstance(layer, LoraLayer):
            layer.scaling["a"] = layer.lora_alpha["a"] / layer.r["a"]  # the planted fault: not rank-stabilised
    for _ in range(2):
        gradients = reference.run(samples, CASE).gradients
        reference.adamw(**STEP)
    return before, gradients, reference.weights()


def samples_of(adapted: Adapted) -> list[Sample]:
    reference = Reference(adapted.model, dtype=torch.float64)
    return fill_fields(default_samples(reference), reference)


@pytest.mark.parametrize(("layout", "names"), [("cp2-ulysses", tuple(CHOSEN)), ("cp3-gather", ("tower", "recurrent"))])
def test_factors_are_those_of_peft_on_plain_transformers(layout: str, names: tuple[str, ...]) -> None:
    jobs = [(CHOSEN[name], layout, samples_of(CHOSEN[name])) for name in names]
    ranks = launch(train, jobs, ranks=parse_layout(layout).ranks, timeout_s=100)
    for name, (adapted, _, samples), told in zip(names, jobs, ranks[0], strict=True):
        before, gradients, after = told
        _, wanted, stepped = oracle(adapted, before, samples)
        assert {key for key in gradients if not key.startswith("value_head.")} == {
            key for key in wanted if "lora_" in key
        }
        errors = parameters(gradients, wanted, 1e-10)[0], parameters(after, stepped, 1e-10)[0]
        print(f"{name} {layout}: gradient {errors[0]:.1e}, weights {errors[1]:.1e}")
        assert max(errors) < 1e-8
        frozen = [key for key in before if "lora_" not in key and not key.startswith("value_head.")]
        assert frozen and all(torch.equal(before[key], after[key]) for key in frozen)
        assert any("visual" in key for key in gradients) == (name == "tower")
        if name == "tower":
            wrong = oracle(adapted, before, samples, fault=True)[1]
            assert parameters(gradients, wrong, 1e-10)[0] > 1e-3


def export(folder: str, samples: list[Sample]) -> list[Tensor]:
    engine = build(TOWER, "cp2-ulysses", dtype="float32", value_head=False)
    engine.export(folder + "/adapter")
    engine.export(folder + "/merged", merge="a")
    return [out["logprob"] for out in engine.forward(samples)]


def test_an_adapter_on_the_tower_loads_in_peft_and_merged_in_transformers(tmp_path: Path) -> None:
    plain = Reference(TOWER.model, dtype=torch.float32)
    samples = fill_fields(default_samples(plain), plain)
    made = launch(export, str(tmp_path), samples, ranks=2, timeout_s=60)[0]
    merged, adapted = Reference(TOWER.model, dtype=torch.float32), Reference(TOWER.model, dtype=torch.float32)
    merged.model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    PeftModel.from_pretrained(adapted.model, tmp_path / "adapter")  # puts its layers into adapted.model
    for reference, exact in ((merged, True), (adapted, True), (plain, False)):
        with torch.no_grad():
            expected = [reference.outputs(sample).logprob for sample in samples]
        assert (tokens(made, expected, samples)[0] < 2e-5) == exact


REFUSED = (
    (
        "tiny:qwen3_moe",
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {},
        "target_parameters.*supported: r, lora_alpha",
    ),
    ("tiny:qwen3_moe", {"target_modules": ["gate"]}, {}, r"mlp\.gate .*TopKRouter.*linear layers"),
    ("tiny:qwen3_moe", {"target_modules": ["experts"]}, {}, "peft cannot put LoRA on .*experts"),
    ("tiny:qwen3", {"target_modules": ["q_proj"], "lora_bias": True}, {}, "lora_bias=True"),
    ("tiny:qwen3", {"target_modules": ["q_proj"], "trainable_token_indices": [1]}, {}, "trainable_token_indices"),
    (
        "tiny:qwen3",
        {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
        {},
        "'pissa' would change the frozen base",
    ),
    ("tiny:qwen3_5_mtp", {"target_modules": ["q_proj"]}, {"mtp_steps": 1}, "Set mtp_steps=0"),
)


def refusals() -> list[str]:
    found = []
    for model, settings, more, _ in REFUSED:
        try:
            config = EngineConfig(
                model, parse_layout("dp1"), lora={"a": LoraConfig(**settings)}, max_tokens_per_rank=64, **more
            )
            Engine.build(config)
            found.append("built")
        except UserError as error:
            found.append(str(error))
    two = {name: LoraConfig(target_modules=["q_proj"]) for name in "ab"}
    with pytest.raises(UserError, match="an engine an adapter"):
        Engine.build(replace(config, model="tiny:qwen3", lora=two, value_head=True, mtp_steps=0))
    return found


def test_what_an_adapter_cannot_do_is_refused_by_name() -> None:
    for message, (_, _, _, part) in zip(launch(refusals, ranks=1, timeout_s=60)[0], REFUSED, strict=True):
        with pytest.raises(UserError, match=part):
            raise UserError(message)
