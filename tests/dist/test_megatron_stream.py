"""Weights read piece by piece: the same bits as a whole load, and never a whole copy on a rank."""

from pathlib import Path

import pytest
import torch
from megatron_cases import installed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan import Engine, EngineConfig, launch
from longspan.errors import UserError
from longspan.launch import world
from longspan.layout import parse_layout
from longspan.models.loading import build_random, load_model
from longspan.models.skeleton import hollow, load_skeleton, open_weights
from longspan.models.tiny import tiny

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_mtp", "qwen3_5_vl", "qwen3_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_piece_equals_the_whole_load(family, tmp_path):
    build_random(tiny(family), torch.float32, 0).save_pretrained(tmp_path)
    whole, _ = load_model(str(tmp_path))
    shell = load_skeleton(str(tmp_path))
    weights = open_weights(shell, str(tmp_path))
    named = dict(shell.model.named_parameters())
    assert list(named) == [name for name, _ in whole.model.named_parameters()]
    assert all(map(hollow, named.values()))
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(weights.read(name), parameter), name
        for dim in range(min(2, parameter.dim())):
            if dim == 0 or parameter.dim() == 2:
                rows = parameter.shape[dim]
                piece = weights.read(name, dim, rows // 3, rows // 2)
                assert torch.equal(piece, parameter.narrow(dim, rows // 3, rows // 2 - rows // 3)), (name, dim)
    for (name, got), (_, want) in zip(shell.model.named_buffers(), whole.model.named_buffers(), strict=True):
        assert torch.equal(got, want), name


def test_a_missing_tensor_is_named(tmp_path):
    build_random(tiny("qwen3"), torch.float32, 0).save_pretrained(tmp_path)
    weights = open_weights(load_skeleton(str(tmp_path)), str(tmp_path))
    del weights.places["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        weights.read("model.layers.1.mlp.up_proj.weight")


def mapped(address):
    """Whether an address lies in a safetensors file that is mapped, not read."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            if start <= address < stop:
                return True
    return False


class Peak(TorchDispatchMode):
    """Most bytes of CPU tensors alive at once among those made inside the block; mapped files are not memory."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage._cdata not in self.alive and not mapped(storage.data_ptr()):
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def loaded(model, name):
    """Bytes of this rank: the peak while building, and what it keeps."""
    config = EngineConfig(model, layout=parse_layout(name), backend="megatron")
    Engine.build(config)  # imports and groups
    with Peak() as seen:
        engine = Engine.build(config)
    kept = sum(p.numel() * p.element_size() for p in engine.backend.parameters.values())
    return seen.peak, kept, engine.state_dict() if world().rank == 0 else engine.state_dict() and None


@installed
def test_no_rank_holds_more_than_its_shard_and_one_tensor(tmp_path):
    path = str(tmp_path / "model")
    own = {"vocab_size": 5003, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    model = build_random(tiny("qwen3", **own, tie_word_embeddings=False), torch.float32, 0)
    model.save_pretrained(path)
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    for name in ("tp2", "pp2"):
        results = launch(loaded, path, name, ranks=2, timeout_s=120)
        for peak, kept, _ in results:
            assert kept <= 0.51 * sum(sizes) + 40_000
            assert peak <= kept + max(sizes) // 2 + 100_000, (name, peak, kept)
            assert peak < 0.75 * sum(sizes), (name, peak, sum(sizes))
        state = results[0][2]
        assert all(torch.equal(state[key], value) for key, value in model.named_parameters())
