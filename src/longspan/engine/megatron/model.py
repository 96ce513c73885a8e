"""One virtual pipeline stage of a model on megatron-core: the layer spec, the GPTModel, and a micro-step's way through.

Hugging Face keeps what knows no tensor parallelism: RoPE tables, the vision tower, expert blocks. megatron-core has
embeddings, attention projections, MLPs and the layer loop. T_local tokens come in; under sequence parallelism rows are
padded to a multiple of tp, cut, and whole again before the head.
Head: its vocabulary shards are gathered once a micro-step (V * E elements, freed after backward) and every
tensor-parallel rank repeats it on all its tokens: exact, at tp times the head's FLOPs.
"""

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.engine.backend import Head, MicroStep, Program
from longspan.engine.megatron.collectives import gather_whole, keep_own, pad_rows
from longspan.engine.megatron.groups import Groups
from longspan.engine.megatron.hybrid import DeltaNet, GatedAttention, Linears
from longspan.engine.megatron.layers import Column, CoreAttention, Norm, Row, StreamParams, ZeroNorm
from longspan.engine.megatron.lora import Adapters
from longspan.engine.megatron.moe import Block, ExpertMLP
from longspan.engine.megatron.shape import Shape
from longspan.engine.megatron.upstream import (
    GPTModel,
    IdentityOp,
    ModuleSpec,
    ProcessGroupCollection,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    get_gpt_layer_local_spec,
)
from longspan.models.adapter import Adapter
from longspan.models.lora import Routing
from longspan.models.moe import MoEState, tap_routers
from longspan.models.qwen3_5_deltanet import prepare_recurrent
from longspan.models.qwen3_vl import run_tower
from longspan.models.vision import place_rows

__all__ = ["Stage"]


class Layer(TransformerLayer):
    """megatron-core's layer, with the micro-step's context for experts and DeepStack features after it."""

    routing: Routing | None = None

    def forward(self, *args: Any, packed_seq_params: StreamParams, **kwargs: Any) -> Any:
        if self.routing is not None:  # here, so that a recomputation meets its own micro-step's
            self.routing.ids = packed_seq_params.adapter_ids
        if isinstance(self.mlp, ExpertMLP):
            self.mlp.context = packed_seq_params.context
        try:
            hidden, context = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:  # a recomputation stops inside the layer, where megatron-core keeps a tensor and with it half a graph
            self.mlp_norm_manager = None
        place = self.layer_number - 1
        if place < len(packed_seq_params.deepstack):
            hidden = hidden + packed_seq_params.deepstack[place]
        return hidden, context


class Tables:
    """What a multi-token-prediction head reads of the decoder: its RoPE tables and this micro-step's whole embeddings."""

    def __init__(self, rotary_emb: nn.Module) -> None:
        self.rotary_emb = rotary_emb
        self.embed_tokens = SimpleNamespace(weight=None)


