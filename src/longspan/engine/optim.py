"""Optimizers: their settings, and the global gradient norm over sharded parameters.

The arithmetic is torch.optim's; what is ours is that the norm counts each parameter once however it is sharded, and that one
call applies exactly one step. Settings travel with each `optim_step`, so a schedule is a sequence of values.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.errors import UserError
from longspan.layout import CPGroup
from longspan.typed import typed

__all__ = ["SGD", "AdamW", "clip_coefficient", "gradient_norm", "make_optimizer"]

INF = float("inf")
LARGEST_LR = 1e6  # far above any use; what is larger overflows fp32 weights in a step or two
CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_: coefficient = clip / (norm + 1e-6), at most 1


@typed
@dataclass(frozen=True, slots=True)
class AdamW:
    """One AdamW step (Loshchilov and Hutter 2019, as torch.optim.AdamW). clip_norm=None clips nothing.

    lr: learning rate a step. weight_decay: decoupled, in units of lr. clip_norm: largest global L2 norm of the gradient.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.lr <= LARGEST_LR, "lr", self.lr, f"at least 0 and finite, at most {LARGEST_LR:g}")
        _check(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "in [0, 1)")
        _check(0 < self.eps < 1, "eps", self.eps, "above 0 and below 1")
        _check(0 <= self.weight_decay < INF, "weight_decay", self.weight_decay, "at least 0 and finite")
        _check(self.clip_norm is None or self.clip_norm > 0, "clip_norm", self.clip_norm, "above 0, or None")

    def options(self) -> dict[str, object]:
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


@typed
@dataclass(frozen=True, slots=True)
class SGD:
    """One step of gradient descent with momentum (torch.optim.SGD): a scale error in the gradient stays visible."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.lr <= LARGEST_LR, "lr", self.lr, f"at least 0 and finite, at most {LARGEST_LR:g}")
        _check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        _check(0 <= self.weight_decay < INF, "weight_decay", self.weight_decay, "at least 0 and finite")
        _check(self.clip_norm is None or self.clip_norm > 0, "clip_norm", self.clip_norm, "above 0, or None")

    def options(self) -> dict[str, object]:
        return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}


def _check(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise UserError(f"{name}={value!r} must be {rule}")


def make_optimizer(settings: AdamW | SGD, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The torch optimizer for these settings over sharded parameters (elementwise, so sharding changes no bit)."""
    kind = torch.optim.AdamW if isinstance(settings, AdamW) else torch.optim.SGD
    return kind(parameters, foreach=True, **settings.options())  # type: ignore[arg-type]  # options() is typed by name


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor; a plain tensor is its own shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_norm(parameters: Iterable[Tensor], group: CPGroup) -> Tensor:
    """Global L2 norm of the gradients, each element counted once. [] fp64, equal on all ranks; stays on the device.

    Squares add up in fp64: an fp32 sum over 1e9 elements would lose what one layer contributes.
    """
    squares = [
        local(parameter.grad).to(torch.float64).square().sum() for parameter in parameters if parameter.grad is not None
    ]
    if not squares:
        raise UserError("optim_step found no gradient. Call forward_backward first")
    total = torch.stack(squares).sum()
    if group.group is not None:
        dist.all_reduce(total, group=group.group)
    return total.sqrt()


def clip_coefficient(norm: Tensor, clip_norm: float | None) -> Tensor | None:
    """What to multiply gradients with so that their norm is at most clip_norm. [] fp64, on the device."""
    return None if clip_norm is None else (clip_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
