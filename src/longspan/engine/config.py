"""EngineConfig: what to train and how it is laid out. Valid by construction; nothing here is ignored later."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from longspan.engine.megatron.options import MegatronOptions
from longspan.errors import UserError
from longspan.layout import Layout
from longspan.typed import typed

__all__ = ["DTYPES", "EngineConfig"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@typed
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Every rank builds the same one.

    model: "tiny:<family>" (a random config for tests), a local Hugging Face folder, or a hub id.
    layout: how ranks are used (see Layout). backend: "fsdp" (PyTorch FSDP2 + transformers) or "megatron" (Megatron-Core).
    dtype: "float64", "float32", or "bfloat16" (bf16 compute over fp32 master weights, gradients and moments).
    seed: seeds the random weights of a tiny model, a value head and LoRA factors.
    max_tokens_per_rank: tokens a rank may hold in one micro-step, padding counted; "auto" asks the memory model.
    dynamic_cp: choose the context-parallel size per sample instead of layout.cp for all.
    freeze: part names ("vision", "merger", "language", "embeddings") or fnmatch patterns of parameter names.
    lora: {adapter name: peft.LoraConfig}; the base is frozen then.
    value_head: adds a scalar head `value_head.*` for the "value" loss.
    mtp_steps: steps ahead that the checkpoint's multi-token-prediction head trains on; 0 carries the head along unchanged.
    mtp_joint: its gradient also reaches the decoder, the embeddings and the output layer; else it stays in `mtp.*`.
    recompute: "none", "selective" (layers are recomputed but no attention runs twice) or "full".
    machine: constants of the cost model: "auto" (H200's on a GPU, none on a CPU), a shipped name, or a JSON file from `longspan
        bench --calibrate`.
    offload: what lives in host memory: "checkpoints", "optimizer", "parameters".
    megatron: switches of backend="megatron" (engine/megatron/options.py).
    kernel: attention kernel, "auto" or one of longspan.mixers.kernels' names. compile: torch.compile each layer
        (raises torch._dynamo's recompile_limit of this process to 64).
    deterministic: attention's backward adds in a fixed order, so that it repeats its bits on GPUs (flash4, 64k row: 615 -> 508 TFLOP/s),
        and compiled layers take their tiles by rule, not by timing (timed, a resumed run repeats its bits only beside the same
        inductor cache).
    mlp_tile: tokens of a tile; rows longer than it run their MLPs tile by tile, forward and backward. 0: whole rows.
    """

    model: str
    layout: Layout = field(default_factory=Layout)
    backend: Literal["fsdp", "megatron"] = "fsdp"
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    seed: int = 0
    max_tokens_per_rank: int | Literal["auto"] = "auto"
    dynamic_cp: bool = False
    freeze: tuple[str, ...] = ()
    lora: Mapping[str, Any] | None = None
    value_head: bool = False
    mtp_steps: int = 0
    mtp_joint: bool = False
    recompute: Literal["none", "selective", "full"] = "selective"
    offload: tuple[Literal["checkpoints", "optimizer", "parameters"], ...] = ()
    machine: str = "auto"
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    kernel: str = "auto"
    deterministic: bool = False
    compile: bool = False
    mlp_tile: int = 0

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must be a whole number of 64 bits, -2**63 to 2**63 - 1")
        if self.max_tokens_per_rank != "auto" and self.max_tokens_per_rank < 1:
            raise UserError(
                f"max_tokens_per_rank={self.max_tokens_per_rank!r} must be a positive number of tokens a rank, or 'auto'"
            )
        if self.mtp_steps < 0 or (self.mtp_joint and not self.mtp_steps):
            raise UserError(
                f"mtp_steps={self.mtp_steps} must be 0 or more, and above 0 with mtp_joint={self.mtp_joint}"
            )
        if self.backend != "megatron" and self.megatron != MegatronOptions():
            raise UserError(f"{self.megatron} needs backend='megatron', got {self.backend!r}")
        if self.mlp_tile < 0 or (self.mlp_tile and (self.backend != "fsdp" or self.lora)):
            raise UserError(
                f"mlp_tile={self.mlp_tile} must be 0 or a positive number of tokens, and above 0 needs backend='fsdp' and no lora"
            )
