"""Layouts and settings that the megatron backend cannot honour are refused, with what works. No ranks."""

import re

import pytest

from longspan import EngineConfig
from longspan.engine.megatron.options import MegatronOptions
from longspan.engine.megatron.shape import shape_of
from longspan.engine.planning import heads_per_rank
from longspan.errors import UserError
from longspan.layout import Layout, resolve
from longspan.models.loading import load_model


@pytest.mark.parametrize(
    ("model", "layout", "settings", "message"),
    [
        ("qwen3", Layout(pp=3), {}, "pp=3 must divide the model's 2 layers. Use pp in"),
        ("qwen3", Layout(pp=2, vpp=2), {}, "pp * vpp = 2 * 2 must divide the model's 2 layers. Use vpp in (1)"),
        (
            "qwen3",
            Layout(pp=3, vpp=2),
            {},
            "pp * vpp = 3 * 2 must divide the model's 2 layers. Use pp in (1, 2) with vpp=1",
        ),
        ("qwen3_moe", Layout(dp=3, ep=3), {}, "dp * cp = 3 * 1 = 3 and the model's 4 experts: this backend spreads"),
        ("qwen3_moe", Layout(dp=3, ep=3), {}, "Use ep in (1) or change dp or cp"),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=4), {}, "Use ep in (1, 2) or change dp or cp"),
        ("qwen3", Layout(tp=5), {}, "tp=5 must divide the model's 48 MLP columns. Use tp in (1, 2, 3, 4, 6, 8"),
        ("qwen3_vl", Layout(pp=2), {"megatron": MegatronOptions(overlap_experts=True)}, "1F1B overlap"),
        (
            "qwen3",
            Layout(),
            {"megatron": MegatronOptions(transformer_engine=True)},
            "whose import failed: No module named 'transformer_engine'. Set it False",
        ),
        ("qwen3_moe", Layout(dp=2, etp=2), {}, "etp=2 must be 1 or tp=1: the columns of an expert lie over"),
        ("qwen3_moe", Layout(dp=2, tp=4, etp=2), {}, "Use etp in (1, 4)"),
        (
            "qwen3_moe",
            Layout(tp=5, etp=5),
            {},
            "etp=5 must divide the model's 24 columns of an expert. Use etp in (1, 2",
        ),
        ("qwen3", Layout(tp=2, etp=2), {}, "etp=2 cuts experts, and Qwen3ForCausalLM has none. Set etp=1"),
        (
            "gemma3",
            Layout(),
            {},
            "no weight table for Gemma3ForCausalLM. Known: LlamaForCausalLM, MistralForCausalLM, Qwen2",
        ),
        ("gpt_oss", Layout(), {}, "no weight table for GptOssForCausalLM. Known: LlamaForCausalLM"),
        (
            "qwen3_5",
            Layout(tp=4),
            {},
            "tp=4 must divide the model's 2 key heads of its recurrent layers. Use tp in (1, 2)",
        ),
        (
            "qwen3_5",
            Layout(tp=2, cp=4, linear="heads"),
            {},
            "at tp=2 linear='heads' at cp=4 needs value heads divisible by 4",
        ),
        (
            "qwen3_5_vl_mtp",
            Layout(pp=3),
            {"mtp_steps": 1},
            "reads the vision tower, on the first. Set pp=1 or mtp_steps=0",
        ),
        ("qwen3", Layout(), {"offload": ("optimizer",)}, "offload"),
        ("qwen3", Layout(), {"compile": True}, "compile=True"),
    ],
)
def test_impossible_combinations_are_refused_with_what_works(model, layout, settings, message):
    adapter, _ = load_model(f"tiny:{model}")
    config = EngineConfig(f"tiny:{model}", layout=layout, backend="megatron", **settings)
    with pytest.raises(UserError, match=re.escape(message)):
        shape_of(config, adapter, layout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"backend": "fsdp", "megatron": MegatronOptions(transformer_engine=True)},
            "needs backend='megatron', got 'fsdp'",
        ),
    ],
)
def test_settings_of_the_other_backend_are_refused(settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        EngineConfig("tiny:qwen3", **{"backend": "megatron", **settings})


def test_sequence_parallelism_without_tensor_parallelism_is_refused():
    with pytest.raises(UserError, match="sequence_parallel=True needs tp > 1"):
        Layout(sequence_parallel=True)


def test_ulysses_over_more_ranks_than_a_tensor_parallel_rank_has_heads_is_refused():
    with pytest.raises(UserError, match=r"ulysses=3 needs .* got 2 \(model m at tp=2\). Use ulysses in \(1, 2\)"):
        resolve(
            Layout(tp=2, cp=3, mixer="ulysses"), heads=2, kv_heads=1, recurrent=False, windowed=False, model="m at tp=2"
        )


def test_heads_that_tensor_parallel_ranks_cannot_share_are_refused():
    adapter, _ = load_model("tiny:qwen3")
    with pytest.raises(UserError, match=r"tp=4 must divide .* Use tp in \(1, 2\)"):
        heads_per_rank(Layout(tp=4), adapter)
