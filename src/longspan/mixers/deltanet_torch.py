"""The gated delta rule's `DeltaKernel` in plain torch: any device, fp64, fp32, bf16 (computed in fp32).

The reference of the fla kernel, and what CPU runs. The forward keeps nothing for the backward, which computes the
chunks again with autograd on; the gradient of the initial states is taken first (it needs the outputs only) and all
others after the exchange.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.mixers.conv import causal_convolution
from longspan.mixers.deltanet_chunked import affine_maps, chunk_plan, intra_chunk, scan, state_dtype
from longspan.mixers.deltanet_pieces import Pieces

__all__ = ["TorchDeltaKernel"]

EPSILON = 1e-6  # transformers' and fla's


class TorchDeltaKernel:
    """One rank's pieces."""

    tail = 0

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self.num = pieces.num
        self.position = pieces.positions.to(device)
        self.plan = chunk_plan(pieces.bounds, device=device)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.silu(causal_convolution(x, weight, self.position)).to(x.dtype)

    def unit(self, x: Tensor) -> Tensor:
        x = x.to(state_dtype(x.dtype))
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)

    def forward(self, inputs: Sequence[Tensor]) -> "_Forward":
        return _Forward(self, inputs)

    def backward(
        self, gradient: Tensor, inputs: Sequence[Tensor], initial: Tensor | None, kept: Sequence[Tensor]
    ) -> "_Backward":
        return _Backward(self, gradient, inputs, initial)

    def zeros(self, k: Tensor, v: Tensor) -> Tensor:
        """[n, H, D_k, D_v] initial states."""
        return v.new_zeros(self.num, v.shape[1], k.shape[2], v.shape[2], dtype=state_dtype(v.dtype))


class _Forward:
    def __init__(self, kernel: TorchDeltaKernel, inputs: Sequence[Tensor]) -> None:
        self.kernel = kernel
        self.inputs = inputs
        self.intra = intra_chunk(*inputs, kernel.plan)

    def maps(self, pieces: Sequence[int], *, transition: bool) -> tuple[Tensor | None, Tensor]:
        a, b = affine_maps(self.intra, self.kernel.plan, pieces)
        return (a if transition else None), b

    def outputs(self, initial: Tensor | None) -> Tensor:
        _, k, v, *_ = self.inputs
        start = self.kernel.zeros(k, v) if initial is None else initial
        return scan(self.intra, self.kernel.plan, start)[0].to(v.dtype)

    def kept(self) -> tuple[Tensor, ...]:
        return ()


class _Backward:
    def __init__(
        self, kernel: TorchDeltaKernel, gradient: Tensor, inputs: Sequence[Tensor], initial: Tensor | None
    ) -> None:
        start = kernel.zeros(*inputs[1:3]) if initial is None else initial
        with torch.enable_grad():
            self.leaves = [x.detach().requires_grad_() for x in inputs]
            self.initial = start.detach().requires_grad_()
            out, self.final = scan(intra_chunk(*self.leaves, kernel.plan), kernel.plan, self.initial)
            self.out = out.to(gradient.dtype)
        self.gradient = gradient

    def state_gradients(self, pieces: Sequence[int]) -> Tensor:
        (gradient,) = torch.autograd.grad(self.out, self.initial, self.gradient, retain_graph=True)
        return gradient[list(pieces)]

    def gradients(self, final: Tensor | None) -> tuple[Tensor, ...]:
        if final is None:
            return torch.autograd.grad(self.out, self.leaves, self.gradient)
        return torch.autograd.grad([self.out, self.final], self.leaves, [self.gradient, final])
