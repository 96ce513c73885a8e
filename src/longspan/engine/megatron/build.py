"""From a Hugging Face adapter to this rank's stages: refusals, modules, weights tensor by tensor, freezing, masters.

Weights in safetensors are read a piece at a time (models/skeleton.py): a rank holds its own and one piece. Those of a
"tiny:" model or a GGUF file are whole in memory at first; the decoder gives them up when this rank's parts are copied.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longspan.engine.common import check_lora, frozen_names, make_value_head, set_mtp
from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.megatron.groups import Groups
from longspan.engine.megatron.model import Stage
from longspan.engine.megatron.moe import cut_columns
from longspan.engine.megatron.shape import Shape, shape_of
from longspan.engine.megatron.weights import Entry, chunk_table, join, take, take_within
from longspan.errors import UserError
from longspan.layout import CPGroup, Mesh
from longspan.models.adapter import Adapter
from longspan.models.experts import shard_experts
from longspan.models.lora import Routing, add_adapters
from longspan.models.skeleton import MemoryWeights, Weights, hollow, materialise, open_weights

__all__ = ["Built", "build_chunks"]


@dataclass(frozen=True, slots=True)
class Built:
    """What the backend works on."""

    chunks: nn.ModuleList  # of Stage: this rank's virtual stages
    shape: Shape
    table: dict[str, Entry]  # by parameter name of `chunks`
    masters: dict[str, Tensor]  # by parameter name: the parameter itself, or its fp32 master under bf16
    shapes: dict[str, tuple[int, ...]]  # Hugging Face name -> shape, of the whole model and in its order
    meshes: dict[str, DeviceMesh]  # "tp", "ep": where those axes have several ranks
    routing: Routing | None


def build_chunks(config: EngineConfig, adapter: Adapter, mesh: Mesh, groups: Groups) -> Built:
    """Collective only in the device meshes."""
    shape = shape_of(config, adapter, mesh.layout)
    check_lora(config)
    set_mtp(adapter, config)
    compute = DTYPES[config.dtype]
    master = torch.float64 if compute == torch.float64 else torch.float32
    value_head = make_value_head(adapter, config.seed, master) if config.value_head else None
    routing = None if config.lora is None else add_adapters(adapter, config.lora, config.seed)
    weights = open_weights(adapter, config.model)
    whole = dict(adapter.model.named_parameters())
    whole |= {} if value_head is None else {f"value_head.{name}": p for name, p in value_head.named_parameters()}
    whole |= {} if adapter.mtp is None else {f"mtp.{name}": p for name, p in adapter.mtp.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.items()}
    frozen = frozen_names(config.freeze, adapter, list(shapes))
    frozen |= set() if config.mtp_steps else {name for name in whole if name.startswith("mtp.")}
    if routing is not None:
        frozen |= {name for name, parameter in whole.items() if not parameter.requires_grad}
    stages = [
        Stage(adapter, shape, groups, n, value_head=value_head, dtype=master, routing=routing) for n in range(shape.vpp)
    ]
    for stage in stages:
        stage.recompute = config.recompute != "none"
    chunks = nn.ModuleList(stages)
    if groups.ep.size > 1:
        shard_experts(chunks, groups.ep)
    if shape.etp > 1:
        cut_columns(chunks, groups.tp)
    table = chunk_table(shape, groups, stages, shapes)
    materialise(chunks)
    _load(chunks, table, whole, shape, groups, weights)
    _release(adapter, chunks)
    chunks.to(mesh.device)
    masters: dict[str, Tensor] = {}
    for name, parameter in chunks.named_parameters():
        masters[name] = parameter if compute == master else parameter.detach()
        parameter.data = parameter.data.to(compute)  # parameters only: buffers are RoPE frequencies and stay fp32
    _freeze(chunks, table, frozen)
    for name, parameter in chunks.named_parameters():
        masters[name].requires_grad_(parameter.requires_grad)
    chunks.train()
    return Built(chunks, shape, table, masters, shapes, _meshes(groups, mesh), routing)


def _load(
    chunks: nn.Module,
    table: dict[str, Entry],
    whole: dict[str, nn.Parameter],
    shape: Shape,
    groups: Groups,
    weights: Weights,
) -> None:
    """Fill every parameter from `weights`, a piece at a time; what is not hollow in a module that stayed Hugging Face's is
    in place."""
    own = {id(parameter) for parameter in whole.values()}
    there = MemoryWeights(whole)  # value head, MTP head, LoRA factors: no checkpoint has them under these names
    with torch.no_grad():
        for name, parameter in chunks.named_parameters():
            entry = table[name]
            missing = hollow(whole[entry.parts[0].name])
            if not missing and (id(parameter) in own or entry.axis == "ep" or entry.parts[0].within is not None):
                continue  # experts are cut where they were
            group = groups.ep if entry.axis == "ep" else groups.tp
            pieces = []
            for part in entry.parts:
                rows = whole[part.name].shape[part.dim] if part.axis else 0
                pieces.append(take_within(take(weights if missing else there, part, rows, group), part, groups.tp))
            parameter.copy_(join(pieces, entry, shape))


def _release(adapter: Adapter, chunks: nn.Module) -> None:
    """Give up the adapter's copies of what the chunks hold or other ranks hold."""
    kept = {id(module) for module in chunks.modules()}
    for module in adapter.model.modules():
        if id(module) not in kept:
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))


def _freeze(chunks: nn.Module, table: dict[str, Entry], frozen: set[str]) -> None:
    for name, parameter in chunks.named_parameters():
        matched = [part.name in frozen for part in table[name].parts]
        if any(matched) and not all(matched):
            parts = [part.name for part in table[name].parts]
            raise UserError(f"freeze: {parts} are one tensor in backend='megatron'. Freeze all of them or none")
        parameter.requires_grad_(not all(matched))


def _meshes(groups: Groups, mesh: Mesh) -> dict[str, DeviceMesh]:
    axes: dict[str, CPGroup] = {"tp": groups.tp, "ep": groups.ep}
    return {
        axis: DeviceMesh.from_group(group.group, mesh.device.type, mesh_dim_names=(axis,))
        for axis, group in axes.items()
        if group.group is not None
    }
