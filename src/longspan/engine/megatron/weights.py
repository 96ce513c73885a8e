"""Hugging Face names <-> megatron-core parameters: one table a rank, used alike for weights, gradients and moments.

Every megatron-core parameter is made of this rank's parts of one or more Hugging Face tensors:
    one     the part itself
    qkv     query, key and value rows, interleaved by key-value group: [q1 q2 k1 v1 | q3 q4 k2 v2 | ...]
    stack   parts over each other: gate over up rows, say
A part is a chunk (as torch.chunk cuts) of the tensor along one dim over one axis, "tp" or "ep", or the whole. So parts
are DTensor shards of Hugging Face tensors: checkpoints under these names load at any tp, pp, cp, dp and ep. A tensor
of several segments has a chunk of each; such a part is no DTensor shard, and a checkpoint gathers the tensor. So it does
with the columns of experts (etp), which are cut twice.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from longspan.engine.megatron.groups import Groups
from longspan.engine.megatron.moe import COLUMNS
from longspan.engine.megatron.shape import Shape
from longspan.layout import CPGroup
from longspan.layout.comm import all_gather
from longspan.models.experts import expert_modules
from longspan.models.skeleton import MemoryWeights, Weights

if TYPE_CHECKING:  # importing it imports megatron-core
    from longspan.engine.megatron.model import Stage

__all__ = [
    "Entry", "Part", "chunk_table", "gather", "gather_within", "join", "local", "split", "take", "take_within",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A Hugging Face tensor and how it is cut."""

    name: str
    axis: Literal["tp", "ep"] | None = None
    dim: int = 0
    segments: tuple[
        int, ...
    ] = ()  # sizes along `dim`, each cut by itself (q, k and v of a recurrent layer in one tensor)
    within: "Part | None" = None  # a second cut, over tp, of what the first leaves: an expert's columns


@dataclass(frozen=True, slots=True)
class Entry:
    """What one megatron-core parameter is made of."""

    parts: tuple[Part, ...]
    form: Literal["one", "qkv", "stack"] = "one"
    rows: tuple[int, ...] = ()  # of each part on this rank, for a stack of unequal parts
    partial: bool = False  # each tensor-parallel rank has a part of its gradient's sum
    copy: bool = False  # a second copy of a tied weight: loaded, stepped, but not counted or saved

    @property
    def axis(self) -> str | None:
        return self.parts[0].axis

    @property
    def over_tp(self) -> bool:
        """Whether tensor-parallel ranks have different parts of it; else they repeat it."""
        return self.axis == "tp" or self.parts[0].within is not None


def chunk_table(shape: Shape, groups: Groups, chunks: Sequence["Stage"], names: Collection[str]) -> dict[str, Entry]:
    """Parameter name ("0.gpt...": chunk, then its own name) -> Entry, for every parameter of this rank. names: the
    Hugging Face model's, where a linear with LoRA has its weight under `base_layer`."""
    return {
        f"{place}.{name}": replace(entry, parts=tuple(_based(part, names) for part in entry.parts))
        for place, stage in enumerate(chunks)
        for name, entry in _stage_table(shape, groups, stage).items()
    }


def _based(part: Part, names: Collection[str]) -> Part:
    path, _, kind = part.name.rpartition(".")
    return part if part.name in names else replace(part, name=f"{path}.base_layer.{kind}")


def _stage_table(shape: Shape, groups: Groups, stage: "Stage") -> dict[str, Entry]:
    text = "model.language_model." if shape.vision else "model."
    rows = shape.sequence_parallel
    table: dict[str, Entry] = {}
    if stage.first:
        table["gpt.embedding.word_embeddings.weight"] = Entry((Part(f"{text}embed_tokens.weight", "tp"),))
    for place, number in enumerate(shape.stage(stage.number)):
        ours, theirs = f"gpt.decoder.layers.{place}.", f"{text}layers.{number}."
        table |= {ours + name: entry for name, entry in _layer(shape, theirs, number, rows=rows).items()}
    if stage.last:
        table["gpt.decoder.final_layernorm.weight"] = Entry((Part(f"{text}norm.weight"),), partial=rows)
        if not shape.tied:
            table["gpt.output_layer.weight"] = Entry((Part("lm_head.weight", "tp"),))
        elif shape.pp > 1:
            table["gpt.output_layer.weight"] = Entry((Part(f"{text}embed_tokens.weight", "tp"),), copy=True)
    experts = tuple(f"{name}." for name in expert_modules(stage))
    for name, parameter in stage.named_parameters():
        if ".adapters." in name:
            table[name] = _factor(name, shape, stage)
        elif name not in table:  # modules that stayed Hugging Face's: the same names under another root
            theirs, inside = _own_name(name, shape, stage), name.startswith(experts)
            axis = "ep" if inside and groups.ep.size > 1 else None
            columns = _columns(theirs, parameter, shape.etp) if inside and shape.etp > 1 else None
            table[name] = Entry((Part(theirs, axis, within=columns),))
    missing = {name for name, _ in stage.named_parameters()} ^ set(table)
    assert not missing, missing
    return table


