"""metrics.jsonl, one line a step: the record of a run. TensorBoard and W&B receive copies.

A line is {"stage": "grpo", "step": 12, "time/wall_s": 93.1, "<name>": number, ...}. Numbers that are not finite are
written as the strings "nan", "inf", "-inf", so that every line is plain JSON. On resume `keep_until` drops the lines
past the checkpoint, so that the record of a stopped and resumed run reads like that of one that never stopped.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.observe.copies import Copy, open_copies

__all__ = ["MetricsWriter", "append_jsonl", "keep_until", "read_jsonl"]


class MetricsWriter:
    """Appends to `folder/metrics.jsonl` and to the copies named (see copies.py)."""

    def __init__(
        self, folder: Path, *, copies: Sequence[str] | None = (), config: Mapping[str, Any] | None = None
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self.start = time.time()
        self.copies: list[Copy] = open_copies(copies, folder, config or {})

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        line = {"stage": stage, "step": step, "time/wall_s": round(time.time() - self.start, 3)}
        assert not line.keys() & values.keys(), line.keys() & values.keys()
        line |= {name: _plain(value) for name, value in values.items()}
        append_jsonl(self.path, [line])
        for copy in self.copies:
            copy.write(stage, step, values)

    def close(self) -> None:
        for copy in self.copies:
            copy.close()


def append_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows, one JSON object a line, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every complete line; a last line cut by a crash is left out. A missing file has no lines."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def keep_until(path: Path, stages: Sequence[str], stage: str, step: int) -> None:
    """Keep the rows of the stages before `stage` and those of `stage` up to `step`; replaces the file in one rename."""
    order = {name: position for position, name in enumerate(stages)}
    kept = [row for row in read_jsonl(path) if (order[row["stage"]], row["step"]) <= (order[stage], step)]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)


def _plain(value: float) -> float | str:
    number = float(value)
    return (
        round(number, 9)
        if math.isfinite(number) and abs(number) > 1e-3
        else number
        if math.isfinite(number)
        else str(number)
    )
