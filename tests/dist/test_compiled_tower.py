"""A compiled model with a vision tower under "selective": the tower's blocks stand in checkpoints, attend once and do not keep q, k
and v, and the gradients are the oracle's (plain HF, one unpacked sample, fp64).

The partitioner is torch's own; its code generator is left out (aot_eager_decomp_partition), which would take a minute here.
Faults: no checkpoint around the blocks, which then keep q, k and v; a cache that gives a block the output of another.
"""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd.graph import saved_tensors_hooks

from longspan import Engine, EngineConfig, launch
from longspan.engine.fsdp import compiled
from longspan.layout import parse_layout
from longspan.mixers import local as local_module
from longspan.models.adapter import Context
from longspan.parity import Reference
from longspan.parity.cases import PPO, Case
from longspan.parity.differences import parameters
from longspan.parity.samples import default_samples, fill_fields

MODEL = "tiny:qwen3_vl"
LENGTHS = (13, 1, 40, 7, 29, 3)
CASE = Case("ppo", "ppo", {**PPO, "entropy": 0.01}, "constant", 60.0)
LIMIT, ZERO = 1e-12, 1e-9
FAULTS = {
    "": lambda: ExitStack(),
    "no checkpoint": lambda: patch.object(compiled, "checkpoint_tower", lambda blocks: None),
    "one slot": lambda: patch.object(Context, "tower_slot", lambda self, layer: self.tower_cache.slot(0)),
}


def body(layout, samples):
    """Of each fault: gradients, how often the tower attended, its patches, the bytes of each memory kept for backward."""
    with patch.object(compiled, "compile_fx", lookup_backend("aot_eager_decomp_partition")):
        return {fault: train(layout, samples, fault) for fault in FAULTS}


def train(layout, samples, fault):
    kept, runs, patches, attend = {}, [], [], local_module.run_forward

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    def count(total, calls, q, *others):
        runs.extend(calls)
        patches.append(len(q))
        return attend(total, calls, q, *others)

    config = EngineConfig(MODEL, layout=parse_layout(layout), dtype="float64", compile=True)
    with FAULTS[fault]():
        engine = Engine.build(config)
        with patch.object(local_module, "run_forward", count), saved_tensors_hooks(keep, lambda x: x):
            engine.forward_backward(samples, CASE.objective(), CASE.normalise, CASE.denominator)
    sizes = [x.untyped_storage().nbytes() for x in kept.values()]
    return engine.gradients(), len(runs), max(patches, default=0), sizes


@pytest.mark.parametrize("layout", ["cp2-ring", "cp3-ring"])
def test_gradients_are_the_oracles_and_blocks_attend_once(layout: str) -> None:
    reference = Reference(MODEL, dtype=torch.float64)
    samples = fill_fields(default_samples(reference, LENGTHS), reference)
    wanted = reference.run(samples, CASE).gradients
    tower = reference.model.config.vision_config
    found = launch(body, layout, samples, ranks=int(layout[2]), timeout_s=120, device="cpu")
    for rank, told in enumerate(found):
        gradients, runs, patches, sizes = told[""]
        error, where = parameters(gradients, wanted, ZERO)
        assert error <= LIMIT, (rank, error, where)
        assert parameters(told["one slot"][0], wanted, ZERO)[0] > 1e-3
        assert runs == told["no checkpoint"][1] == tower.depth, "attention runs once a block"
        row = (
            8 * patches * tower.hidden_size
        )  # a block's input, its attention's output; q and k; q, k, v are three of them
        bare = told["no checkpoint"][3]
        assert sizes.count(3 * row) == 0 and bare.count(3 * row) == tower.depth, (rank, sizes, bare)
        assert bare.count(row) - sizes.count(row) >= 2 * tower.depth, (rank, sizes, bare)