def _layer(shape: Shape, theirs: str, number: int, *, rows: bool) -> dict[str, Entry]:
    def columns(form: Literal["one", "qkv", "stack"], kind: str, *names: str) -> Entry:
        return Entry(tuple(Part(f"{theirs}{name}.{kind}", "tp") for name in names), form)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    table = {
        "input_layernorm.weight": Entry((Part(f"{theirs}input_layernorm.weight"),), partial=rows),
        "pre_mlp_layernorm.weight": Entry((Part(f"{theirs}post_attention_layernorm.weight"),), partial=rows),
    }
    if number not in shape.recurrent_layers:
        table["self_attention.linear_qkv.weight"] = columns("qkv", "weight", *qkv)
        table["self_attention.linear_proj.weight"] = Entry((Part(f"{theirs}self_attn.o_proj.weight", "tp", 1),))
    if number in shape.recurrent_layers:
        table |= _delta(shape, theirs)
    elif shape.gated:
        heads = shape.head_dim // shape.tp
        rows_ = (2 * heads * shape.num_heads, heads * shape.num_kv_heads, heads * shape.num_kv_heads)
        table["self_attention.linear_qkv.weight"] = replace(columns("stack", "weight", *qkv), rows=rows_)
    if shape.qkv_bias:
        table["self_attention.linear_qkv.bias"] = columns("qkv", "bias", *qkv)
    if shape.qk_norm and number not in shape.recurrent_layers:  # each tensor-parallel rank normalises its own heads
        table |= {
            f"self_attention.{name}_layernorm.weight": Entry(
                (Part(f"{theirs}self_attn.{name}_norm.weight"),), partial=True
            )
            for name in ("q", "k")
        }
    if number not in shape.expert_layers:
        table["mlp.linear_fc1.weight"] = columns("stack", "weight", "mlp.gate_proj", "mlp.up_proj")
        table["mlp.linear_fc2.weight"] = Entry((Part(f"{theirs}mlp.down_proj.weight", "tp", 1),))
    return table


