"""The frozen reference policy: a second engine of the same layout, holding the weights from before the first round.

Its weights are exported once to a Hugging Face folder inside the run, so that a resumed run measures KL from the same
point. It is never stepped.
"""

from dataclasses import replace
from pathlib import Path

from longspan.engine import Engine

__all__ = ["frozen_reference"]


def frozen_reference(engine: Engine, folder: Path, *, fresh: bool) -> Engine:
    """Build the reference engine; `fresh` exports the current weights first. Collective."""
    if fresh:
        engine.export(folder)
    return Engine.build(replace(engine.config, model=str(folder), lora=None, freeze=(), value_head=False))
