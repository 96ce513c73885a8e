"""Wall time and peak memory of the named phases of one step.

    phases = Phases(device)
    with phases("sample"): ...
    with phases("update"): ...
    phases.take()  ->  {"time/sample_s": .., "time/update_s": .., "mem/sample_gib": .., ...} and starts afresh

A phase entered twice adds up its time and keeps its larger peak. On CUDA the device is synchronised at the edges of a
phase: phases are coarse (sampling, update, evaluation), never inside a micro-step.
"""

import contextlib
import time
from collections.abc import Iterator

import torch

from longspan.observe.memory import peak_gib, reset_peak

__all__ = ["Phases"]


class Phases:
    """Collects seconds and GiB by phase name until `take`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        reset_peak(self.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.peaks[name] = max(self.peaks.get(name, 0.0), peak_gib(self.device))

    def take(self) -> dict[str, float]:
        """The numbers since the last `take`; the total is the sum of the phases."""
        numbers = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        numbers |= {f"mem/{name}_gib": peak for name, peak in self.peaks.items()}
        numbers["time/step_s"] = sum(self.seconds.values())
        self.seconds, self.peaks = {}, {}
        return numbers
