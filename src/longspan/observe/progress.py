"""The progress bar of rank 0: reward, log-prob gap between sampler and trainer, tokens/s, time and memory by phase.

On a terminal one live bar with a line of numbers under it; elsewhere (a log file, CI) one plain line a step, so that
nothing is lost to carriage returns.
"""

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

__all__ = ["Progress", "headline"]

GAP = ("mean", "p99", "p99.9", "max", "share>0.5")


class Progress:
    """`with Progress("grpo", 100) as progress: progress.show(step, numbers)`; enabled=False is silent (other ranks)."""

    def __init__(self, stage: str, total: int, *, enabled: bool = True, console: Console | None = None) -> None:
        self.stage, self.total, self.enabled = stage, total, enabled
        self.console = console or Console()
        self.live = enabled and self.console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn())
        self.bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self.task = self.bar.add_task(stage, total=total)
        self.view = Live(self.bar, console=self.console, refresh_per_second=4)

    def __enter__(self) -> "Progress":
        if self.live:
            self.view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.view.stop()

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show step `step` (counted from 1) and its numbers."""
        text = headline(numbers)
        self.bar.update(self.task, completed=step)
        if self.live:
            self.view.update(Group(self.bar, Text(text)))
        elif self.enabled:
            self.say(f"{self.stage} {step}/{self.total}  {text}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def headline(numbers: Mapping[str, float]) -> str:
    """The numbers of a step in one line; what is absent is left out."""
    parts = []
    for name, label, form in (
        ("reward/mean", "reward", ".3f"),
        ("loss/total", "loss", ".4f"),
        ("eval/pass@1", "pass@1", ".3f"),
        ("tok/per_s", "tok/s", ",.0f"),
    ):
        if name in numbers:
            parts.append(f"{label} {numbers[name]:{form}}")
    gap = [f"{numbers[f'gap/{name}']:.1e}" for name in GAP if f"gap/{name}" in numbers]
    if gap:
        parts.append(f"gap({','.join(GAP)}) {' '.join(gap)}")
    phases = [name[5:-2] for name in numbers if name.startswith("time/") and f"mem/{name[5:-2]}_gib" in numbers]
    parts += [f"{name} {numbers[f'time/{name}_s']:.2f}s {numbers[f'mem/{name}_gib']:.2f}GiB" for name in phases]
    return " | ".join(parts)
