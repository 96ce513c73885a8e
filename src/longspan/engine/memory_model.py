"""The memory model of an engine: what its settings keep on a rank, for max_tokens_per_rank="auto". Pure, the same on every rank.

Under backend="megatron" a rank has its own part of the model only, so what trains is counted by name, not by what is here.
"""

from dataclasses import replace

import torch
from torch import nn

from longspan.data.memory import MemoryModel
from longspan.data.shape import ModelShape
from longspan.data.stage_memory import StageMemory, Trained
from longspan.data.travel import Travel
from longspan.engine.common import frozen_names
from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.pipelines import cut_of, in_flight
from longspan.mixers.deltanet_choose import choose_delta_kernel
from longspan.models.adapter import Adapter

__all__ = ["WIDTHS", "memory_model"]

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2}
ROW_LINEARS = ("o_proj", "out_proj", "down_proj")  # whose inputs are cut over tp
ENDS = ("embed_tokens.weight", "lm_head.weight")


def memory_model(
    shape: ModelShape,
    config: EngineConfig,
    adapter: Adapter,
    ranks: int,
    device: torch.device,
    travel: Travel,
    visual_share: float = 0.0,
) -> MemoryModel | StageMemory:
    """What this engine keeps: what is frozen has no gradient and no moments. ranks: dp * cp."""
    build = _of_stages if config.backend == "megatron" else _of_shards
    plain_delta = choose_delta_kernel(device, DTYPES[config.dtype]).name != "fla"
    found = build(shape, config, adapter, ranks, visual_share, plain_delta)
    return replace(found, travel=travel)


def _of_shards(
    shape: ModelShape, config: EngineConfig, adapter: Adapter, ranks: int, visual_share: float, plain_delta: bool
) -> MemoryModel:
    parameters = list(adapter.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return MemoryModel(
        shape,
        ranks,
        config.recompute,
        config.offload,
        bytes_per_value=WIDTHS[config.dtype],
        trainable_share=trained / max(shape.weights, trained),
        head_trained=adapter.head()[0].requires_grad,
        visual_share=visual_share,
        lora_width=sum(lora_widths(adapter.units()[0])),
        compile=config.compile,
        ep=config.layout.ep,
        mlp_tile=config.mlp_tile,
        plain_delta=plain_delta,
    )


def _of_stages(
    shape: ModelShape, config: EngineConfig, adapter: Adapter, ranks: int, visual_share: float, plain_delta: bool
) -> StageMemory:
    layout = config.layout
    columns, rows = lora_widths(adapter.units()[0])
    return StageMemory(
        shape,
        cut_of(layout),
        ranks,
        in_flight(layout.pp, layout.vpp),
        config.recompute,
        bytes_per_value=WIDTHS[config.dtype],
        trained=trained_of(config, adapter),
        visual_share=visual_share,
        ep=layout.ep,
        lora_columns=columns,
        lora_rows=rows,
        plain_delta=plain_delta,
    )


def trained_of(config: EngineConfig, adapter: Adapter) -> Trained:
    """Shares of layers, embeddings and tower that get a gradient, by parameter names."""
    sizes = {name: parameter.numel() for name, parameter in adapter.model.named_parameters()}
    factors = {name for name in sizes if ".lora_" in name}
    frozen = sizes.keys() - factors if factors else frozen_names(config.freeze, adapter, _names(config, adapter))
    tower = {name for name in sizes if name.startswith("model.visual.")}
    ends = {name for name in sizes if name.endswith(ENDS)}

    def share(names: set[str]) -> float:
        base = sum(sizes[name] for name in names - factors)
        return sum(sizes[name] for name in names - frozen) / base if base else 0.0

    return Trained(share(sizes.keys() - tower - ends), bool(ends - frozen), share(tower))


def _names(config: EngineConfig, adapter: Adapter) -> list[str]:
    """Of all parameters that the backend builds: `freeze` may name heads, and may leave nothing else to train."""
    names = [name for name, _ in adapter.model.named_parameters()]
    names += ["value_head.weight", "value_head.bias"] if config.value_head else []
    return names + ([] if adapter.mtp is None else [f"mtp.{name}" for name, _ in adapter.mtp.named_parameters()])


def lora_widths(layer: nn.Module) -> tuple[int, int]:
    """Inputs and ranks of the linear layers of `layer` that carry LoRA factors, summed: of column and of row linears."""
    widths = [0, 0]
    for name, module in layer.named_modules():
        if ".lora_A." in name and isinstance(module, nn.Linear):
            linear = name.partition(".lora_A.")[0].rpartition(".")[2]
            widths[linear in ROW_LINEARS] += module.in_features + module.out_features
    return widths[0], widths[1]
