"""Checkpoints: SGD's momentum goes on from a checkpoint, on the device and in host memory; a step without it is another one."""

import pytest
import torch

from longspan import SGD, Engine, EngineConfig, Layout, Objective, Sample
from longspan.errors import CheckpointError
from longspan.launch import launch


def samples() -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for length in (9, 1, 17):
        ids = torch.randint(0, 90, (length + 1,), generator=draw)
        fields = {"advantage": torch.randn(length, generator=draw)}
        found.append(Sample(ids[:-1], ids[1:], torch.ones(length), fields=fields))
    return found


def body(offload: tuple[str, ...], folder: str) -> list[dict[str, torch.Tensor]]:
    """Weights after a second step: in one run, from its checkpoint under another layout, and from its weights alone."""

    def build(layout: Layout) -> Engine:
        return Engine.build(EngineConfig("tiny:qwen3", layout=layout, dtype="float64", offload=offload))

    def stepped(engine: Engine) -> dict[str, torch.Tensor]:
        engine.forward_backward(samples(), Objective("reinforce"))
        engine.optim_step(SGD(lr=0.5, momentum=0.9))
        return engine.state_dict()

    first, other, forgetful = build(Layout(dp=2)), build(Layout(cp=2, mixer="ring")), build(Layout(dp=2))
    stepped(first)
    first.save(folder)
    other.load(folder)
    forgetful.load(folder, optimizer=False)
    return [stepped(engine) for engine in (first, other, forgetful)]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value).norm() / value.norm().clamp(min=1e-12)) for name, value in expected.items())


@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_momentum_goes_on_from_a_checkpoint(offload: tuple[str, ...], tmp_path) -> None:
    for straight, loaded, forgetful in launch(body, offload, str(tmp_path / "run"), ranks=2, timeout_s=100):
        assert distance(loaded, straight) <= 1e-12
        assert distance(forgetful, straight) > 1e-3, "a step without the momentum is another one"


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
