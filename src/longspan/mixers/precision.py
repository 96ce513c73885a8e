"""In which dtype sums are kept: f64 for f64, f32 for everything else."""

import torch

__all__ = ["accumulator"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial sums (LSE, merged outputs, gradients over blocks and ranks) of inputs in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
