"""What a GPU does during one call, from torch's profiler: time by kind of kernel, the longest kernels, and when nothing ran.

`idle_ms` is the call's span on the device (first kernel to last) without any kernel or copy on any stream. A gap is named by the kernels
around it; equal names add up, so a wait that comes once a layer shows as one line. `waits`: the longest single ones of a second call, under
"at MS: kernel -> kernel (what the host did)"; that call records the host too, which makes it a little slower.
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
    """{"kinds": ms by kind, "kernels": ms of the longest, "gaps": ms of waits by name, "span": busy and idle ms, "waits": single ones}."""
    spans, _ = recorded(call, ProfilerActivity.CUDA)
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
    parts["waits"] = host_waits(call)
    return {part: {name: round(us / 1e3, 2) for name, us in times.items()} for part, times in parts.items()}


def recorded(call: Callable[[], Any], *activities: ProfilerActivity) -> tuple[list[Span], list[Span]]:
    """What ran on the device and on the host, by start."""
    with profile(activities=list(activities)) as found:
        call()
        torch.cuda.synchronize()
    sides: tuple[list[Span], list[Span]] = ([], [])
    for event in found.events() or ():
        on_host = event.device_type != torch.autograd.DeviceType.CUDA
        sides[on_host].append((event.time_range.start, event.time_range.end, event.name))
    return sorted(sides[0]), sorted(sides[1])


def host_waits(call: Callable[[], Any]) -> dict[str, float]:
    """The longest waits of one more call: microseconds under the kernels around them and the host's longest operations inside."""
    spans, host = recorded(call, ProfilerActivity.CPU, ProfilerActivity.CUDA)
    found = {}
    for start, end, label in sorted(gaps(spans), key=lambda span: span[0] - span[1])[:LISTED]:
        inside: dict[str, float] = {}
        for first, last, name in host:
            overlap = min(last, end) - max(first, start)
            if overlap > 0:
                inside[name[:60]] = inside.get(name[:60], 0.0) + overlap
        did = ", ".join(f"{name} {us / 1e3:.1f}" for name, us in list(longest(inside).items())[:4])
        found[f"at {(start - spans[0][0]) / 1e3:.0f}: {label} ({did})"] = end - start
    return found


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
