"""A run: its folder, its place in its stages, checkpoints with automatic resume, and an orderly end on SIGTERM and Ctrl-C.

    folder/  config.json versions.json metrics.jsonl rows.jsonl rollouts.jsonl report.html certificate.json
             checkpoints/<stage>-<step>/       engine.save's folder: weights, optimizer, random state, step
             checkpoints/<stage>-<step>.json   Position: written after the folder is complete, so it vouches for it

The data cursor (`consumed`) is saved with what was consumed, never with what was handed out. Records past the
checkpoint are dropped on resume. The loops keep no random state of their own: every draw is a function of (seed,
stream, number).
"""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from longspan.engine import Engine
from longspan.errors import CheckpointError, UserError
from longspan.observe import MetricsWriter, Phases, append_jsonl, keep_until
from longspan.rl.config import RunConfig
from longspan.typed import typed

__all__ = ["Position", "Run", "publish_folder"]

RECORDS = ("metrics.jsonl", "rows.jsonl", "rollouts.jsonl")


@dataclass(frozen=True, slots=True)
class Position:
    """Steps done in a stage, and prompts (or rows) consumed by them."""

    stage: str
    step: int
    consumed: int


@typed
class Run:
    """One rank's hold on the run. `begin` resumes; loops call `start`, `record` and `end_step`."""

    def __init__(self, config: RunConfig, engine: Engine, stages: Sequence[str]) -> None:
        self.config = config
        self.folder = Path(config.folder)
        self.engine = engine
        self.stages = tuple(stages)
        self.lead = engine.mesh.rank == 0
        self.phases = Phases(engine.mesh.device)
        self.position = Position(self.stages[0], 0, 0)
        self.stopped = False
        self.asked_to_stop = False
        self.writer: MetricsWriter | None = None

    def begin(self, description: Mapping[str, Any]) -> None:
        """Open the folder, resume from the newest checkpoint there, and listen for SIGTERM and Ctrl-C. Collective."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        held = self.engine.mesh.gather_objects(self._lock() if self.lead else None)
        for holder in held:
            if holder is not None:
                raise UserError(
                    f"run.folder={self.folder} is in use by {holder}. Stop that run, or use another run.folder"
                )
        found = self.engine.mesh.gather_objects(self._newest() if self.lead else None)
        newest: Position | None = next((position for position in found if position is not None), None)
        if newest is not None:
            self.engine.load(self._path(newest))
            self.position = newest
        if self.lead:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            for name in RECORDS:
                keep_until(self.folder / name, self.stages, self.position.stage, self.position.step)
            self.writer = MetricsWriter(self.folder, copies=self.config.copies, config=description)

    def start(self, stage: str) -> Position | None:
        """Where the stage begins or goes on; None if it is done or the run was stopped."""
        if self.stopped or self.stages.index(stage) < self.stages.index(self.position.stage):
            return None
        if stage != self.position.stage:
            self.position = Position(stage, 0, 0)
        return self.position

    def record(self, position: Position, numbers: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """One line of metrics.jsonl, and one of rows.jsonl that says what the step trained on."""
        if self.writer is not None:
            self.writer.write(position.stage, position.step, numbers)
            append_jsonl(
                self.folder / "rows.jsonl", [{"stage": position.stage, "step": position.step, "rows": list(rows)}]
            )

    def show(self, position: Position, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Keep a few rollouts for the report."""
        if self.lead:
            head = {"stage": position.stage, "step": position.step}
            append_jsonl(self.folder / "rollouts.jsonl", [{**head, **row} for row in rollouts])

    def end_step(self, position: Position, *, last: bool) -> bool:
        """Save when it is time to; True if any rank was asked to stop: the state is saved and the loop should return."""
        self.position = position
        self.stopped = any(self.engine.mesh.gather_objects(self.asked_to_stop))
        every = self.config.checkpoint_every
        if self.stopped or last or (every and position.step % every == 0):
            self._save(position)
        if self.stopped and self.lead:
            print(
                f"stopped: saved {position.stage} step {position.step}; the same command goes on from there", flush=True
            )
        return self.stopped

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _lock(self) -> str | None:
        """Takes the folder for this process until it ends; says who has it instead, if somebody has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)  # stays open: the process holds it until it ends
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return os.read(lock, 200).decode() or "another process"
        os.ftruncate(lock, 0)
        os.write(lock, f"{socket.gethostname()} pid {os.getpid()}".encode())
        return None

    def _save(self, position: Position) -> None:
        with self.phases("save"):
            self.engine.save(self._path(position))
            if self.lead:
                marker = self._marker(position)
                temporary = marker.with_name(marker.name + ".tmp")
                temporary.write_text(json.dumps(dataclasses.asdict(position)), encoding="utf-8")
                temporary.replace(marker)
                for old in self._positions()[: -self.config.keep_checkpoints]:
                    self._marker(old).unlink()
                    shutil.rmtree(self._path(old))

    def _positions(self) -> list[Position]:
        """Positions of the complete checkpoints, oldest first."""
        found = []
        for marker in (self.folder / "checkpoints").glob("*.json"):
            try:
                found.append(Position(**json.loads(marker.read_text(encoding="utf-8"))))
            except (json.JSONDecodeError, TypeError) as error:
                raise CheckpointError(
                    f"{marker} is corrupt ({error}). Delete it to resume from the checkpoint before it"
                ) from error
        unknown = [position for position in found if position.stage not in self.stages]
        if unknown:
            raise CheckpointError(
                f"{self.folder} holds a checkpoint of stage {unknown[0].stage!r}, but this recipe has {self.stages}. "
                "Use another run.folder"
            )
        return sorted(found, key=lambda position: (self.stages.index(position.stage), position.step))

    def _newest(self) -> Position | None:
        positions = self._positions()
        return positions[-1] if positions else None

    def _path(self, position: Position) -> Path:
        return self.folder / "checkpoints" / f"{position.stage}-{position.step:06d}"

    def _marker(self, position: Position) -> Path:
        return self.folder / "checkpoints" / f"{position.stage}-{position.step:06d}.json"

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop = True


def publish_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Make the folder with `write(temporary folder)` unless it is there; it gets its name only when complete."""
    if path.exists():
        return
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    temporary.rename(path)