class Stage(nn.Module):
    """The layers of one virtual stage, embeddings and tower on the first, head and value head on the last."""

    def __init__(
        self,
        adapter: Adapter,
        shape: Shape,
        groups: Groups,
        chunk: int,
        *,
        value_head: nn.Module | None,
        dtype: torch.dtype,
        routing: Routing | None,
    ) -> None:
        super().__init__()
        self.shape, self.groups, self.routing = shape, groups, routing
        self.number = chunk * shape.pp + groups.pp.rank
        self.first, self.last = self.number == 0, self.number == shape.num_stages - 1
        self.rows = groups.tp if shape.sequence_parallel else None
        decoder = decoder_of(adapter, shape)
        self.rotary = decoder.rotary_emb
        layers = shape.stage(self.number)
        blocks = {n: Block(decoder.layers[n].mlp) for n in shape.expert_layers if n in layers}
        tap_routers(list(blocks.values()), first=sum(n < layers.start for n in shape.expert_layers))
        self.gpt = _gpt(self, chunk, blocks, dtype)
        for layer, number in zip(self.gpt.decoder.layers, layers, strict=True):
            _adapt(layer, decoder.layers[number], self)
        self.tower = adapter.model.model.visual if shape.vision and self.first else None
        self.value_head = value_head if self.last else None
        self.mtp = adapter.mtp if self.last else None
        self.tables = Tables(decoder.rotary_emb)
        if self.mtp is not None:
            self.mtp.read_from(self.tables)
        self.recompute = False

    def forward(self, step: MicroStep, incoming: Tensor | None, program: Program) -> tuple[Tensor, Tensor | None]:
        """incoming: hidden states of the stage before; None on the first. The last returns the program's sum, others what
        goes on and the sum of their own loss terms."""
        step = _with_own_routers(step)
        params, hidden = self._enter(step)
        hidden = hidden if incoming is None else incoming
        for layer in self.gpt.decoder.layers:
            run = partial(layer, attention_mask=None, packed_seq_params=params)
            if self.recompute and program.trains:
                hidden = checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)[0]
            else:
                hidden = run(hidden)[0]
        return (self._leave(hidden, step, program), None) if self.last else (hidden, program.aside(step))

    def shape_between(self, step: MicroStep) -> tuple[int, int, int]:
        """Shape of the hidden states that travel between stages."""
        return self._padded(step) // (1 if self.rows is None else self.rows.size), 1, self.shape.hidden_size

    def _padded(self, step: MicroStep) -> int:
        real = step.context.info.num_local
        return real if self.rows is None else -(-real // self.rows.size) * self.rows.size

    def _cut(self, whole: Tensor, step: MicroStep) -> Tensor:
        """[T_local, E] -> [rows of this rank, 1, E]."""
        whole = whole[:, None]
        return whole if self.rows is None else keep_own(pad_rows(whole, self._padded(step)), self.rows)

    def _enter(self, step: MicroStep) -> tuple[StreamParams, Tensor | None]:
        """RoPE tables of this rank's tokens; on the first stage embeddings with visual features in their places."""
        fields = step.shard.fields
        position = fields["position"]
        position = position[None] if position.dim() == 1 else position[:, None]  # [1, T] or [3, 1, T]
        position = position[None].expand(3, 1, -1) if self.shape.axes and position.dim() == 2 else position
        like = torch.empty(0, dtype=self.shape.dtype, device=position.device)
        cos, sin = self.rotary(like, position)
        params = StreamParams(
            qkv_format="thd",
            context=step.context,
            cos=cos.movedim(0, 1),
            sin=sin.movedim(0, 1),
            total_tokens=None,
            adapter_ids=fields["adapter"] if self.routing is not None else None,
        )
        if self.shape.delta is not None and "linear" not in step.context.scratch:
            prepare_recurrent(step.context, like)  # once a micro-step: a recomputation meets the same one
        if not self.first:
            return params, None
        hidden_TE = self.gpt.embedding.word_embeddings(fields["input_ids"][None])[0]
        if self.tower is not None and step.media is not None:
            out = run_tower(self.tower, step.media, step.context)
            features = [out.pooler_output, *(out.deepstack_features if self.shape.deepstack else ())]
            if self.mtp is not None:
                self.mtp.see(out.pooler_output, step.media, step.context)
            placed, *deepstack = place_rows(torch.cat(features, 1), step.media).chunk(len(features), 1)
            hidden_TE = hidden_TE.index_copy(0, step.media.positions, placed.to(hidden_TE.dtype))
            empty = torch.zeros_like(hidden_TE)
            added = [empty.index_copy(0, step.media.positions, x.to(hidden_TE.dtype)) for x in deepstack]
            params.deepstack = tuple(self._cut(x, step) for x in added)
        return params, self._cut(hidden_TE, step)

    def _leave(self, hidden: Tensor, step: MicroStep, program: Program) -> Tensor:
        hidden = self.gpt.decoder.final_layernorm(hidden)
        hidden_TE = (hidden if self.rows is None else gather_whole(hidden, self.rows))[: step.context.info.num_local, 0]
        weight = gather_whole(self.head_weight, self.groups.tp)[: self.shape.vocab_size]
        value = None if self.value_head is None else self.value_head(hidden_TE)[:, 0]
        out = program.compute(hidden_TE, self._head(weight, step), value, step)
        self.tables.embed_tokens = SimpleNamespace(weight=None)  # of this micro-step alone
        return out

    def _head(self, weight: Tensor, step: MicroStep) -> Head:
        if self.mtp is None or not self.mtp.steps:
            return Head(weight, None, None)
        if self.shape.tied or not self.first:
            self.tables.embed_tokens = SimpleNamespace(weight=weight)
        else:
            whole = gather_whole(self.gpt.embedding.word_embeddings.weight, self.groups.tp)
            self.tables.embed_tokens = SimpleNamespace(weight=whole[: self.shape.vocab_size])
        drafts = partial(self.mtp, shard=step.shard, context=step.context)
        return Head(weight, None, None, drafts, weight if self.mtp.joint else weight.detach())

    @property
    def head_weight(self) -> Tensor:
        """[V / tp, E] of this rank."""
        tied = self.gpt.share_embeddings_and_output_weights
        return self.gpt.embedding.word_embeddings.weight if tied else self.gpt.output_layer.weight


def decoder_of(adapter: Adapter, shape: Shape) -> nn.Module:
    """The Hugging Face text decoder: layers, norm, rotary_emb."""
    return adapter.model.model.language_model if shape.vision else adapter.model.model


Form = Literal["one", "qkv", "stack"]
MLP: tuple[tuple[str, str, tuple[str, ...], Form], ...] = (
    ("mlp.linear_fc1", "mlp", ("gate_proj", "up_proj"), "stack"),
    ("mlp.linear_fc2", "mlp", ("down_proj",), "one"),
)


def _linears(shape: Shape, number: int) -> Iterator[tuple[str, str, tuple[str, ...], Form]]:
    """(megatron-core's linear, Hugging Face's parent module, its linears there, how they are fused) of a layer."""
    if number in shape.recurrent_layers:
        by_kind = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        parts = ("in_proj_qkvz", "in_proj_ba") if shape.interleaved_delta else by_kind
        yield "self_attention.linear_in", "linear_attn", parts, "stack"
        yield "self_attention.linear_proj", "linear_attn", ("out_proj",), "one"
    else:
        form: Form = "stack" if shape.gated else "qkv"
        yield "self_attention.linear_qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), form
        yield "self_attention.linear_proj", "self_attn", ("o_proj",), "one"
    yield from MLP


def _adapt(layer: Layer, source: nn.Module, stage: Stage) -> None:
    """Give a layer's linears the adapters that Hugging Face's layer carries."""
    layer.routing = stage.routing
    if stage.routing is None:
        return
    modules = dict(layer.named_modules())
    for ours, parent, names, form in _linears(stage.shape, layer.layer_number - 1):
        linear = modules.get(ours)
        if linear is None:  # an expert block keeps Hugging Face's own
            continue
        sources = {name: source.get_submodule(f"{parent}.{name}") for name in names}
        if any(isinstance(module, LoraLayer) for module in sources.values()):
            kind = "column" if isinstance(linear, Column) else "row"
            linear.adapters = Adapters(sources, stage.routing, kind=kind, tp=stage.groups.tp, rows=stage.rows)
            linear.form, linear.groups = form, stage.shape.num_kv_heads // stage.shape.tp


def _with_own_routers(step: MicroStep) -> MicroStep:
    """The micro-step with a router record of its own: a rank's chunks must not count each other's layers."""
    moe = step.context.moe
    if moe is None:
        return step
    own = MoEState(moe.replay, moe.keep_logits, moe.keep_routes)
    return replace(step, context=replace(step.context, moe=own))


def _gpt(stage: Stage, chunk: int, blocks: dict[int, Block], dtype: torch.dtype) -> GPTModel:
    shape, groups = stage.shape, stage.groups
    specs = [_layer_spec(stage, n, blocks if n in blocks else None) for n in shape.stage(stage.number)]
    # "GPTModel IS DEPRECATED", once a rank: the version is pinned for that reason
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    collection = ProcessGroupCollection()
    collection.tp = groups.tp.group or groups.alone
    collection.pp = groups.pp.group or groups.alone
    collection.cp = collection.ep = collection.expt_tp = groups.alone
    collection.embd = None  # tied weights of two stages are summed by backend.py
    return GPTModel(
        transformer_config(shape, dtype),
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=ZeroNorm if shape.zero_centred else Norm),
        vocab_size=shape.padded_vocab,
        max_sequence_length=1,  # only learned position tables read it
        pre_process=stage.first,
        post_process=stage.last,
        share_embeddings_and_output_weights=shape.tied and groups.pp.size == 1,
        position_embedding_type="none",
        scatter_embedding_sequence_parallel=False,
        pg_collection=collection,
        vp_stage=chunk if shape.vpp > 1 else None,
    )


