"""What to say when the device runs out of memory at 2 a.m.: the phase, the peak, the largest samples, the setting that would fit."""

import contextlib
from collections.abc import Iterator

import torch

from longspan.engine.backend import MicroStep
from longspan.errors import OutOfMemory

__all__ = ["device_gib", "explain_out_of_memory", "peak_gib", "reset_peak", "used_gib"]


@contextlib.contextmanager
def explain_out_of_memory(step: MicroStep, *, trains: bool) -> Iterator[None]:
    """Turn an allocator's failure inside the block into an OutOfMemory that says what to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
            raise
        lengths = sorted(step.shard.lengths, reverse=True)
        tokens = step.shard.fields["input_ids"].shape[-1]
        size = step.context.info.size
        raise OutOfMemory(
            f"out of memory in {'forward_backward' if trains else 'forward'}: peak {peak_gib():.2f} GiB with {tokens} tokens on this "
            f"rank (cp={size}, sample lengths {lengths[:4]}). Set max_tokens_per_rank below {tokens}"
            f" (try {max(1, tokens // 2)}), cp={2 * size} for the longest sample, or recompute='full'. Allocator: {text[:200]}"
        ) from error


def device_gib(device: torch.device) -> float | None:
    """Memory of a GPU; None for a CPU, which has no limit that is known."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def used_gib(device: torch.device) -> float:
    """Of a GPU now, by every process, in and outside the allocator; blocks that this process's allocator keeps free count as
    free. 0 for a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (total - free - kept) / 2**30


def peak_gib() -> float:
    """Peak memory of this process's device in GiB since the last reset; of the process itself on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource  # POSIX only, and only where there is no GPU to ask

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reset_peak() -> None:
    """Start a new peak measurement where the device keeps one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
