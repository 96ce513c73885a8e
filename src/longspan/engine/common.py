"""What every backend does alike: to an adapter before it spreads its parameters, to an optimizer, a checkpoint, an export."""

import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.engine.config import EngineConfig
from longspan.engine.optim import SGD, AdamW
from longspan.errors import CheckpointError, UserError
from longspan.models.adapter import Adapter
from longspan.models.lora import adapter_of, merge_weights, write_adapter
from longspan.models.mtp import mtp_exported

__all__ = [
    "check_finite", "check_lora", "check_same_settings", "check_shapes", "empty_settings", "export_weights", "frozen_names",
    "make_value_head", "owners_of", "pick_adapter", "set_mtp", "use_settings", "zero_slots",
]  # fmt: skip


def check_same_settings(config: EngineConfig, ranks: int) -> None:
    """Raises UserError on every rank where ranks were given different settings: they would train parts of different models, or wait
    for each other. A model counts by the last part of its name, since machines may keep it in folders of their own. Collective."""
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, dataclasses.replace(config, model=Path(config.model).name))
    for name in (field.name for field in dataclasses.fields(config)):
        values = [getattr(other, name) for other in every]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise UserError(
                f"{name}={values[0]!r} on rank 0 and {values[odd]!r} on rank {odd}: give every rank the same EngineConfig"
            )


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


def frozen_names(freeze: Iterable[str], adapter: Adapter, names: Collection[str]) -> set[str]:
    """Names by part or by fnmatch pattern; a name that matches nothing is an error."""
    parts, frozen = adapter.parts(), set()
    for entry in freeze:
        matched = {
            name
            for name in names
            if (any(name.startswith(p) for p in parts[entry]) if entry in parts else fnmatch.fnmatch(name, entry))
        }
        if not matched:
            raise UserError(
                f"freeze={entry!r} matches no parameter. Parts of this model: {sorted(parts)}; or use a name pattern"
            )
        frozen |= matched
    if frozen == set(names):
        raise UserError(f"freeze={freeze} leaves nothing to train")
    return frozen


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


def owners_of(adapters: Collection[str], adapter: str | None) -> set[str | None]:
    """Whose parameters a step moves: an adapter's, with the value head where it is the only one; or everything (None)."""
    return {adapter} if len(adapters) > 1 else {adapter, None}


def use_settings(param_groups: Iterable[dict[str, Any]], kind: str, settings: AdamW | SGD) -> None:
    """Give an optimizer of this kind the settings of one step."""
    if kind != type(settings).__name__:
        raise UserError(
            f"this engine steps with {kind}; {type(settings).__name__} would ignore its state. Use one optimizer for a run"
        )
    for group in param_groups:
        group.update(settings.options())


def empty_settings(kind: str) -> AdamW | SGD:
    """Settings to make an optimizer of a saved kind with, before a checkpoint fills its state."""
    return AdamW(lr=0.0) if kind == "AdamW" else SGD(lr=0.0)


def check_finite(norm: Tensor, gradients: Iterable[tuple[str, Tensor | None]], rank: int) -> None:
    """Raises UserError for a norm that is not finite, naming parameters with such gradients on this rank."""
    if torch.isfinite(norm):
        return
    broken = sorted(name for name, gradient in gradients if gradient is not None and not torch.isfinite(gradient).all())
    raise UserError(
        f"the gradient norm is {float(norm)}: no step was taken and the weights are unchanged. Parameters with "
        f"non-finite gradients on rank {rank}: {broken[:3] or 'none here'}. Call engine.clear_gradients() to drop this "
        "batch and go on"
    )


def check_shapes(folder: Path, saved: Mapping[str, list[int]], mine: Mapping[str, list[int]]) -> None:
    """Raises CheckpointError where a checkpoint's parameters are not this model's."""
    if saved != mine:
        wrong = [name for name in sorted({*mine, *saved}) if mine.get(name) != saved.get(name)]
        raise CheckpointError(
            f"{folder} was saved for another model: parameters differ, first {wrong[:3]}. Nothing was loaded"
        )


def export_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    adapter: Adapter,
    *,
    names: Collection[str],
    lora: Mapping[str, Any],
    merge: str | None,
    lead: bool,
) -> None:
    """Without LoRA a Hugging Face folder. With it, one peft folder an adapter; merge=name: the base with it added in.

    weights: full parameters under their public names; names: those that there are. The lead rank writes, all ranks check.
    """
    if merge is not None and merge not in lora:
        raise UserError(f"merge={merge!r} is not one of this engine's adapters {sorted(lora)}")
    if not lead:
        return
    weights = {name: value for name, value in weights.items() if not name.startswith("value_head.")}
    if lora and merge is None:
        for name, config in lora.items():
            write_adapter(folder if len(lora) == 1 else folder / name, name, config, weights)
        return
    merged = merge_weights(weights, adapter.model, merge)
    wanted = {name.replace(".base_layer.", ".") for name in names if adapter_of(name) is None}
    missing = sorted(name for name in wanted - merged.keys() if not name.startswith("value_head."))
    if missing:  # a folder that lacks a parameter would load with random values
        raise CheckpointError(
            f"the export lacks {missing[:3]} ({len(missing)} of {len(wanted)} tensors): nothing was written"
        )
    adapter.model.save_pretrained(folder, state_dict=mtp_exported(adapter.mtp, merged))
