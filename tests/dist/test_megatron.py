"""The megatron backend against the oracle (plain Hugging Face, one unpacked sample at a time) and the fsdp backend.

Few launches with many layouts each: importing megatron-core costs 8 s a process. Launches also plant a fault, which the
same checks must find.
"""

import re
from dataclasses import replace

import pytest
import torch
from megatron_cases import Job, hold, installed, run

from longspan import AdamW, Engine, EngineConfig, Objective, Sample
from longspan.engine.megatron.options import MegatronOptions
from longspan.engine.megatron.shape import shape_of
from longspan.engine.megatron.weights import Entry, Part, join, local, split, take
from longspan.engine.megatron.zero import own_slice
from longspan.engine.planning import heads_per_rank
from longspan.errors import UserError
from longspan.layout import CPGroup, Layout, parse_layout, resolve
from longspan.models.loading import load_model
from longspan.models.skeleton import MemoryWeights
from longspan.parity.checks import ALL_CHECKS

TWO = (
    Job(
        "qwen3",
        ("cp2-ring", "cp2-ulysses", "pp2", "ep2", "tp2-sp", "tp2"),
        ("ppo", "together"),
        "tp",
        checks=ALL_CHECKS,
    ),
    Job("qwen2", ("tp2-sp", "pp2"), ("ppo",)),
    Job("llama", ("tp2", "pp2"), ("ppo",)),
    Job("mistral", ("tp2-sp", "cp2-gather"), ("ppo",)),
    Job("qwen3_moe", ("ep2", "cp2-ring-ep2", "tp2-sp", "dp2"), ("ppo", "moe_aux", "moe_z"), "data"),
    Job("qwen3_vl", ("cp2-ring", "tp2-sp", "tp2"), ("together",)),
)
FOUR = (Job("qwen3", ("tp2-cp2-gather", "pp2-cp2", "pp2-tp2-sp", "tp2-cp2-ring"), ("together",), "data"),)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run(TWO, tmp_path_factory.mktemp("two"))[0]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return *run(FOUR, folder, resume), folder


@installed
@pytest.mark.parametrize(("model", "layout"), [(job.model, layout) for job in TWO for layout in job.layouts])
def test_two_ranks_equal_the_oracle(two_ranks, model, layout):
    hold(two_ranks, model, layout)


@installed
@pytest.mark.parametrize("layout", FOUR[0].layouts)
def test_four_ranks_equal_the_oracle(four_ranks, layout):
    hold(four_ranks[0], "qwen3", layout)


@installed
@pytest.mark.parametrize("model", [job.model for job in TWO if job.fault is not None])
def test_a_missing_sum_on_two_ranks_is_found(two_ranks, model):
    assert any(not cell.passed for cell in two_ranks[model, "fault"][0])


@installed
def test_a_missing_sum_on_four_ranks_is_found(four_ranks):
    assert any(not cell.passed for cell in four_ranks[0]["qwen3", "fault"][0])


def samples():
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (13, 1, 22, 7):
        ids = torch.randint(0, 90, (length + 1,), generator=generator)
        fields = {"advantage": torch.randn(length, generator=generator), "old_logprob": torch.full((length,), -4.5)}
        made.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields))
    return made


def build(name, backend="megatron", **settings):
    return Engine.build(
        EngineConfig("tiny:qwen3", layout=parse_layout(name), backend=backend, max_tokens_per_rank=48, **settings)
    )


def step(engine):
    engine.forward_backward(samples(), Objective("ppo", clip=0.2))
    return engine.optim_step(AdamW(lr=1e-2, eps=1e-4, clip_norm=1.0))["grad/norm"]


def resume(folder):
    """Save under one layout, load under others and under fsdp: the same bits, and the same next step."""
    first = build("tp2-cp2")
    step(first)
    first.save(folder / "checkpoint")
    first.export(folder / "exported")
    saved = first.state_dict()
    norm = step(first)
    after = first.state_dict()
    found = {}
    for target in ("tp2-cp2 megatron", "pp2-dp2 megatron", "tp2-pp2-sp megatron", "dp4 fsdp"):
        name, backend = target.split()
        other = build(name, backend, seed=7)
        other.load(folder / "checkpoint")
        equal = all(torch.equal(saved[key], value) for key, value in other.state_dict().items())
        distance = abs(step(other) - norm) / norm
        moved = max(float((value - after[key]).abs().max()) for key, value in other.state_dict().items())
        found[target] = (equal, distance, moved, other.step)
    return found, saved


@installed
def test_a_checkpoint_loads_under_any_layout_and_backend(four_ranks):
    _, (found, saved), folder = four_ranks
    for name, (equal, distance, moved, steps) in found.items():
        assert equal, f"{name} loaded other weights"
        assert steps == 2
        limit = 0.0 if name == "tp2-cp2 megatron" else 1e-5
        assert distance <= limit, name
        assert moved <= limit, name
    adapter, _ = load_model(str(folder / "exported"))
    for name, parameter in adapter.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name


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


def test_parts_of_every_tensor_parallel_rank_make_the_whole_again():
    adapter, _ = load_model("tiny:qwen2")
    shape = replace(shape_of(EngineConfig("tiny:qwen2", backend="megatron"), adapter, Layout()), tp=2)
    whole = {name: parameter.detach() for name, parameter in adapter.model.named_parameters()}
    groups = [CPGroup(None, rank, 2, (0, 1)) for rank in range(2)]
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
    entries = [
        Entry(tuple(Part(name, "tp") for name in names), "qkv"),
        Entry(tuple(Part(f"model.layers.0.mlp.{kind}_proj.weight", "tp") for kind in ("gate", "up")), "stack"),
        Entry((Part("model.layers.0.self_attn.o_proj.weight", "tp", 1),)),
        Entry((Part("model.embed_tokens.weight", "tp"),)),  # 97 rows: 49 and 48, the last padded to 49
    ]
    for entry in entries:
        joined = [
            join([take(MemoryWeights(whole), p, whole[p.name].shape[p.dim], group) for p in entry.parts], entry, shape)
            for group in groups
        ]
        assert joined[0].shape == joined[1].shape
        parts = [split(piece, entry, shape) for piece in joined]
        for place, part in enumerate(entry.parts):
            rows = whole[part.name].shape[part.dim]
            pieces = [local(parts[rank][place], part, rows, groups[rank]) for rank in range(2)]
            assert torch.equal(torch.cat(pieces, part.dim), whole[part.name])


def test_slices_of_every_data_rank_make_the_whole_again():
    for numel in (1, 2, 7, 12):
        whole = torch.arange(float(numel))
        slices = [own_slice(whole, CPGroup(None, rank, 3, (0, 1, 2))) for rank in range(3)]
        assert torch.equal(torch.cat(slices), whole)
        slices[0].zero_()
        assert whole[0] == 0.0, "a slice is a view"


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
