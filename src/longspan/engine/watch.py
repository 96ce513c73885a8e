"""What a step was predicted to take, what it took, and the likeliest reason where they part.

A model's seconds are right up to a factor that belongs to the machine and the run; after a few calls it is the median of
measured / modelled. A call that is off by more than TOLERANCE gets one sentence; each kind of reason is said once in AGAIN
calls. Without machine constants (a CPU without `machine=`) the unit of the model is no second: nothing is predicted before
the first call and nothing is said.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch._dynamo.utils import counters

__all__ = ["Call", "Signals", "Watch", "signals"]

TOLERANCE = 0.2
SETTLED = 3  # calls after the first, before the run's own factor replaces the constants
MEMORY = 16  # calls whose factors are remembered
WAITING = (
    0.1  # share of the prediction from which waiting for stages, or for tensor-parallel ranks, is the likeliest reason
)
AGAIN = 100  # calls until the same reason is said again
ISSUE_S = 3e-3  # host time to issue one eager layer's forward and backward: with less device work the host is the limit


@dataclass(frozen=True, slots=True)
class Signals:
    """Counters that explain a slow call by how they grew in it."""

    retries: int  # of the allocator: memory was full, blocks were freed and asked for anew
    graphs: int  # that torch.compile made


def signals() -> Signals:
    """The counters now."""
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0
    return Signals(int(retries), int(counters["stats"]["unique_graphs"]))


@dataclass(frozen=True, slots=True)
class Call:
    """One forward_backward: what the cost model says of it, unscaled, and what was measured."""

    modelled_s: float
    measured_s: float
    parts: Mapping[str, float]  # modelled work by cause, summed over ranks
    layer_s: float  # modelled time of one layer of one micro-step
    traffic_s: float  # FSDP's traffic of a rank at most, as if nothing hid it; 0 on one rank
    before: Signals
    after: Signals
    bubble_share: float = 0.0  # of the modelled time, in which the busiest pipeline rank waits for other stages
    memory: tuple[float, float] | None = None  # GiB at this rank's peak, modelled and measured; None on a CPU


class Watch:
    """Predicts the calls of one engine. machine: the name of its constants, None without. stage: this rank's of a pipeline."""

    def __init__(self, machine: str | None, device: str, stage: int | None = None) -> None:
        self.machine, self.device, self.stage = machine, device, stage
        self._factors: deque[float] = deque(maxlen=MEMORY)
        self._calls = 0
        self._said: dict[str, int] = {}

    def predicted_s(self, modelled_s: float) -> float:
        """Seconds; 0 where there is nothing to go by."""
        if len(self._factors) >= SETTLED or (self.machine is None and self._factors):
            return modelled_s * median(self._factors)
        return 0.0 if self.machine is None else modelled_s

    def see(self, call: Call) -> str | None:
        """Remember a call. Returns what to tell the user, or None."""
        predicted, first = self.predicted_s(call.modelled_s), self._calls == 0
        self._calls += 1
        compiled = call.after.graphs > call.before.graphs
        if (not first and not compiled) or self.machine is None:
            self._factors.append(call.measured_s / call.modelled_s)
        if self.machine is None or abs(call.measured_s / predicted - 1.0) <= TOLERANCE:
            return None
        kind, reason = self._reason(call, predicted, first=first, compiled=compiled)
        if self._calls - self._said.get(kind, -AGAIN) < AGAIN:
            return None
        self._said[kind] = self._calls
        return (
            f"forward_backward took {call.measured_s:.3g} s where the plan says {predicted:.3g} s "
            f"({call.measured_s / predicted:.2f} times). Likeliest: {reason}"
        )

    def _reason(self, call: Call, predicted: float, *, first: bool, compiled: bool) -> tuple[str, str]:
        slow = call.measured_s > predicted
        if first and slow:
            return "first", "the first call, which compiles kernels and fills caches; later calls do not pay for it"
        if compiled and slow:
            graphs = call.after.graphs - call.before.graphs
            return "compile", f"torch.compile made {graphs} graphs for lengths that it had not seen"
        if call.after.retries > call.before.retries:
            return "memory", self._of_memory(call)
        if (
            len(self._factors) > SETTLED
            and abs(call.measured_s / call.modelled_s / median(self._factors) - 1) > TOLERANCE
        ):
            return "once", "something outside the plan in this call alone (another process, reading media, a slow disk)"
        if slow and self.device == "cuda" and call.layer_s < ISSUE_S:
            return "host", (
                f"the host, which needs longer to issue a layer than the GPU to run it ({call.layer_s * 1e3:.2g} ms). Raise "
                "max_tokens_per_rank or set compile=True"
            )
        if slow and call.bubble_share > WAITING:
            return "pipeline", (
                f"waiting for other pipeline stages: the plan counts {call.bubble_share:.0%} of the call as the pipeline's bubble, and "
                "a stage that starts late or is slower than its share makes all others wait. More, smaller micro-steps fill "
                "a pipeline better: lower max_tokens_per_rank"
            )
        if slow and call.traffic_s:
            return "traffic", (
                f"waiting for other ranks: of FSDP's traffic (at most {call.traffic_s:.2g} s a call) the plan counts little as visible, "
                "and ranks that start late are not in it. A profile of one call shows where the device is idle"
            )
        tensor = call.parts.get("tensor", 0.0) / max(sum(call.parts.values()), 1e-30)
        if slow and tensor > WAITING:
            return "tensor", (
                f"waiting for other tensor-parallel ranks: they meet four times a layer, which is {tensor:.0%} of the prediction, and "
                "ranks that start late are not in it. tp within one node's fast links, or a smaller tp, waits less"
            )
        part = max(call.parts, key=lambda name: call.parts[name])
        share = call.parts[part] / max(sum(call.parts.values()), 1e-30)
        return "constants", (
            f"the constants of {self.machine!r}, first of all those of {part} ({share:.0%} of the prediction). From the "
            f"call after the next {SETTLED} on the run's own times count; `longspan bench --calibrate FILE.json` measures this machine, and "
            "EngineConfig(machine=FILE) uses it"
        )

    def _of_memory(self, call: Call) -> str:
        where = "" if self.stage is None else f" of pipeline stage {self.stage}"
        said = (
            ""
            if call.memory is None
            else " (the memory model says {:.1f} GiB, the peak is {:.1f})".format(*call.memory)
        )
        return f"the GPU's memory{where} is full{said} and the allocator had to give blocks back; lower max_tokens_per_rank"
