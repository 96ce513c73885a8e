"""Building a model: what is refused by name, what the seed and the dtype mean, and the parts that the engine
freezes and shards."""

import json

import pytest
import torch
from torch import nn

from longspan.errors import UserError
from longspan.models import FAMILIES, TINY, adapt, load_model, tiny
from longspan.models.attention_bridge import DECODER, VISION
from longspan.models.checks import check_tie
from longspan.models.loading import build_random

CORE = ["llama", "mistral", "qwen2", "qwen3", "qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "gpt_oss", "gemma3"]
CORE += ["glm4", "ministral", "olmo2", "olmo3", "phi3", "smollm3"]
WINDOWED = {"mistral", "gpt_oss", "gemma3", "ministral", "olmo3", "phi3"}


def build(family: str, **overrides):
    return adapt(build_random(tiny(family, **overrides), torch.float32, 0), None)


@pytest.mark.parametrize("family", CORE)
def test_parts_cover_every_parameter_once(family):
    adapter, tokenizer = load_model(f"tiny:{family}")
    assert tokenizer is None and adapter.family in FAMILIES
    parts = adapter.parts()
    assert set(parts) == {"vision", "merger", "language", "embeddings"}
    for name, _ in adapter.model.named_parameters():
        owners = [part for part, prefixes in parts.items() if any(name.startswith(prefix) for prefix in prefixes)]
        assert len(owners) == 1, (name, owners)
    for prefixes in parts.values():
        for prefix in prefixes:
            known = [name for name, _ in adapter.model.named_parameters(remove_duplicate=False)]
            assert any(name.startswith(prefix) for name in known), prefix
    units = adapter.units()
    held = [id(p) for unit in units for p in unit.parameters()]
    assert len(units) >= adapter.num_layers and len(set(held)) == len(held)


@pytest.mark.parametrize("family", CORE)
def test_sizes_match_the_config(family):
    adapter, _ = load_model(f"tiny:{family}")
    weight, bias, softcap = adapter.head()
    assert weight.shape == (97, 32) == (adapter.vocab_size, adapter.hidden_size)
    assert bias is None and softcap == (4.0 if family == "gemma3" else None)
    assert (adapter.num_layers, adapter.num_heads, adapter.num_kv_heads, adapter.head_dim) == (2, 4, 2, 8)
    assert adapter.windowed == (family in WINDOWED) and not adapter.recurrent


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, _ = load_model("tiny:qwen3_vl", seed=5)
    assert torch.equal(torch.get_rng_state(), before)  # the process's own random state is left alone
    torch.manual_seed(2)
    two, _ = load_model("tiny:qwen3_vl", torch.float64, seed=5)
    other, _ = load_model("tiny:qwen3_vl", seed=6)
    for (name, p), q in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        assert torch.equal(p.double(), q), name
    assert not torch.equal(one.head()[0], other.head()[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_buffers_keep_fp32(dtype):
    adapter, _ = load_model("tiny:qwen3_vl", dtype)
    assert {p.dtype for p in adapter.model.parameters()} == {dtype}
    assert {b.dtype for b in adapter.model.buffers() if b.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("family", CORE)
def test_folder_round_trip(family, tmp_path):
    adapter, _ = load_model(f"tiny:{family}", torch.float64, seed=2)
    adapter.model.save_pretrained(tmp_path)
    again, tokenizer = load_model(str(tmp_path), torch.float64)
    assert tokenizer is None and again.family == adapter.family
    frequencies = [b for name, b in again.model.named_buffers() if "inv_freq" in name]
    assert frequencies and {b.dtype for b in frequencies} == {torch.float32}
    for (name, p), (other, q) in zip(adapter.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert name == other and torch.equal(p, q), name


def test_attention_goes_through_the_bridge():
    adapter, _ = load_model("tiny:qwen3_vl")
    assert adapter.model.config.text_config._attn_implementation == DECODER
    assert adapter.model.model.visual.config._attn_implementation == VISION
    assert "longspan" not in json.dumps(adapter.model.config.to_dict(), default=str)  # nothing of it is exported


def test_boundaries_are_never_guessed():
    adapter, _ = load_model("tiny:qwen3")
    with pytest.raises(UserError, match="longspan=Context"):
        adapter.model(input_ids=torch.arange(4)[None])


def test_unknown_architecture_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*Known: .*LlamaForCausalLM"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match="no readable config"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"known: .*qwen3_vl"):
        load_model("tiny:nothing")
    assert set(CORE) <= set(TINY)


def test_a_layer_without_a_rule_is_refused_by_name():
    """D12: walk the module tree; a mixer that nobody named must not see 1/CP of the sequence."""
    model = build_random(tiny("qwen3"), torch.float32, 0)
    model.model.layers[1].short_conv = nn.Conv1d(32, 32, 3, padding=2)
    with pytest.raises(UserError, match=r"'model.layers.1.short_conv' is a Conv1d"):
        adapt(model, None)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen3_vl", {"text": {"attention_dropout": 0.1}}, "attention_dropout=0.1"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_settings_that_depend_on_the_layout_are_refused(family, overrides, message):
    with pytest.raises(UserError, match=message):
        build(family, **overrides)


def test_tie_is_checked_by_storage():
    """K1: the config's word is not enough."""
    model = build_random(tiny("qwen3"), torch.float32, 0)
    check_tie(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(UserError, match="do not share storage"):
        adapt(model, None)
