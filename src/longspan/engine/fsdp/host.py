"""Checkpoints in host memory: what recomputation starts from leaves the device during forward and comes back for backward.

`park` copies a tensor into pinned memory on a side stream and returns the function that brings it back, bit for bit. Tensors
come back in the reverse order of parking (backward), so the last AHEAD of those still parked are on their way while the layer before
them computes. Pinned memory is taken in blocks of 64 MiB and used again: torch's pinned allocator rounds every request up to a
power of two, which would waste up to half of it. On the CPU the same code copies without streams.
Parked: each layer's input, and attention's output under "selective". What Gated DeltaNet keeps under "selective" stays on the device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longspan.mixers import AttentionCache

__all__ = ["CHECKPOINT", "HostLink", "HostStore"]

BLOCK = 64 * 2**20  # bytes
AHEAD = 3  # tensors on their way back: a layer's input and attention output, and the next layer's input
CHECKPOINT: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


class HostLink:
    """Copies between a device and pinned host memory on a side stream; on the CPU the same copies without streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copies (to, from) behind the work that is queued now; the event says when they are done."""
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, ready: torch.cuda.Event | None) -> None:
        """The current stream goes on when these copies are done."""
        if ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ready)

    def keep(self, source: Tensor) -> None:
        """Its memory is not given away before the side stream has read it."""
        if self.stream is not None:
            source.record_stream(self.stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that copies can run from and to."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.stream is not None)


@dataclass(slots=True, eq=False)
class Parked:
    """One tensor on the host."""

    shape: torch.Size
    dtype: torch.dtype
    size: int  # bytes
    blocks: list[Tensor]  # [BLOCK] uint8 each
    back: Tensor | None = None  # on the device, once its copy was started
    ready: torch.cuda.Event | None = None  # the copy is done


class HostStore:
    """The parked tensors of one micro-step, in the order of parking."""

    def __init__(self, device: torch.device) -> None:
        self.link = HostLink(device)
        self._free: list[Tensor] = []
        self._parked: list[Parked] = []

    def checkpoint(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """torch's checkpoint of `layer`, its input tensors parked. Takes the place of transformers' checkpointing function."""
        # inside, the checkpoint's own hooks keep what layers save out of these
        with saved_tensors_hooks(self.park, _bring):
            return checkpoint(layer, *inputs, **CHECKPOINT)

    def park(self, x: Tensor) -> Callable[[], Tensor]:
        """Start copying x to the host; the function brings it back, once. An empty tensor, or one that is no activation of
        this device (torch 2.11's checkpoint saves an empty CPU tensor beside its inputs), stays where it is."""
        if x.device.type != self.link.device.type or not x.numel():
            return lambda: x
        source = x.detach().contiguous().view(-1).view(torch.uint8)
        parked = Parked(x.shape, x.dtype, source.numel(), [self._block() for _ in range(-(-source.numel() // BLOCK))])
        self.link.copy((block[: len(part)], part) for block, part in _parts(parked, source))
        self.link.keep(source)
        self._parked.append(parked)
        return lambda: self._fetch(parked)

    def begin(self, *caches: AttentionCache | None) -> None:
        """A micro-step starts: forget what was parked (the one before may have failed), take its attention outputs."""
        for cache in caches:
            if cache is not None:
                cache.park = self.park
        if self.link.stream is not None and self._parked:
            torch.cuda.current_stream(self.link.device).wait_stream(
                self.link.stream
            )  # of those still on their way back
        for parked in self._parked:
            self._free += [] if parked.back is not None else parked.blocks
        self._parked = []

    def _fetch(self, parked: Parked) -> Tensor:
        self._parked.remove(parked)
        self._start(parked)
        for following in self._parked[: -AHEAD - 1 : -1]:
            self._start(following)
        assert parked.back is not None
        self.link.wait(parked.ready)
        return parked.back.view(parked.dtype).view(parked.shape)

    def _start(self, parked: Parked) -> None:
        """Start the copy to the device, unless it is on its way. Blocks are free again behind it in the stream."""
        if parked.back is not None:
            return
        parked.back = torch.empty(parked.size, dtype=torch.uint8, device=self.link.device)
        parked.ready = self.link.copy((part, block[: len(part)]) for block, part in _parts(parked, parked.back))
        self._free += parked.blocks

    def _block(self) -> Tensor:
        if self._free:
            return self._free.pop()
        return self.link.empty((BLOCK,), torch.uint8)


def _bring(fetch: Callable[[], Tensor]) -> Tensor:
    return fetch()


def _parts(parked: Parked, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(block, its part of the flat bytes)."""
    return list(zip(parked.blocks, flat.split(BLOCK), strict=True)) if parked.size else []
