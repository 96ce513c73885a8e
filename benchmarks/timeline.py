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
LISTED = 12
Span = tuple[float, float, str]  # start and end in us, name


def device_time(call: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """{"kinds": ms by kind, "kernels": ms of the longest, "gaps": ms of the longest waits, "span": busy and idle ms}."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kinds: dict[str, float] = dict.fromkeys([*KINDS, "other"], 0.0)
    kernels: dict[str, float] = {}
    for start, end, name in spans:
        kinds[kind_of(name)] += end - start
        kernels[name[:90]] = kernels.get(name[:90], 0.0) + end - start
    waits, idle, whole = gaps(spans)
    parts = {"kinds": kinds, "kernels": longest(kernels), "gaps": longest(waits)}
    parts["span"] = {"whole": whole, "idle": idle}
    return {part: {name: round(us / 1e3, 2) for name, us in times.items()} for part, times in parts.items()}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def gaps(spans: Iterable[Span]) -> tuple[dict[str, float], float, float]:
    """Time without any span by the names around it, its sum, and the time from the first start to the last end."""
    ordered = sorted(spans)
    found: dict[str, float] = {}
    if not ordered:
        return found, 0.0, 0.0
    reached, last = ordered[0][1], ordered[0][2]
    for start, end, name in ordered[1:]:
        if start > reached:
            label = f"{last[:40]} -> {name[:40]}"
            found[label] = found.get(label, 0.0) + start - reached
        if end > reached:
            reached, last = end, name
    return found, sum(found.values()), reached - ordered[0][0]


def longest(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1])[:LISTED])
