"""What of a row is page-locked beside a GPU: all of it where one rank uses it, else nothing before a rank has cut its part.

Seen in what is asked of torch, since a machine without a GPU has no such memory. Control: a row of any size pinned.
"""

from types import SimpleNamespace

import pytest
import torch

from longspan import Sample
from longspan.data import Row, pack
from longspan.engine import steps as steps_module
from longspan.engine.batch import make_batch
from longspan.engine.steps import StepBuilder
from longspan.models import load_model


def asked(monkeypatch: pytest.MonkeyPatch, device: str, size: int) -> set[bool]:
    """Whether the streams of a row of `size` ranks are made in pinned memory."""
    ids = list(range(5, 13))
    adapter = load_model("tiny:qwen3", torch.float32, 0)[0]
    batch = make_batch([Sample(ids, ids, [1] * 8)], adapter, weights={}, fields=("temperature",), dtype=torch.float32)
    builder = SimpleNamespace(mesh=SimpleNamespace(device=torch.device(device), layout=SimpleNamespace(index="zigzag")))
    found, empty = set(), torch.empty

    def spy(*shape: object, pin_memory: bool = False, **settings: object) -> torch.Tensor:
        found.add(pin_memory)
        return empty(*shape, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", spy)
        stream = StepBuilder._pack(builder, batch, Row((0,), 0, size))
    assert set(stream.fields) == set(batch.declared)
    return found


def test_only_a_row_of_one_rank_is_packed_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [asked(monkeypatch, "cuda", size) for size in (1, 2, 4)] == [{True}, {False}, {False}]
    assert [asked(monkeypatch, "cpu", size) for size in (1, 2)] == [{False}, {False}]
    monkeypatch.setattr(steps_module, "pack", lambda *row, **settings: pack(*row, **settings | {"pinned": True}))
    assert asked(monkeypatch, "cuda", 4) == {True}, "the control"
