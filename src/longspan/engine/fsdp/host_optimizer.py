"""Optimizer state in host memory: moments are on the device only while their bucket of parameters is stepped.

The arithmetic is the same torch optimizer's over the same shards, one bucket after the other (elementwise, so buckets change no bit).
The next bucket's moments travel on a side stream while this one's are used. Between steps `state` holds step counts only;
`brought()` puts all moments on the device for a checkpoint to read or fill.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.engine.fsdp.host import HostLink
from longspan.engine.optim import SGD, AdamW, local, make_optimizer

__all__ = ["HostOptimizer"]

BUCKET = 256 * 2**20  # bytes of parameters in a bucket: two buckets' moments are on the device at a time


class HostOptimizer:
    """A torch optimizer whose moments live on the host. The members that FSDPBackend uses have torch's names."""

    def __init__(self, settings: AdamW | SGD, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.parts = [make_optimizer(settings, bucket) for bucket in _buckets(parameters)]
        self.kind = type(self.parts[0]).__name__
        self.link = HostLink(device)
        self._host: dict[Tensor, dict[str, Tensor]] = {}  # parameter -> slot -> pinned local shard

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {parameter: slots for part in self.parts for parameter, slots in part.state.items()}

    def step(self) -> None:
        ready = self._bring(self.parts[0])
        for part, following in zip(self.parts, [*self.parts[1:], None], strict=True):
            self.link.wait(ready)
            ready = None if following is None else self._bring(following)
            part.step()
            self._send(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def start(self, parameter: Tensor, slots: dict[str, Tensor]) -> None:
        """Give a parameter that was never stepped its state, on the device until the next `_send`."""
        part = next(part for part in self.parts if any(p is parameter for p in part.param_groups[0]["params"]))
        part.state[parameter] = slots

    @contextmanager
    def brought(self) -> Iterator[None]:
        """All moments on the device inside; afterwards what they hold then is on the host."""
        for part in self.parts:
            self.link.wait(self._bring(part))
        yield
        for part in self.parts:
            self._send(part)
        if self.link.stream is not None:
            self.link.stream.synchronize()

    def _bring(self, part: torch.optim.Optimizer) -> torch.cuda.Event | None:
        pairs = []
        for parameter, slots in part.state.items():
            for slot, host in self._host.get(parameter, {}).items():
                here = torch.empty(host.shape, dtype=host.dtype, device=self.link.device)
                pairs.append((here, host))
                slots[slot] = _like(parameter, here)
        return self.link.copy(pairs)

    def _send(self, part: torch.optim.Optimizer) -> None:
        pairs = []
        for parameter, slots in part.state.items():
            host = self._host.setdefault(parameter, {})
            for slot in [slot for slot, value in slots.items() if isinstance(value, Tensor) and value.dim()]:
                here = local(slots.pop(slot))
                if slot not in host:
                    host[slot] = self.link.empty(here.shape, here.dtype)
                pairs.append((host[slot], here))
        self.link.copy(pairs)
        for _, here in pairs:
            self.link.keep(here)


def _buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbouring parameters, together at most BUCKET bytes here; at least one bucket."""
    found: list[list[Tensor]] = [[]]
    room = BUCKET
    for parameter in parameters:
        size = local(parameter).nbytes
        if size > room and found[-1]:
            found.append([])
            room = BUCKET
        found[-1].append(parameter)
        room -= size
    return found


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A tensor sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
