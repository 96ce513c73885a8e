"""LoRA on the megatron backend against plain Hugging Face with peft: one sample, its own adapter, a forward each."""

import warnings
import zlib

import pytest
import torch
from megatron_cases import engine_of, installed, replaced
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from ragged import RULE, calls, ragged

from longspan import AdamW, Objective, launch
from longspan.models.loading import load_model
from longspan.parity.oracle_attention import use_plain_layers
from longspan.parity.reference import Reference, load_plain
from longspan.parity.samples import default_samples, fill_fields

LORA = "longspan.engine.megatron.lora:"
CONFIGS = {
    "a": LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj", "down_proj", "up_proj"]),
    "b": LoraConfig(
        r=2, init_lora_weights=False, lora_alpha=16, use_rslora=True, target_modules=r".*layers\.1.*(k|o|gate)_proj"
    ),
}
TWO, THREE = ("tp2", "tp2-sp", "pp2", "cp2-ring"), ("cp3-ring", "cp3-gather")
LAYOUTS = TWO + THREE
STEP = AdamW(lr=1e-2, clip_norm=0.01)


def samples():
    return ragged(adapters="ab", tempered=False)


def build(name, backend="megatron", model="qwen3", **settings):
    """Recomputed in full, so that backward meets another micro-step's adapters if it can."""
    defaults = {"dtype": "float64", "max_tokens_per_rank": 44, "lora": CONFIGS, "recompute": "full"}
    return engine_of(f"tiny:{model}", name, backend, **{**defaults, **settings})


def stepped(engine):
    """Gradients of all adapters from two calls, of which one has one token; then the weights after a step of each."""
    for part in calls(samples()):
        engine.forward_backward(part, Objective("importance_sampling"), **RULE)
    gradients = engine.gradients()
    for adapter in CONFIGS:
        engine.optim_step(STEP, adapter=adapter)
    return gradients, engine.state_dict()


MORE = {  # recurrent layers, a tower, shared experts: (model, targets), against the fsdp backend
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "down_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "o_proj"],
    "qwen3_vl": ["qkv", "q_proj", "linear_fc2"],
    "qwen3_5_moe": ["gate_proj", "up_proj", "down_proj", "v_proj"],
}


def of_other_families(given):
    """Worst distance of a gradient from the fsdp backend's, by model."""
    found = {}
    for model, targets in MORE.items():
        config = {"x": LoraConfig(r=3, init_lora_weights=False, target_modules=targets)}
        both = []
        for name, backend in (("tp2-sp", "megatron"), ("dp2", "fsdp")):
            engine = build(name, backend, model, lora=config, max_tokens_per_rank=80)
            engine.forward_backward(given[model], Objective("importance_sampling"))
            both.append(engine.gradients())
        found[model] = distance(*both)
    return found


def with_media(model):
    reference = Reference(f"tiny:{model}", dtype=torch.float64)
    return fill_fields(default_samples(reference, (13, 1, 40, 7)), reference)


def every_layout(folder):
    found = {name: stepped(build(name)) for name in TWO}
    engine = build("tp2-sp")
    stepped(engine)
    engine.save(folder + "/checkpoint")
    after = stepped(engine)[1]
    other = build("pp2", seed=5)
    other.load(folder + "/checkpoint")
    resumed = stepped(other)[1]
    engine.export(folder + "/adapters")
    engine.export(folder + "/merged", merge="a")
    found["resumed"] = after, resumed
    with replaced(LORA + "sum_gradient", lambda real: lambda x, group: x):  # each rank keeps its columns' part
        found["fault"] = stepped(build("tp2"))
    return found


def oracle():
    """(weights, gradients) of plain Hugging Face."""
    model = load_plain("tiny:qwen3", torch.float64, 0)
    use_plain_layers(model)
    for name, config in CONFIGS.items():
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is more than one adapter
            torch.manual_seed(zlib.crc32(name.encode()))
            inject_adapter_in_model(config, model, adapter_name=name)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    given = samples()
    for sample in given:
        for layer in layers:
            layer.set_adapter([name for name in layer.lora_A if name == sample.adapter])
        logits = model(input_ids=sample.input_ids[None]).logits[0]
        logprob = logits.log_softmax(-1).gather(-1, sample.target_ids[:, None])[:, 0]
        ratio = (logprob - sample.fields["old_logprob"]).exp()
        (-(ratio * sample.fields["advantage"] * sample.mask).sum() / RULE["denominator"]).backward()
    named = dict(model.named_parameters())
    weights = {name: parameter.detach() for name, parameter in named.items()}
    return weights, {name: p.grad for name, p in named.items() if "lora_" in name}


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    given = {model: with_media(model) for model in MORE}
    more = of_other_families
    results = launch(lambda: {**every_layout(str(folder)), "more": more(given)}, ranks=2, timeout_s=200)
    three = launch(lambda: {name: stepped(build(name)) for name in THREE}, ranks=3, timeout_s=90)
    for name in LAYOUTS:
        first, *others = (rank[name] for rank in (results if name in TWO else three))
        for mine, other in (pair for each in others for pair in zip(first, each, strict=True)):
            assert all(torch.equal(mine[key], other[key]) for key in mine), name
    return results[0] | three[0], oracle(), folder


def distance(got, want):
    assert set(got) == set(want)
    return max(float((got[name] - value).norm() / value.norm().clamp(min=1e-30)) for name, value in want.items())


@installed
@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_equal_plain_peft(every_rank, name):
    found, (_, gradients), _ = every_rank
    assert distance(found[name][0], gradients) <= 1e-8


@installed
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_moves_one_adapter_and_never_the_base(every_rank, name):
    found, (start, gradients), _ = every_rank
    weights, reference = found[name][1], found[LAYOUTS[0]][1]
    assert distance(weights, reference) <= 1e-8
    for key, value in start.items():
        assert (key in gradients) != torch.equal(weights[key], value), key


@installed
def test_a_gradient_that_stays_on_its_tensor_parallel_rank_is_found(every_rank):
    found, (_, gradients), _ = every_rank
    assert distance(found["fault"][0], gradients) > 1e-3


@installed
def test_adapters_and_their_moments_load_under_another_layout(every_rank):
    after, resumed = every_rank[0]["resumed"]
    assert distance(resumed, after) <= 1e-12


@installed
def test_adapters_are_exported_in_full(every_rank):
    found, _, folder = every_rank
    after = found["resumed"][0]
    adapter, _ = load_model(str(folder / "merged"), torch.float64)
    name = "model.layers.0.self_attn.q_proj"
    base, a, b = (after[f"{name}.{part}.weight"] for part in ("base_layer", "lora_A.a", "lora_B.a"))
    merged = dict(adapter.model.named_parameters())[f"{name}.weight"]
    torch.testing.assert_close(
        merged.detach(), base + CONFIGS["a"].lora_alpha / CONFIGS["a"].r * (b @ a), rtol=0, atol=1e-12
    )
    assert {path.name for path in (folder / "adapters").iterdir() if path.is_dir()} == {"a", "b"}


@installed
@pytest.mark.parametrize("model", MORE)
def test_adapters_of_other_families_equal_the_fsdp_backend_s(every_rank, model):
    assert every_rank[0]["more"][model] <= 1e-8
