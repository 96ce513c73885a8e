"""RMS norms with weights about zero or a gate, computed in fp32, and in fp64 for an fp64 model.

transformers computes them in fp32 whatever the model's dtype; the weight's gradient is then a sum over tokens in
fp32, which depends on packing and ranks by 1e-7 relative, above the 1e-8 that an fp64 run is held to. So these take
the place of the instances while an adapter is built: same parameter names and, in fp32 and bf16, the same operations
in the same order.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from longspan.mixers.precision import accumulator

__all__ = ["GatedRMSNorm", "ZeroCentredRMSNorm", "replace_zero_centred_norms"]

ZERO_CENTRED = ("Gemma3RMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm")


class ZeroCentredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dim; the product in fp32, then cast."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulator(x.dtype))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * silu(gate) over the last dim; the weight's product in the model's dtype, as in HF."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = source.weight, source.variance_epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.to(accumulator(x.dtype))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(x.dtype) * functional.silu(gate.to(wide.dtype))).to(x.dtype)


def replace_zero_centred_norms(model: nn.Module) -> None:
    """Replace every zero-centred norm instance of `model`."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ZERO_CENTRED:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ZeroCentredRMSNorm(module))
