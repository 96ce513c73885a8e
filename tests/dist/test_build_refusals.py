"""What lies outside the support matrix is refused at Engine.build, before anything runs, with what is supported instead."""

import json
import re
from pathlib import Path

import pytest
from peft import LoraConfig

from longspan import Engine, EngineConfig
from longspan.errors import UserError
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.models.tiny import tiny

# model ("gpt2", "gemma2": a folder with such a config), layout, settings, what the message must say
REFUSED = (
    ("gpt2", "dp1", {}, r"GPT2LMHeadModel.*Known: .*LlamaForCausalLM"),
    ("softcap", "dp1", {}, r"attn_logit_softcapping=50.0 is not supported"),
    ("no weights", "dp1", {}, r"has no weights that can be read"),
    ("tiny:nothing", "dp1", {}, r"known: .*qwen3_vl"),
    (
        "tiny:qwen3",
        "cp3-ulysses",
        {},
        r"divisible by 3, got 4 \(model tiny:qwen3\)\. Use ulysses in \(1, 2, 4\) or mixer='ring'",
    ),
    ("tiny:qwen3_5", "cp2-ring-zigzag", {}, r"index='zigzag' .* Use index='contiguous'"),
    ("tiny:qwen3_5", "cp3-gather-heads", {}, r"linear='heads' at cp=3 .* Use cp in \(1, 2, 4\) or linear='state'"),
    (
        "tiny:qwen3",
        "cp2-ring-heads",
        {},
        r"recurrent layers cross ranks, and Qwen3ForCausalLM has none\. Leave linear='auto'",
    ),
    ("tiny:qwen3_vl", "cp2-heads", {}, r"Qwen3VLForConditionalGeneration has none"),
    ("tiny:qwen3", "ep1-dp1-tp2", {}, r"tp=2 needs backend='megatron'; the fsdp backend runs dp, cp and ep"),
    ("tiny:qwen3", "dp2-ep2", {}, r"needs a model with experts; tiny:qwen3 has none\. Set ep=1"),
    ("tiny:qwen3", "dp1", {"mtp_steps": 1}, r"tiny:qwen3 has no multi-token-prediction head"),
    ("tiny:qwen3_5", "dp1", {"freeze": ("adaptor",)}, r"matches no parameter\. Parts of this model: .*'language'"),
)


def folders(root: Path) -> dict[str, str]:
    """Checkpoints that are not in the matrix, as far as a config says so."""
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    softcap = tiny("gemma3").to_dict() | {"attn_logit_softcapping": 50.0}
    found = {}
    for name, config in {"gpt2": gpt2, "softcap": softcap, "no weights": tiny("qwen3").to_dict()}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        found[name] = str(root / name)
    return found


def refusals(named: dict[str, str], ranks: int) -> list[str]:
    found = []
    for model, layout, settings, _ in of_size(ranks):
        try:
            Engine.build(
                EngineConfig(named.get(model, model), parse_layout(layout), max_tokens_per_rank=64, **settings)
            )
            found.append("built")
        except UserError as error:
            found.append(str(error))
    return found


def of_size(ranks: int) -> list[tuple]:
    return [entry for entry in REFUSED if parse_layout(entry[1]).ranks == ranks]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_outside_the_matrix_is_refused_with_what_is_inside(ranks: int, tmp_path: Path) -> None:
    told = launch(refusals, folders(tmp_path), ranks, ranks=ranks, timeout_s=60)
    assert all(messages == told[0] for messages in told), "ranks refuse for different reasons"
    for message, (model, layout, _, part) in zip(told[0], of_size(ranks), strict=True):
        with pytest.raises(UserError, match=part):
            raise UserError(message or f"{model} {layout}")


SAME = {"model": "tiny:qwen3", "max_tokens_per_rank": 64}
DIFFERS = (  # settings of the last rank, what every rank must say
    ({"seed": 1}, "seed=0 on rank 0 and 1 on rank {last}"),
    ({"layout": "ring"}, r"layout=.* on rank 0 and .*mixer='ring'.* on rank {last}"),
    ({"recompute": "full"}, "recompute='selective' on rank 0 and 'full' on rank {last}"),
    ({"model": "tiny:qwen2"}, "model='tiny:qwen3' on rank 0 and 'tiny:qwen2' on rank {last}"),
    ({"value_head": True}, "value_head=False on rank 0 and True on rank {last}"),
)


def settings_apart(ranks: int) -> list[str]:
    found, last = [], world().rank == ranks - 1
    for differs, _ in DIFFERS:
        layout = parse_layout(f"cp{ranks}-ring" if last and "layout" in differs else f"cp{ranks}-gather")
        try:
            Engine.build(EngineConfig(**(SAME | (differs if last else {}) | {"layout": layout})))
            found.append("built")
        except UserError as error:
            found.append(str(error))
    alike = {"r": 2, "target_modules": {"q_proj", "v_proj", "down_proj"}}
    Engine.build(EngineConfig(**(SAME | {"layout": parse_layout(f"dp{ranks}"), "lora": {"a": LoraConfig(**alike)}})))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_different_settings_are_told_apart(ranks: int) -> None:
    """They trained half of one model and half of another, or waited for each other. Control: sets that iterate differently pass."""
    for messages in launch(settings_apart, ranks, ranks=ranks, timeout_s=60):
        for message, (_, part) in zip(messages, DIFFERS, strict=True):
            assert re.search(part.format(last=ranks - 1), message), message
