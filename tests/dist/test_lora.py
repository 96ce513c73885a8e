"""LoRA: several adapters in one packed batch, each as peft has it on plain transformers alone; copies agree; peft loads the
export."""

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from ragged import RULE, ragged, train, worst

from longspan import AdamW, Engine, EngineConfig, Objective, launch
from longspan.layout import parse_layout
from longspan.models.tiny import tiny
from longspan.parity import Reference
from longspan.parity.cases import Case

CONFIGS = {
    "a": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
    "b": LoraConfig(r=2, lora_alpha=16, use_rslora=True, target_modules=r".*layers\.1.*(k|o)_proj"),
}

CLIPS = (0.01, 0.5, 0.02)  # one a step: moments would differ if an adapter saw the clipping of another


STEP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}
CASE = Case("is", "importance_sampling", **RULE)


def build(name, configs, **settings):
    defaults = {"model": "tiny:qwen3", "dtype": "float64", "max_tokens_per_rank": 64}
    engine = Engine.build(EngineConfig(layout=parse_layout(name), lora=configs, **(defaults | settings)))
    generator = torch.Generator().manual_seed(7)
    for key, parameter in sorted(engine.backend.named_parameters()):  # B starts at zero: give it values
        if "lora_B" in key:
            whole = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            local = parameter.to_local()
            rows = -(-parameter.shape[0] // engine.mesh.data_ranks)
            start = min(rows * engine.mesh.data_rank, parameter.shape[0])
            local.data.copy_(whole[start : start + local.shape[0]].to(local.dtype))
    return engine


def together(name, mixed_up=False):
    """The factors at the start, the gradients of the first step, the weights after three. mixed_up: the planted fault, every
    token takes adapter a."""
    engine, samples = build(name, CONFIGS), ragged(adapters="ab")
    if mixed_up:
        engine.backend.routing.number = lambda sample, index: 0
    before, gradients = engine.state_dict(), None
    for clip_norm in CLIPS:
        train(engine, samples, CASE)
        gradients = gradients or engine.gradients()
        for adapter in CONFIGS:
            engine.optim_step(AdamW(**STEP, clip_norm=clip_norm), adapter=adapter)
    return before, gradients, engine.state_dict()


def alone(adapter, before, scale=1.0):
    """peft's layers on plain transformers, one unpacked sample of the adapter at a time, fp64: as `together`."""
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    inject_adapter_in_model(CONFIGS[adapter], reference.model, adapter_name=adapter)
    reference.model.double()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("lora_" in name)
        value = before[name] if name in before else before[name.replace(".weight", ".base_layer.weight")]
        parameter.data.copy_(value * (scale if "lora_B" in name else 1.0))
    own, gradients = [sample for sample in ragged(adapters="ab") if sample.adapter == adapter], None
    for clip_norm in CLIPS:
        found = reference.run(own, CASE).gradients
        gradients = gradients or found
        reference.adamw(**STEP, clip_norm=clip_norm)
    return gradients, {name: value for name, value in reference.weights().items() if name in gradients}


def of(adapter, values):
    return {key: value for key, value in values.items() if f".{adapter}." in key}


@pytest.mark.parametrize("name", ["dp1", "cp3-ring", "dp2-cp2"])
def test_each_adapter_steps_as_if_alone(name):
    """Rank-stabilised scaling, alpha and targets by expression too: what peft makes of the same factors."""
    results = launch(together, name, ranks=parse_layout(name).ranks, timeout_s=60)
    before, gradients, weights = results[0]
    assert all(torch.equal(weights[key], other[key]) for *_, other in results for key in weights)
    assert all("lora_" in key for key in gradients)
    for adapter in CONFIGS:
        wanted, stepped = alone(adapter, before)
        assert wanted and worst(of(adapter, gradients), wanted) <= 1e-12
        assert worst(of(adapter, weights), stepped) <= 1e-10
        halved, _ = alone(adapter, before, scale=0.5)  # control: half the scale
        factors = {key for key in wanted if "lora_A" in key}
        assert all((halved[key] - wanted[key]).norm() > 1e-2 * wanted[key].norm() for key in factors)


def test_tokens_on_the_wrong_adapter_are_seen():
    before, gradients, _ = launch(together, "dp1", True, ranks=1, timeout_s=60)[0]
    assert worst(of("a", gradients), alone("a", before)[0]) > 1e-2


def export(folder):
    engine = build("dp2", {"a": CONFIGS["a"]}, dtype="float32")
    engine.forward_backward(ragged(tempered=False), Objective("importance_sampling"))
    engine.optim_step(AdamW(lr=1e-2))
    engine.export(folder + "/adapter")
    engine.export(folder + "/merged", merge="a")
    return engine.forward(ragged(tempered=False))


@torch.no_grad()
def scores(model, samples):
    found = []
    for sample in samples:
        logprob = model(input_ids=sample.input_ids[None]).logits[0].log_softmax(-1)
        found.append(logprob.gather(-1, sample.target_ids[:, None])[:, 0] * sample.mask)
    return found


def test_exports_load_in_peft_and_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    outputs = launch(export, str(tmp_path), ranks=2, timeout_s=60)[0]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(tiny("qwen3"))
    samples = ragged(tempered=False)
    bare = max(
        float((out.logprob - want).abs().max()) for out, want in zip(outputs, scores(base, samples), strict=True)
    )
    assert bare > 1e-3, "control: the base alone is another model"
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for model in (merged, adapted):
        for out, expected in zip(outputs, scores(model, samples), strict=True):
            torch.testing.assert_close(out.logprob, expected, rtol=0, atol=1e-5)


def refusals():
    found = []
    for config in (
        {"a": LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)},
        {"a": LoraConfig(r=2, target_modules=["lm_head"])},
        {"a": LoraConfig(r=2, target_modules=["no_such_module"])},
    ):
        try:
            build("dp1", config)
            found.append("built")
        except ValueError as error:
            found.append(str(error))
    engine = build("dp1", CONFIGS)
    for call in (
        lambda: engine.forward_backward(ragged(tempered=False), Objective("importance_sampling")),
        lambda: engine.forward_backward(ragged(adapters=["c"]), Objective("importance_sampling")),
        lambda: engine.optim_step(AdamW(lr=1.0)),
    ):
        try:
            call()
            found.append("ran")
        except ValueError as error:
            found.append(str(error))
    return found


def test_refusals():
    found = launch(refusals, ranks=1, timeout_s=60)[0]
    for message, part in zip(found, ("lora_dropout", "lm_head", "no_such_module", "None", "'c'", "None"), strict=True):
        assert part in message, (part, message)
