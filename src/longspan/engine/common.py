"""What every backend does to an adapter before it spreads its parameters: the same rules and names in each."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from longspan.engine.config import EngineConfig
from longspan.errors import UserError
from longspan.models.adapter import Adapter

__all__ = ["check_lora", "make_value_head", "pick_adapter", "set_mtp", "zero_slots"]


def make_value_head(adapter: Adapter, seed: int, dtype: torch.dtype) -> nn.Linear:
    """Scalar head on the last hidden state: weights N(0, 0.02) from the seed, bias 0; the same on every rank."""
    head = nn.Linear(adapter.hidden_size, 1, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
        head.bias.zero_()
    return head


def check_lora(config: EngineConfig) -> None:
    """Adapters train alone: nothing else moves, but a value head where there is one adapter to step with."""
    adapters = sorted(config.lora or {})
    if adapters and config.mtp_steps:
        raise UserError(
            f"mtp_steps={config.mtp_steps}: the base of the adapters {adapters} is frozen, `mtp.*` with it. Set mtp_steps=0"
        )
    if len(adapters) > 1 and config.value_head:
        raise UserError(
            f"value_head=True with the adapters {adapters}: one head cannot take each adapter's own step. Build an engine an adapter"
        )


def set_mtp(adapter: Adapter, config: EngineConfig) -> None:
    """A head that is not trained is carried along: no gradient, no weight decay."""
    if config.mtp_steps and adapter.mtp is None:
        raise UserError(
            f"mtp_steps={config.mtp_steps}: {config.model} has no multi-token-prediction head (`mtp.*` tensors)"
        )
    if adapter.mtp is not None:
        adapter.mtp.steps, adapter.mtp.joint = config.mtp_steps, config.mtp_joint
        adapter.mtp.requires_grad_(config.mtp_steps > 0)


def pick_adapter(adapters: Collection[str], name: str | None) -> str | None:
    """Which parameters a step moves: those of one adapter, or (without LoRA) all."""
    if not adapters:
        if name is not None:
            raise UserError(
                f"adapter={name!r}: this engine has no LoRA adapters. Build it with lora={{name: LoraConfig}}"
            )
        return None
    if name is None and len(adapters) == 1:
        return next(iter(adapters))
    if name not in adapters:
        raise UserError(f"adapter={name!r} is not one of {sorted(adapters)}. Name the adapter to step")
    return name


def zero_slots(kind: str, like: Tensor, *, momentum: bool) -> dict[str, Tensor]:
    """Optimizer state of one parameter for a checkpoint to fill, under torch's names. momentum: SGD's was saved with it."""
    if kind == "AdamW":
        moments = {name: torch.zeros_like(like) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32), **moments}
    return {"momentum_buffer": torch.zeros_like(like)} if momentum else {}
