"""Engine.build checks the kernel that it chose, on the run's own head dims, and refuses a wrong one by name."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Engine, EngineConfig
from longspan.engine.kernels import attention_shapes
from longspan.errors import UserError
from longspan.mixers.kernels import choose
from longspan.mixers.kernels.sdpa import Sdpa
from longspan.models.loading import load_model

TOWER_HEADS = 3  # of tiny:qwen3_vl; its decoder has 4


@dataclass(frozen=True)
class Wrong(Sdpa):
    """Sdpa with a planted fault: dq 5 % too large, for layers of `heads` heads only."""

    heads: int = 0
    name: str = "planted"

    def backward(self, dout: Tensor, q: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().backward(dout, q, *rest, **options)
        return (dq * 1.05 if q.shape[1] == self.heads else dq), dk, dv


def build(monkeypatch: pytest.MonkeyPatch, kernel: object, name: str) -> Engine:
    monkeypatch.setitem(choose.KERNELS, name, (lambda device, dtype, head_dim: "", lambda deterministic: kernel))
    config = EngineConfig(model="tiny:qwen3_vl", dtype="float64", kernel=name, max_tokens_per_rank=64)
    return Engine.build(config)


def test_a_right_kernel_is_used_and_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = build(monkeypatch, Sdpa(), "sdpa")
    assert engine.builder.kernel.name == "sdpa"
    assert "attention kernel: sdpa, torch.float64, head dim 8" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [False, True])
def test_the_kernel_is_made_deterministic_where_the_config_says_so(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    made = []
    entry = (lambda device, dtype, head_dim: "", lambda deterministic: (made.append(deterministic), Sdpa())[1])
    monkeypatch.setitem(choose.KERNELS, "sdpa", entry)
    Engine.build(
        EngineConfig("tiny:qwen3", dtype="float64", kernel="sdpa", deterministic=wanted, max_tokens_per_rank=8)
    )
    assert made == [wanted]


@pytest.mark.parametrize(("heads", "where"), [(4, "decoder"), (TOWER_HEADS, "vision tower")])
def test_a_wrong_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, heads: int, where: str) -> None:
    with pytest.raises(UserError, match=rf"{where}: kernel='planted' is wrong here: .*dq differs"):
        build(monkeypatch, Wrong(heads=heads), "planted")


def test_the_check_has_the_shapes_of_the_model() -> None:
    adapter, _ = load_model("tiny:qwen3_vl", torch.float32, 0)
    shapes = [(s.where, s.heads, s.kv_heads, s.head_dim) for s in attention_shapes(adapter)]
    assert shapes == [("decoder", 4, 2, 8), ("vision tower", TOWER_HEADS, TOWER_HEADS, 8)]
