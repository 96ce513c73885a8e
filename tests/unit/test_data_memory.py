"""The memory model against what autograd holds on the CPU: never below the true peak of saved tensors, in any family and
under any policy.

Saved tensors are counted by hooks, each storage once, from the moment one graph saves it until the last one lets it go;
parameters are not
counted. What a checkpointed layer saves when it is run again is test_data_cost's. Toy models, so many tokens that weights
do not matter.
"""

import dataclasses
import gc
from collections import Counter

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from longspan import Engine, EngineConfig, Image, Layout, Objective, Sample
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.launch import world
from longspan.layout import Mesh, resolve
from longspan.models.loading import adapt, build_random
from longspan.models.tiny import tiny

TOKENS, DOCUMENT = 488, 61  # 8 documents; no size of a toy model is a multiple of 61


class Saved:
    """Bytes that saved tensors hold now, and the most they held."""

    def __init__(self, parameters: set[tuple[int, ...]]) -> None:
        self.parameters = parameters
        self.users: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> "Held":
        return Held(self, tensor)

    def hold(self, storage: int, size: int) -> None:
        self.users[storage] += 1
        if self.users[storage] == 1:
            self.sizes[storage] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def release(self, storage: int) -> None:
        self.users[storage] -= 1
        if not self.users[storage]:
            self.now -= self.sizes[storage]


class Held:
    """One saved tensor, as autograd keeps it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor, self.storage = saved, tensor.detach(), None  # an output would hold its own graph
        shape = tuple(tensor.shape)
        if isinstance(tensor, torch.nn.Parameter) or shape in saved.parameters or shape[::-1] in saved.parameters:
            return
        self.storage = tensor.untyped_storage().data_ptr()
        saved.hold(self.storage, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        if self.storage is not None:
            self.saved.release(self.storage)


def engine_of(family: str, recompute: str, dtype: str) -> Engine:
    family, _, adapted = family.partition("+")
    lora = {"only": LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])} if adapted else None
    config = tiny(family)
    text, here = config.get_text_config(), world()
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    layout = resolve(Layout(), heads=heads, kv_heads=kv_heads, recurrent=False, windowed=False)
    settings = EngineConfig(
        model=family, layout=layout, dtype=dtype, recompute=recompute, max_tokens_per_rank=2 * TOKENS, lora=lora
    )
    adapter = adapt(build_random(config, torch.float32, 0), None)
    mesh = Mesh(layout, ranks=1, rank=0, device=here.device)
    return Engine(settings, adapter, mesh, FSDPBackend(settings, adapter, mesh))


def batch(engine: Engine) -> tuple[list[Sample], float]:
    """Documents, each with an image where the model sees, and the share of visual tokens."""
    draw, samples, visual = np.random.default_rng(0), [], 0
    for _ in range(TOKENS // DOCUMENT):
        ids, media, reader = draw.integers(0, 90, DOCUMENT).tolist(), [], engine.adapter.reader
        if reader is not None:
            media = [Image(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))]
            (length,) = reader.run_lengths(reader.grid(media[0]))
            known = engine.adapter.ids
            ids[: length + 2] = [known.start, *[known.image] * length, known.end]
            visual += length
        fields = {"advantage": torch.ones(DOCUMENT), "old_logprob": -torch.ones(DOCUMENT)}
        samples.append(Sample(ids, [1] * DOCUMENT, torch.ones(DOCUMENT), fields, media=media))
    return samples, visual / TOKENS


CASES = [
    ("qwen3", "none", "bfloat16"),
    ("qwen3", "selective", "float32"),
    ("llama", "full", "bfloat16"),
    ("qwen3+lora", "none", "bfloat16"),
    ("qwen3_vl", "none", "bfloat16"),
    ("qwen3_vl", "selective", "float32"),
    ("qwen3_moe", "none", "float32"),
    ("qwen3_moe", "selective", "bfloat16"),
    ("qwen3_5", "none", "bfloat16"),
    ("qwen3_5", "full", "float32"),
]


@pytest.mark.parametrize(("family", "recompute", "dtype"), CASES)
def test_never_below_what_autograd_holds(family: str, recompute: str, dtype: str) -> None:
    engine = engine_of(family, recompute, dtype)
    samples, visual_share = batch(engine)
    shapes = {tuple(parameter.shape) for parameter in engine.backend.policy.parameters()}
    saved = Saved(shapes)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        engine.forward_backward(samples, Objective("ppo", clip=0.2))
    gc.collect()
    assert saved.now == 0, "everything is released after backward"
    model = engine.planner.memory_of(visual_share)
    moments = [
        sum(parts.get(name, 0.0) for name in ("activations", "layer", "head", "vision"))
        for parts in model.moments(TOKENS).values()
    ]
    said = max(moments)
    assert saved.peak <= said, (saved.peak / TOKENS, said / TOKENS)
    if recompute == "none":  # hooks do not see inside a checkpoint that is run again
        assert said <= 1.4 * saved.peak
        fewer = dataclasses.replace(model, shape=dataclasses.replace(model.shape, layers=1, linear_layers=0))
        assert sum(fewer.moments(TOKENS)["head"].values()) < saved.peak, "control: a layer is missing"
