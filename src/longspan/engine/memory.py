"""What to say when the device runs out of memory at 2 a.m.: the phase, the peak, the largest samples, the setting that would fit."""

import contextlib
from collections.abc import Iterator

import torch

from longspan.engine.backend import MicroStep
from longspan.errors import OutOfMemory

__all__ = ["explain_out_of_memory", "peak_gib", "reset_peak"]


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
