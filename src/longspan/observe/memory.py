"""Peak memory of this process in GiB: the allocator's peak on CUDA, the resident set's high-water mark on CPU.

On CUDA the peak is reset by `reset_peak`, so a phase has its own. The CPU mark only ever rises: there a phase's
number says how high it stood when the phase ended.
"""

import resource
import sys

import torch

__all__ = ["peak_gib", "reset_peak"]

# getrusage counts KiB on Linux and bytes on macOS
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_gib(device: torch.device) -> float:
    """Peak memory in GiB since the last `reset_peak` (CUDA) or since the process began (CPU)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 2**30


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