def transformer_config(shape: Shape, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's settings: no dropout, no fusion that needs CUDA, weights left for the loader to fill."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp if shape.vpp > 1 else None,
        use_cpu_initialization=True,
        perform_initialization=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _layer_spec(stage: Stage, number: int, blocks: dict[int, Block] | None) -> Any:
    """megatron-core's local layer with our norm, linears and attention; an expert block where the layer has one."""
    shape, linears = stage.shape, Linears(stage.groups.tp, stage.shape.sequence_parallel)
    cut = {"tp": linears.tp, "rows": linears.rows}
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    spec.module = Layer
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = ZeroNorm if shape.zero_centred else Norm
    attention = layer.self_attention.submodules
    attention.linear_qkv = partial(Column, **cut)
    attention.linear_proj = partial(Row, **cut)
    attention.core_attention = partial(CoreAttention, windows=shape.windows)
    attention.q_layernorm = attention.k_layernorm = Norm if shape.qk_norm else IdentityOp
    if shape.gated:
        own = DeltaNet if number in shape.recurrent_layers else GatedAttention
        layer.self_attention = ModuleSpec(module=own, params={"shape": shape, "linears": linears})
    if blocks is None:
        mlp = copy.copy(layer.mlp.keywords["submodules"])
        mlp.linear_fc1, mlp.linear_fc2 = partial(Column, **cut), partial(Row, **cut)
        layer.mlp = partial(layer.mlp.func, submodules=mlp)
    else:
        layer.mlp = partial(ExpertMLP, blocks=blocks, rows=stage.rows)
    return spec
