"""What a GPU does during one call, from torch's profiler: time by kind of kernel, the longest kernels, and when nothing ran.

`idle_ms` is the call's span on the device (first kernel to last) without any kernel or copy on any stream. A gap is named by the kernels
around it; equal names add up, so a wait that comes once a layer shows as one line.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["device_time", "gaps"]

KINDS = {  # of kernels, by a part of the name, first match
    "attention": ("flash", "fmha"),
    "matmul": ("nvjet", "gemm", "cutlass", "cublas"),
    "compiled elementwise": ("triton_",),
    "head rows": ("_stats_kernel", "_gradient_kernel"),
    "collectives": ("nccl", "barrier"),
    "eager elementwise": ("elementwise", "reduce"),
    "copies": ("copy", "memcpy", "cat", "fill", "memset"),
}
LISTED = 24
Span = tuple[float, float, str]  # start and end in us, name


def device_time(call: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """{"kinds": ms by kind, "kernels": ms of the longest, "gaps": ms of waits by name, "span": busy and idle ms}."""
    spans = recorded(call)
    kinds: dict[str, float] = dict.fromkeys([*KINDS, "other"], 0.0)
    kernels: dict[str, float] = {}
    for start, end, name in spans:
        kinds[kind_of(name)] += end - start
        kernels[name[:90]] = kernels.get(name[:90], 0.0) + end - start
    waits = gaps(spans)
    parts = {"kinds": kinds, "kernels": longest(kernels), "gaps": longest(summed(waits))}
    parts["span"] = (
        {"whole": max(end for _, end, _ in spans) - spans[0][0], "idle": sum(end - start for start, end, _ in waits)}
        if spans
        else {}
    )
    return {part: {name: round(us / 1e3, 2) for name, us in times.items()} for part, times in parts.items()}


def recorded(call: Callable[[], Any]) -> list[Span]:
    """What ran on the device, by start."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def gaps(spans: Iterable[Span]) -> list[Span]:
    """Times without any span, named by the spans around them."""
    found: list[Span] = []
    reached, last = None, ""
    for start, end, name in sorted(spans):
        if reached is not None and start > reached:
            found.append((reached, start, f"{last[:40]} -> {name[:40]}"))
        if reached is None or end > reached:
            reached, last = end, name
    return found


def summed(waits: Iterable[Span]) -> dict[str, float]:
    """Equal names added up."""
    found: dict[str, float] = {}
    for start, end, label in waits:
        found[label] = found.get(label, 0.0) + end - start
    return found


def longest(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1])[:LISTED])
