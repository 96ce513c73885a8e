"""Copies of the metrics for TensorBoard and W&B, the only file that imports them.

`copies=None` copies to whichever of the two is installed; naming one that is not installed is an error, never a
warning. W&B runs offline (`wandb sync` uploads later): a run on a machine without a login must not stop at a prompt.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from longspan.errors import UserError

__all__ = ["Copy", "open_copies"]


class Copy(Protocol):
    """Somewhere that metrics are copied to."""

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars under `folder/tensorboard`, one event stream; names are prefixed by the stage."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", f"```\n{dict(config)}\n```")

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """An offline W&B run under `folder/wandb`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project="longspan", name=folder.name, dir=str(folder), mode="offline", config=dict(config)
        )

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self.run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        self.run.finish()


COPIES: dict[str, Callable[[Path, Mapping[str, Any]], Copy]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_copies(names: Sequence[str] | None, folder: Path, config: Mapping[str, Any]) -> list[Copy]:
    """Open the copies named, or with None all that are installed."""
    installed = [name for name in COPIES if importlib.util.find_spec(name) is not None]
    for name in names or ():
        if name not in COPIES:
            raise UserError(f"copies={tuple(names or ())!r}: {name!r} is unknown. Use any of {tuple(COPIES)}")
        if name not in installed:
            raise UserError(
                f"copies={tuple(names or ())!r}: {name} is not installed. `pip install {name}`, or leave it out"
            )
    return [COPIES[name](folder, config) for name in (installed if names is None else names)]
