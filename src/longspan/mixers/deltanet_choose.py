"""Which delta kernel runs: fla on CUDA in bf16 and f16 where fla-core is installed, else plain torch (any device, f64
and f32 too).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from longspan.mixers.deltanet_pieces import Pieces
from longspan.mixers.deltanet_state import DeltaKernel
from longspan.mixers.deltanet_torch import TorchDeltaKernel

__all__ = ["DeltaChoice", "choose_delta_kernel"]

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class DeltaChoice:
    """A kernel by name and how to make it."""

    name: str
    make: Callable[[Pieces, torch.device], DeltaKernel]


def choose_delta_kernel(device: torch.device, dtype: torch.dtype) -> DeltaChoice:
    """By device, dtype and what is installed."""
    if device.type == "cuda" and dtype in HALF and find_spec("fla") is not None:
        return DeltaChoice("fla", _make_fla)
    return DeltaChoice("torch", TorchDeltaKernel)


def _make_fla(pieces: Pieces, device: torch.device) -> DeltaKernel:
    return _fla_kernel()(pieces, device)


@cache
def _fla_kernel() -> Callable[[Pieces, torch.device], DeltaKernel]:
    """Importing it compiles nothing yet. fla warns where the older flash-attn is missing, and where warnings are errors
    (pytest) its first import would fail and its second succeed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)
        from longspan.mixers.deltanet_fla import FlaDeltaKernel  # optional package
    return FlaDeltaKernel
