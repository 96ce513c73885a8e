"""What tensor-parallel ranks and data ranks hold of a weight makes the whole again. No ranks."""

from dataclasses import replace

import torch

from longspan import EngineConfig
from longspan.engine.megatron.shape import shape_of
from longspan.engine.megatron.weights import Entry, Part, join, local, split, take
from longspan.engine.megatron.zero import own_slice
from longspan.layout import CPGroup, Layout
from longspan.models.loading import load_model
from longspan.models.skeleton import MemoryWeights


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
