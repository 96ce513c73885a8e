"""Checkpoints: SGD's momentum goes on from a checkpoint, on the device and in host memory; a step without it is another one."""

import pytest
import torch
from ragged import RULE, ragged, train, worst

from longspan import SGD, Engine, EngineConfig, Layout
from longspan.errors import CheckpointError
from longspan.launch import launch, world
from longspan.parity import Reference
from longspan.parity.cases import Case

CASE = Case("reinforce", "reinforce", **RULE)
LR, MOMENTUM = 0.5, 0.9


def body(offload: tuple[str, ...], folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights after a second step: in one run, from its checkpoint under another layout, and from its weights alone."""
    ranks = world().ranks

    def build(layout: Layout) -> Engine:
        return Engine.build(EngineConfig("tiny:qwen3", layout=layout, dtype="float64", offload=offload))

    def stepped(engine: Engine) -> dict[str, torch.Tensor]:
        train(engine, ragged(), CASE)
        engine.optim_step(SGD(lr=LR, momentum=MOMENTUM))
        return engine.state_dict()

    first, other, forgetful = build(Layout(dp=ranks)), build(Layout(cp=ranks, mixer="ring")), build(Layout(dp=ranks))
    stepped(first)
    first.save(folder)
    other.load(folder)
    forgetful.load(folder, optimizer=False)
    return [stepped(engine) for engine in (first, other, forgetful)]


def oracle() -> dict[str, torch.Tensor]:
    """Two steps of momentum written out."""
    reference, velocity = Reference("tiny:qwen3", dtype=torch.float64), {}
    for _ in range(2):
        reference.clear()
        for name, gradient in reference.run(ragged(), CASE).gradients.items():
            velocity[name] = MOMENTUM * velocity.get(name, 0.0) + gradient
        reference.set_weights({name: value - LR * velocity[name] for name, value in reference.weights().items()})
    return reference.weights()


@pytest.mark.parametrize(("offload", "ranks"), [((), 3), (("optimizer",), 2)])
def test_momentum_goes_on_from_a_checkpoint(offload: tuple[str, ...], ranks: int, tmp_path) -> None:
    wanted = oracle()
    for straight, loaded, forgetful in launch(body, offload, str(tmp_path / "run"), ranks=ranks, timeout_s=100):
        assert worst(straight, wanted) <= 1e-12 and worst(loaded, wanted) <= 1e-12
        assert worst(forgetful, wanted) > 1e-3, "a step without the momentum is another one"


def _save_over(path: str) -> list[str]:
    engine = Engine.build(EngineConfig("tiny:qwen3", dtype="float64", layout=Layout(dp=2)))
    said = []
    for write in (engine.save, engine.export):
        with pytest.raises(CheckpointError) as caught:
            write(path)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_other_peoples_files_are_not_replaced(kind: str, tmp_path) -> None:
    target = tmp_path / "thesis"
    kept = target if kind == "file" else target / "chapter.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("years of work")
    for said in launch(_save_over, str(target), ranks=2, timeout_s=100):
        assert all("was not written by save or export" in message for message in said), said
    assert kept.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]
