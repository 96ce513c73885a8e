"""`longspan export RUN OUT`: a run's newest checkpoint as a Hugging Face folder that plain `transformers` loads.

One process on the CPU, whatever layout trained it: a checkpoint loads under any dp x cp. With LoRA the adapters are written in
peft's format, or merged into the weights with --merge NAME.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from longspan.engine import Engine, EngineConfig
from longspan.errors import CheckpointError, UserError
from longspan.launch import launch
from longspan.layout import Layout
from longspan.observe import check_makeable, check_writable

__all__ = ["main"]

FROM_CONFIG = ("model", "seed", "value_head")


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's weights for others to load; exit status 0, or 2 where there is nothing to export."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder of `longspan train`, or one checkpoint of it."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write; one that an export made is replaced, any other is refused."""
    merge: str | None = None
    """LoRA adapter to add into the weights."""
    json: str | None = None
    """Write {"checkpoint", "out", "step"} to this file."""


def main(arguments: Sequence[str]) -> int:
    """Entry of the command."""
    options = tyro.cli(ExportOptions, args=list(arguments), prog="longspan export")
    if options.json is not None:
        check_writable("--json", Path(options.json))
    check_makeable("OUT", Path(options.out))
    folder, checkpoint = find_checkpoint(Path(options.run))
    step = launch(export, str(folder), str(checkpoint), options.out, options.merge, ranks=1, device="cpu")[0]
    print(f"exported {checkpoint} (step {step}) to {options.out}")
    if options.json is not None:
        found = {"checkpoint": str(checkpoint), "out": options.out, "step": step}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def find_checkpoint(given: Path) -> tuple[Path, Path]:
    """(run folder, newest complete checkpoint of it)."""
    if given.parent.name == "checkpoints":
        return given.parent.parent, given
    if not (given / "config.json").is_file():
        raise CheckpointError(
            f"{given} is no run folder: config.json is missing. Pass the folder that `longspan train` printed"
        )
    complete = [
        file.with_suffix("") for file in (given / "checkpoints").glob("*.json") if file.with_suffix("").is_dir()
    ]
    if not complete:
        raise CheckpointError(f"{given} has no complete checkpoint yet. Train until its first save")
    return given, max(complete, key=lambda path: path.stat().st_mtime)


def export(folder: str, checkpoint: str, out: str, merge: str | None) -> int:
    """One rank's work: build the run's model, load, write."""
    settings = json.loads((Path(folder) / "config.json").read_text())["config"]["engine"]
    if settings["lora"]:
        raise UserError("a run with LoRA exports itself: call engine.export in the recipe, where its LoraConfigs are")
    chosen = {name: settings[name] for name in FROM_CONFIG}
    chosen["model"] = chosen["model"].replace("{run}", folder)
    dtype = "float64" if settings["dtype"] == "float64" else "float32"
    engine = Engine.build(EngineConfig(layout=Layout(), dtype=dtype, **chosen))
    engine.load(checkpoint)
    engine.export(out, merge)
    return engine.step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
