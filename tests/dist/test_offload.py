"""Offloading changes where things live, not one bit of any number: CP=2 and 3, three optimizer steps, a checkpoint between.

Every setting is held against the same run without offload: metrics, gradients and weights bit for bit. Blocks are made
small, so that every tensor takes several. Controls: a store that gives blocks away before they are read back, and
moments lost on the host, must be seen.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from ragged import RULE, ragged, train
from torch import Tensor

from longspan import AdamW, Engine, EngineConfig, Layout
from longspan.engine.fsdp import host, host_optimizer
from longspan.engine.fsdp.host import HostStore
from longspan.engine.fsdp.host_optimizer import HostOptimizer
from longspan.engine.optim import local
from longspan.errors import UserError
from longspan.launch import launch
from longspan.parity.cases import Case

CASE = Case("ppo", "ppo", {"clip": 0.2}, **RULE)
LAYOUTS = {"selective": Layout(cp=2), "full": Layout(cp=3, mixer="ring")}  # by recompute


def run(offload: tuple[str, ...], recompute: str, plant: str, path: str) -> dict[str, Tensor]:
    """Everything a user sees of three steps, the last one after a save and a load."""
    host.BLOCK, host_optimizer.BUCKET = 512, 4096
    if plant == "blocks":
        park = HostStore.park

        def leaky(self: HostStore, x: Tensor) -> object:
            found = park(self, x)
            self._free += self._parked[-1].blocks  # given away while they are still needed
            return found

        HostStore.park = leaky
    config = EngineConfig(
        model="tiny:qwen3",
        layout=LAYOUTS[recompute],
        dtype="float64",
        max_tokens_per_rank=20,
        recompute=recompute,
        offload=offload,
    )
    engine, seen = Engine.build(config), {}
    for step in range(3):
        metrics = train(engine, ragged(step), CASE)
        seen |= {f"{step} {name}": gradient for name, gradient in engine.gradients().items()}
        seen[f"{step} loss"] = torch.tensor(metrics["loss/total"])
        if plant == "moments" and step == 1:
            for slots in engine.backend.optimizers[None]._host.values():
                slots["exp_avg"].zero_()
        report = engine.optim_step(AdamW(lr=1e-2, weight_decay=0.1, clip_norm=1.0))
        seen[f"{step} norm"] = torch.tensor(report["grad/norm"])
        if step == 1 and not plant:
            engine.save(path)
            engine = Engine.build(config)
            engine.load(path)
    check_where(engine, offload)
    return seen | {f"weights {name}": weight for name, weight in engine.state_dict().items()}


def check_where(engine: Engine, offload: tuple[str, ...]) -> None:
    """What was asked for took place."""
    optimizer = engine.backend.optimizers[None]
    if "optimizer" in offload and "parameters" not in offload:
        assert isinstance(optimizer, HostOptimizer) and len(optimizer.parts) > 2
        assert all(set(slots) == {"step"} for slots in optimizer.state.values())
    assert (engine.backend.host is not None) == ("checkpoints" in offload)
    if engine.backend.host is not None:
        assert not engine.backend.host._parked and len(engine.backend.host._free) > 4
    assert all(local(parameter).device.type == "cpu" for _, parameter in engine.backend.named_parameters())


@cache
def plain(recompute: str) -> list[dict[str, Tensor]]:
    with TemporaryDirectory() as folder:
        return launch(run, (), recompute, "", f"{folder}/plain", ranks=LAYOUTS[recompute].ranks)


def differing(offload: tuple[str, ...], recompute: str, plant: str, path: Path) -> list[str]:
    found = launch(run, offload, recompute, plant, str(path / "offload"), ranks=LAYOUTS[recompute].ranks)
    pairs = list(zip(plain(recompute), found, strict=True))
    assert all(set(a) == set(b) for a, b in pairs)
    return [name for a, b in pairs for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize(
    ("offload", "recompute"),
    [
        (("checkpoints",), "full"),
        (("checkpoints",), "selective"),
        (("optimizer",), "selective"),
        (("parameters",), "full"),
        (("checkpoints", "optimizer", "parameters"), "selective"),
    ],
)
def test_offload_changes_no_bit(offload: tuple[str, ...], recompute: str, tmp_path: Path) -> None:
    assert differing(offload, recompute, "", tmp_path) == []


@pytest.mark.parametrize(("offload", "plant"), [(("checkpoints",), "blocks"), (("optimizer",), "moments")])
def test_a_planted_fault_is_seen(offload: tuple[str, ...], plant: str, tmp_path: Path) -> None:
    assert differing(offload, "selective", plant, tmp_path)


def test_offload_that_cannot_be_honoured_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"recompute='none': there are no checkpoints"):
        Engine.build(EngineConfig(model="tiny:qwen3", recompute="none", offload=("checkpoints",)))


def test_parked_tensors_come_back_as_they_were() -> None:
    """Strided, empty, odd-sized and low-precision tensors; several blocks; blocks are used again."""
    store = HostStore(torch.device("cpu"))
    tensors = [torch.randn(7, 9).t(), torch.empty(0, 3), torch.randn(5, 3).bfloat16(), torch.randn(1, 130, 2).double()]
    for _ in range(2):
        fetches = [store.park(x) for x in tensors]
        for x, fetch in reversed(list(zip(tensors, fetches, strict=True))):
            back = fetch()
            assert back.dtype == x.dtype and torch.equal(back, x)
    assert len(store._free) == sum(x.numel() > 0 for x in tensors)
