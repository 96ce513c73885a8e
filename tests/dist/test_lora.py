"""LoRA: several adapters in one packed batch, each exactly as if it were alone and as peft has it; copies agree; peft loads
the export."""

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model

from longspan import AdamW, Engine, EngineConfig, Objective, Sample, launch
from longspan.layout import parse_layout
from longspan.models.tiny import tiny
from longspan.parity import Reference
from longspan.parity.cases import Case

CONFIGS = {
    "a": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
    "b": LoraConfig(r=2, lora_alpha=16, use_rslora=True, target_modules=r".*layers\.1.*(k|o)_proj"),
}

CLIPS = (0.01, 0.5, 0.02)  # one a step: moments would differ if an adapter saw the clipping of another


def make_samples(adapters, lengths=(13, 1, 40, 7, 29, 3)):
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) > 0.3).float()
        fields = {
            "advantage": torch.randn(length, generator=generator).double(),
            "old_logprob": torch.full((length,), -4.5),
        }
        samples.append(Sample(ids[:-1], ids[1:], mask, fields, adapter=adapters[number % len(adapters)]))
    return samples


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


def together(name):
    engine = build(name, CONFIGS)
    samples, objective = make_samples("ab"), Objective("importance_sampling")
    for clip_norm in CLIPS:
        engine.forward_backward(samples, objective)
        gradients = engine.gradients()
        for adapter in CONFIGS:
            engine.optim_step(AdamW(lr=1e-2, clip_norm=clip_norm), adapter=adapter)
    return gradients, engine.state_dict()


def alone(adapter):
    engine = build("dp1", CONFIGS)
    for clip_norm in CLIPS:
        own = [s for s in make_samples("ab") if s.adapter == adapter]
        engine.forward_backward(own, Objective("importance_sampling"))
        gradients = engine.gradients()
        engine.optim_step(AdamW(lr=1e-2, clip_norm=clip_norm), adapter=adapter)
    return gradients, engine.state_dict()


@pytest.mark.parametrize("name", ["dp1", "cp3-ring", "dp2-cp2"])
def test_each_adapter_steps_as_if_alone(name):
    results = launch(together, name, ranks=parse_layout(name).ranks, timeout_s=60)
    gradients, weights = results[0]
    assert all(torch.equal(weights[key], other[key]) for _, other in results for key in weights)
    assert all("lora_" in key for key in gradients)
    for adapter in CONFIGS:
        expected, stepped = launch(alone, adapter, ranks=1, timeout_s=60)[0]
        own = [key for key in expected if f".{adapter}." in key]
        assert own
        for key in own:
            assert (gradients[key] - expected[key]).norm() <= 1e-12 * expected[key].norm()
            assert (weights[key] - stepped[key]).norm() <= 1e-12 * stepped[key].norm()
        foreign = [key for key in expected if f".{adapter}." not in key]
        assert all(expected[key].abs().max() == 0 for key in foreign)


def peft_gradients(adapter, weights):
    """peft's layers on plain transformers, one unpacked sample of the adapter at a time, fp64."""
    reference = Reference("tiny:qwen3", dtype=torch.float64)
    inject_adapter_in_model(CONFIGS[adapter], reference.model, adapter_name=adapter)
    reference.model.double()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("lora_" in name)
        parameter.data.copy_(
            weights[name] if name in weights else weights[name.replace(".weight", ".base_layer.weight")]
        )
    own = [sample for sample in make_samples("ab") if sample.adapter == adapter]
    return reference.run(own, Case("is", "importance_sampling")).gradients


def first(adapter):
    """The factors at the start, and the first gradient of the adapter's own samples."""
    engine = build("dp1", CONFIGS)
    weights = engine.state_dict()
    engine.forward_backward([s for s in make_samples("ab") if s.adapter == adapter], Objective("importance_sampling"))
    return weights, engine.gradients()


@pytest.mark.parametrize("adapter", CONFIGS)
def test_each_adapter_is_pefts(adapter):
    """Rank-stabilised scaling, alpha and targets by expression too: what peft makes of the same factors."""
    weights, found = launch(first, adapter, ranks=1, timeout_s=60)[0]
    expected = peft_gradients(adapter, weights)
    assert expected and set(expected) == {key for key in found if f".{adapter}." in key}
    for key, want in expected.items():
        assert (found[key] - want).norm() <= 1e-8 * want.norm()
    halved = {
        key: value * (0.5 if "lora_B" in key else 1.0) for key, value in weights.items()
    }  # control: half the scale
    other = peft_gradients(adapter, halved)
    assert all((other[key] - want).norm() > 1e-2 * want.norm() for key, want in expected.items() if "lora_A" in key)


def mixed_up():
    engine = build("dp1", CONFIGS)
    samples = make_samples("ab")
    engine.forward_backward(samples, Objective("importance_sampling"))
    right = engine.gradients()
    engine.clear_gradients()
    engine.backend.routing.number = lambda sample, index: 0  # the planted fault: every token takes adapter a
    engine.forward_backward(samples, Objective("importance_sampling"))
    wrong = engine.gradients()
    return max(float((wrong[key] - right[key]).norm() / right[key].norm()) for key in right)


def test_tokens_on_the_wrong_adapter_are_seen():
    assert launch(mixed_up, ranks=1, timeout_s=60)[0] > 1e-2


def export(folder):
    engine = build("dp2", {"a": CONFIGS["a"]}, dtype="float32")
    engine.forward_backward(make_samples([None]), Objective("importance_sampling"))
    engine.optim_step(AdamW(lr=1e-2))
    engine.export(folder + "/adapter")
    engine.export(folder + "/merged", merge="a")
    return engine.forward(make_samples([None]))


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
    samples = make_samples([None])
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
        lambda: engine.forward_backward(make_samples([None]), Objective("importance_sampling")),
        lambda: engine.forward_backward(make_samples(["c"]), Objective("importance_sampling")),
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