def _delta(shape: Shape, theirs: str) -> dict[str, Entry]:
    """A recurrent layer: its projections in one linear, every tensor cut by heads."""
    assert shape.delta is not None
    whole, text = shape.delta, f"{theirs}linear_attn."
    channels, values = whole.channels, whole.value_heads * whole.value_dim
    if shape.interleaved_delta:
        parts = {"in_proj_qkvz": (sum(channels) + values, ()), "in_proj_ba": (2 * whole.value_heads, ())}
    else:
        heads = (whole.value_heads, ())
        parts = {"in_proj_qkv": (sum(channels), channels), "in_proj_z": (values, ())}
        parts |= {"in_proj_b": heads, "in_proj_a": heads}
    return {
        "self_attention.linear_in.weight": Entry(
            tuple(Part(f"{text}{name}.weight", "tp", 0, segments) for name, (_, segments) in parts.items()),
            "stack",
            rows=tuple(size // shape.tp for size, _ in parts.values()),
        ),
        "self_attention.conv": Entry((Part(f"{text}conv1d.weight", "tp", 0, channels),)),
        "self_attention.A_log": Entry((Part(f"{text}A_log", "tp"),)),
        "self_attention.dt_bias": Entry((Part(f"{text}dt_bias", "tp"),)),
        "self_attention.norm.weight": Entry((Part(f"{text}norm.weight"),), partial=True),
        "self_attention.linear_proj.weight": Entry((Part(f"{text}out_proj.weight", "tp", 1),)),
    }


def _factor(name: str, shape: Shape, stage: "Stage") -> Entry:
    """A factor of an adapter: ...layers.<n>.<linear>.adapters.<part>.lora_A.<adapter>.weight."""
    linear, _, rest = name.partition(".adapters.")
    place, _, linear = linear.removeprefix("gpt.decoder.layers.").partition(".")
    number = shape.stage(stage.number)[int(place)]
    text = "model.language_model." if shape.vision else "model."
    attention = "linear_attn" if number in shape.recurrent_layers else "self_attn"
    theirs = f"{text}layers.{number}.{'mlp' if linear.startswith('mlp.') else attention}.{rest}"
    column, down = linear.endswith(("linear_qkv", "linear_in", "linear_fc1")), ".lora_A." in rest
    if column:
        segments = shape.delta.channels if shape.delta is not None and rest.startswith("in_proj_qkv.") else ()
        up = Entry((Part(theirs, "tp", 0, segments),))
        return Entry((Part(theirs),), partial=shape.sequence_parallel) if down else up
    return Entry((Part(theirs, "tp", 1),)) if down else Entry((Part(theirs),), partial=True)


def _columns(name: str, parameter: Tensor, etp: int) -> Part:
    """How the columns of experts [n, ...] lie over the tensor-parallel ranks; parameter: this rank's."""
    dim, runs = COLUMNS[name.rpartition(".")[2]]
    return Part(name, "tp", dim, (parameter.shape[dim] // runs * etp,) * runs)


def _own_name(name: str, shape: Shape, stage: "Stage") -> str:
    if name.startswith("tower."):
        return "model.visual." + name.removeprefix("tower.")
    if name.startswith(("value_head.", "mtp.")):
        return name
    place, _, rest = name.removeprefix("gpt.decoder.layers.").partition(".")
    number = shape.stage(stage.number)[int(place)]
    text = "model.language_model." if shape.vision else "model."
    return f"{text}layers.{number}.mlp." + rest.removeprefix("mlp.inner.block.")


def split(value: Tensor, entry: Entry, shape: Shape) -> list[Tensor]:
    """A megatron-core tensor as this rank's parts, in the entry's order."""
    match entry.form:
        case "one":
            return [value]
        case "stack":
            return list(value.split(entry.rows) if entry.rows else value.chunk(len(entry.parts)))
        case "qkv":
            groups = shape.num_kv_heads // shape.tp
            ratio = shape.num_heads // shape.num_kv_heads
            rows = [ratio * shape.head_dim, shape.head_dim, shape.head_dim]
            parts = value.reshape(groups, sum(rows), *value.shape[1:]).split(rows, 1)
            return [part.reshape(-1, *value.shape[1:]) for part in parts]


def join(parts: Sequence[Tensor], entry: Entry, shape: Shape) -> Tensor:
    """The inverse of `split`."""
    match entry.form:
        case "one":
            return parts[0]
        case "stack":
            return torch.cat(list(parts))
        case "qkv":
            groups = shape.num_kv_heads // shape.tp
            trailing = parts[0].shape[1:]
            return torch.cat([part.reshape(groups, -1, *trailing) for part in parts], 1).reshape(-1, *trailing)


def take(weights: Weights, part: Part, rows: int, group: CPGroup) -> Tensor:
    """This rank's chunk of a tensor with `rows` rows along the part's dim; the last one of an uneven cut gets zeros below."""
    if part.axis is None or group.size == 1:
        return weights.read(part.name)
    if part.segments:
        return torch.cat([_of_segment(weights, part, place, group) for place in range(len(part.segments))], part.dim)
    size = -(-rows // group.size)
    start = min(size * group.rank, rows)
    chunk = weights.read(part.name, part.dim, start, min(start + size, rows))
    missing = size - chunk.shape[part.dim]
    if not missing:
        return chunk
    assert part.dim == 0, "only a vocabulary is cut unevenly"
    return torch.cat([chunk, chunk.new_zeros(missing, *chunk.shape[1:])])


def _of_segment(weights: Weights, part: Part, place: int, group: CPGroup) -> Tensor:
    own = part.segments[place] // group.size
    start = sum(part.segments[:place]) + own * group.rank
    return weights.read(part.name, part.dim, start, start + own)


def take_within(value: Tensor, part: Part, tp: CPGroup) -> Tensor:
    """This rank's share of a chunk that is cut a second time."""
    inner = part.within
    return value if inner is None else take(MemoryWeights({inner.name: value}), inner, value.shape[inner.dim], tp)


def gather_within(part_value: Tensor, part: Part, tp: CPGroup) -> Tensor:
    """The inverse of `take_within`. Collective."""
    inner = part.within
    return part_value if inner is None else gather(part_value, inner, sum(inner.segments), tp)


def local(part_value: Tensor, part: Part, rows: int, group: CPGroup) -> Tensor:
    """The real rows of a chunk of a tensor with `rows` rows along the part's dim: without the zeros of `take`."""
    if part.axis is None or group.size == 1:
        return part_value
    size = part_value.shape[part.dim]
    return part_value.narrow(part.dim, 0, max(0, min(size, rows - size * group.rank)))


def gather(part_value: Tensor, part: Part, rows: int, group: CPGroup) -> Tensor:
    """The whole tensor from every rank's chunk. Collective."""
    if part.axis is None or group.size == 1:
        return part_value
    moved = part_value.movedim(part.dim, 0).contiguous()
    whole = all_gather(moved, group)[:rows]
    if part.segments:
        by_rank = [chunk.split([size // group.size for size in part.segments]) for chunk in whole.chunk(group.size)]
        whole = torch.cat([chunk[place] for place in range(len(part.segments)) for chunk in by_rank])
    return whole.movedim(0, part.dim).contiguous()
