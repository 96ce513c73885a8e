"""Wrong Python types: every public constructor and function names the value, what it must be and the way out."""

import inspect
import math
import pickle

import numpy as np
import pytest
import torch

import longspan
from longspan import SGD, AdamW, EngineConfig, Image, Layout, Objective, Sample, UserError, Video
from longspan.data import check_samples
from longspan.engine.megatron.options import MegatronOptions
from longspan.layout import parse_layout
from longspan.rl import (
    EpochOrder,
    Grpo,
    Loss,
    Prompt,
    Rollout,
    RunConfig,
    Schedule,
    Supervised,
    exact_match,
    gae,
    grpo_advantage,
)
from longspan.typed import typed

FRAMES = np.zeros((2, 4, 4, 3), dtype=np.uint8)
SAMPLE = {"input_ids": [1], "target_ids": [2], "mask": [1]}
# what it is -> arguments that it takes, then (argument, wrong value, what the message says of it)
TABLE = {
    AdamW: (
        {"lr": 0.1},
        ("lr", "x", "lr='x' must be a number. Write lr=0.1."),
        ("lr", None, "lr=None must be a number"),
        ("lr", True, "lr=True must be a number"),
        ("betas", 0.9, "betas=0.9 must be a tuple of 2 numbers. Write betas=(0.1, 0.1), or leave it out for (0.9, 0.95)."),
        ("betas", (0.9,), "betas=(0.9,) must be a tuple of 2 numbers"),
        ("betas", (0.9, "x"), "betas[1]='x' must be a number. Give for example 0.1."),
        ("clip_norm", "1", "clip_norm='1' must be a number or None. Write clip_norm=0.1, or leave it out for None."),
        ("rate", 0.1, "got an unexpected keyword argument 'rate'. It takes lr, betas, eps, weight_decay, clip_norm."),
    ),
    SGD: ({"lr": 0.1}, ("momentum", [0.9], "momentum=[0.9] must be a number"), ("lr", "0.1", "lr='0.1'")),
    EngineConfig: (
        {"model": "tiny:qwen3"},
        ("model", None, "model=None must be a string. Write model='name'."),
        ("layout", "cp2", "layout='cp2' must be a Layout. Write layout=Layout(...), or leave it out."),
        ("offload", None, "offload=None must be a tuple of items. Leave it out for ()."),
        ("offload", ("disk",), "offload[0]='disk' must be one of 'checkpoints', 'optimizer', 'parameters'"),
        ("freeze", "vision", "freeze='vision' must be a tuple of strings. Write freeze=('name',), or leave it out for ()."),
        ("max_tokens_per_rank", "12", "max_tokens_per_rank='12' must be a whole number or 'auto'"),
        ("max_tokens_per_rank", 4096.0, "max_tokens_per_rank=4096.0 must be a whole number or 'auto'"),
        ("dtype", "fp32", "dtype='fp32' must be one of 'float64', 'float32', 'bfloat16'. Leave it out for 'float32'."),
        ("dtype", torch.float32, "dtype=torch.float32 must be one of"),
        ("dynamic_cp", "yes", "dynamic_cp='yes' must be True or False"),
        ("lora", [1], "lora=[1] must be a mapping or None"),
        ("mtp_steps", None, "mtp_steps=None must be a whole number"),
    ),
    MegatronOptions: ({}, ("overlap_experts", "no", "overlap_experts='no' must be True or False")),
    Layout: (
        {},
        ("cp", "2", "cp='2' must be a whole number. Write cp=1, or leave it out for 1."),
        ("cp", 2.0, "cp=2.0 must be a whole number"),
        ("cp", True, "cp=True must be a whole number"),
        ("ulysses", "2", "ulysses='2' must be a whole number or None"),
        ("mixer", "rings", "mixer='rings' must be one of 'auto', 'ulysses', 'ring', 'gather', 'hybrid'"),
        ("sequence_parallel", "no", "sequence_parallel='no' must be True or False"),
    ),
    Sample: (
        SAMPLE,
        ("input_ids", None, "input_ids=None must be a tensor, an array or a sequence. Write input_ids=[...]."),
        ("mask", "101", "mask='101' must be a tensor, an array or a sequence"),
        ("fields", [1.0], "fields=[1.0] must be a mapping or None. Write fields={'name': ...}, or leave it out for None."),
        ("fields", {"advantage": None}, "fields['advantage']=None must be a tensor, an array or a sequence"),
        ("fields", {3: [1.0]}, "key of fields[3]=3 must be a string"),
        ("media", [FRAMES[0]], "media[0]=array("),
        ("media", "a.png", "media='a.png' must be a sequence"),
        ("images", "a.png", "images='a.png' must be a sequence or None"),
        ("group", [1], "group=[1] must be a string, a whole number or None"),
        ("adapter", 3, "adapter=3 must be a string or None"),
        ("tokens", None, "got an unexpected keyword argument 'tokens'. It takes input_ids, target_ids, mask, fields"),
    ),
    Video: (
        {"source": FRAMES},
        ("source", 5, "source=5 must be a string, a path, an array, a tensor or a sequence"),
        ("timestamps", 0.5, "timestamps=0.5 must be a tuple of numbers or None"),
        ("timestamps", (0.0, "1"), "timestamps[1]='1' must be a number"),
    ),
    Objective: (
        {"loss": "ppo"},
        ("loss", 3, "loss=3 must be a string or a function"),
        ("clip", [0.2], "clip=[0.2] must be a number, a string or None"),
        ("kl", "x", "kl='x' must be a number"),
        ("moe_over", None, "moe_over=None must be a string"),
        ("uses", "entropy", "uses='entropy' must be a sequence or None"),
    ),
    RunConfig: (
        {"folder": "runs/a"},
        ("folder", None, "folder=None must be a string"),
        ("checkpoint_every", "5", "checkpoint_every='5' must be a whole number"),
        ("copies", "wandb", "copies='wandb' must be a tuple of strings or None"),
    ),
    Loss: ({"name": "ppo"}, ("options", 0.2, "options=0.2 must be a mapping"), ("kl_estimator", "k4", "one of 'k1'")),
    Supervised: (
        {"steps": 1, "samples": 1},
        ("steps", "1", "steps='1' must be a whole number"),
        ("loss", "cross_entropy", "loss='cross_entropy' must be a Loss. Write loss=Loss(...)"),
        ("optimizer", SGD(lr=0.1), "must be an AdamW. Write optimizer=AdamW(...)"),
    ),
    Grpo: (
        {"steps": 1, "prompts": 1, "group_size": 2, "max_new_tokens": 4, "loss": Loss("ppo")},
        ("temperature", "1", "temperature='1' must be a number"),
        ("group_size", 2.0, "group_size=2.0 must be a whole number"),
        ("schedule", "cosine", "schedule='cosine' must be a Schedule. Write schedule=Schedule(...)"),
    ),
    Schedule: ({}, ("kind", "cosin", "kind='cosin' must be one of"), ("floor", None, "floor=None must be a number")),
    Prompt: (
        {"id": "a", "input_ids": (1, 2)},
        ("id", 3, "id=3 must be a string"),
        ("input_ids", torch.tensor([1]), "input_ids=tensor([1]) must be a tuple of whole numbers"),
        ("answer", (1, 2.5), "answer[1]=2.5 must be a whole number"),
    ),
    Rollout: ({"ids": (1,), "logprobs": (0.0,), "finished": True}, ("finished", 1, "finished=1 must be True or False")),
    longspan.launch: (
        {"fn": int, "ranks": 0},
        ("ranks", "2", "ranks='2' must be a whole number"),
        ("fn", "train", "fn='train' must be a function"),
        ("timeout_s", None, "timeout_s=None must be a number"),
    ),
    longspan.expand: ({"sample": Sample(**SAMPLE), "model": "tiny:qwen3_vl"}, ("sample", SAMPLE, "must be a Sample")),
    EpochOrder: ({"size": 3, "seed": 0}, ("size", "3", "size='3' must be a whole number")),
    grpo_advantage: ({"rewards": [0.0, 1.0], "groups": ["a", "a"]}, ("rewards", 1.0, "rewards=1.0 must be a tensor, an array or a sequence")),
    gae: (
        {**{name: torch.ones(2) for name in ("rewards", "values", "mask")}, "gamma": 1.0, "lam": 0.9},
        ("rewards", [0.0, 1.0], "rewards=[0.0, 1.0] must be a tensor"),
        ("lam", None, "lam=None must be a number"),
    ),
    exact_match: ({"response": [1], "answer": [1]}, ("answer", None, "answer=None must be a tensor, an array or a sequence")),
    parse_layout: ({"name": "cp2"}, ("name", Layout(), "must be a string")),
    check_samples: (
        {"samples": [Sample(**SAMPLE)], "vocab_size": 9},
        ("samples", [Sample(**SAMPLE), SAMPLE], "samples[1]={'input_ids': [1], 'mask': [1], 'target_ids': [2]} must be a Sample"),
        ("samples", Sample(**SAMPLE), "must be a sequence"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", TABLE, ids=lambda target: target.__name__)
def test_wrong_types_are_refused_by_name(target) -> None:
    good, *wrong = TABLE[target]
    if target is not longspan.launch:
        target(**good)
    for name, value, says in wrong:
        with pytest.raises(UserError) as caught:
            target(**(good | {name: value}))
        message = str(caught.value)
        assert message.startswith(f"{target.__name__}: ") and says in message, message


@pytest.mark.parametrize("target", TABLE, ids=lambda target: target.__name__)
def test_every_argument_is_held_to_its_kind(target) -> None:
    """Whatever the argument, something that is nothing is refused before the body reads it."""
    good = TABLE[target][0]
    for name in inspect.signature(target).parameters.keys() - {"args", "options"}:
        with pytest.raises(UserError, match=rf"^{target.__name__}: {name}=<object .* must be "):
            target(**(good | {name: object()}))


def test_what_fits_is_taken_as_it_is() -> None:
    """Control: whole numbers for numbers, numpy's numbers, lists for tuples, subclasses; nothing is converted."""
    assert AdamW(lr=1, betas=[0, np.float32(0.5)]).betas == [0, np.float32(0.5)]
    assert Layout(cp=np.int64(2)).ranks == 2
    assert EngineConfig("tiny:qwen3", freeze=["vision"], max_tokens_per_rank=8).freeze == ["vision"]
    assert Video(FRAMES, timestamps=[0, 1]).timestamps == (0.0, 1.0)
    assert len(Sample(range(3), np.arange(3), torch.ones(3), images=[Image(FRAMES[0])])) == 3
    assert pickle.loads(pickle.dumps(AdamW(lr=0.5))) == AdamW(lr=0.5)
    with pytest.raises(UserError, match="at least 0 and finite"):
        AdamW(lr=math.inf)  # values are the class's own affair


def test_names_defined_later_and_class_methods() -> None:
    class Node:
        @classmethod
        @typed
        def join(cls, other: "Later | None") -> str:
            return type(other).__name__

    assert Node.join(Later()) == "Later" and Node.join(None) == "NoneType"
    with pytest.raises(UserError, match="other=3 must be a Later or None"):
        Node.join(3)


class Later:
    pass
