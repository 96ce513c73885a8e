"""The sizes of a model and of its layout as the megatron backend needs them, and everything it refuses, by name.

Pure: reads a Hugging Face model and the settings, builds nothing.
"""

from dataclasses import dataclass

import torch

from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.megatron.options import refuse_options
from longspan.errors import UserError
from longspan.layout import Layout
from longspan.mixers.linear import DeltaShape, heads_refusal
from longspan.models.adapter import Adapter
from longspan.models.experts import EXPERT_CLASSES, expert_modules

__all__ = ["Shape", "divides", "own_delta", "shape_of"]

FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)

HYBRID = ("Qwen3Next", "Qwen3_5")


@dataclass(frozen=True, slots=True)
class Shape:
    """One model under one layout."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    tied: bool
    vision: bool
    deepstack: bool
    axes: bool  # text positions too have three axes
    zero_centred: bool  # norms multiply by 1 + weight
    gated: bool  # full attention with an output gate
    recurrent_layers: tuple[int, ...]
    delta: DeltaShape | None  # of the recurrent layers, all heads
    conv_size: int
    interleaved_delta: bool  # its projections go by key head
    windows: tuple[int | None, ...]  # by layer
    expert_layers: tuple[int, ...]
    tp: int
    pp: int
    vpp: int
    etp: int  # 1, or tp
    sequence_parallel: bool
    dtype: torch.dtype

    @property
    def padded_vocab(self) -> int:
        """The vocabulary rounded up to equal shards; rows past it are zero and never read."""
        return -(-self.vocab_size // self.tp) * self.tp

    @property
    def num_stages(self) -> int:
        """Virtual stages: number v is chunk v // pp of pipeline rank v % pp."""
        return self.pp * self.vpp

    def stage(self, number: int) -> range:
        """The layers of a virtual stage, from 0."""
        size = self.num_layers // self.num_stages
        return range(number * size, (number + 1) * size)


def shape_of(config: EngineConfig, adapter: Adapter, layout: Layout) -> Shape:
    """Reads the model; UserError for anything that cannot be honoured."""
    _refuse_settings(config, layout)
    if adapter.family not in FAMILIES:
        raise UserError(f"backend='megatron' has no weight table for {adapter.family}. Known: {', '.join(FAMILIES)}")
    text = adapter.model.config.get_text_config()
    vision = adapter.reader is not None
    layers = (adapter.model.model.language_model if vision else adapter.model.model).layers
    hybrid = adapter.family.startswith(HYBRID)
    recurrent = tuple(n for n, layer in enumerate(layers) if "linear_attn" in dict(layer.named_children()))
    attention = next(layer.self_attn for n, layer in enumerate(layers) if n not in recurrent)
    delta = layers[recurrent[0]].linear_attn if recurrent else None
    experts = tuple(
        n for n, layer in enumerate(layers) if any(type(m).__name__ in EXPERT_CLASSES for m in layer.modules())
    )
    names = {name for layer in layers for name, _ in layer.named_parameters()}
    if "self_attn.o_proj.bias" in names or "mlp.down_proj.bias" in names:
        raise UserError(
            f"{adapter.family} with biases in o_proj or mlp is not built for backend='megatron'. Use backend='fsdp'"
        )
    if text.hidden_act != "silu":
        raise UserError(f"hidden_act={text.hidden_act!r} is not built for backend='megatron', which runs 'silu'")
    shape = Shape(
        vocab_size=adapter.model.get_input_embeddings().weight.shape[0],
        hidden_size=adapter.hidden_size,
        num_layers=adapter.num_layers,
        num_heads=adapter.num_heads,
        num_kv_heads=adapter.num_kv_heads,
        head_dim=adapter.head_dim,
        ffn_size=text.to_dict().get("intermediate_size") or text.moe_intermediate_size,
        norm_eps=text.rms_norm_eps,
        qk_norm="self_attn.q_norm.weight" in names,
        qkv_bias=attention.q_proj.bias is not None,
        tied=adapter.model.get_output_embeddings().weight is adapter.model.get_input_embeddings().weight,
        vision=vision,
        deepstack=vision and adapter.family.startswith("Qwen3VL"),
        axes=adapter.family.startswith("Qwen3_5"),
        zero_centred=hybrid,
        gated=hybrid,
        recurrent_layers=recurrent,
        delta=None if delta is None else delta.shape,
        conv_size=0 if delta is None else delta.conv1d.weight.shape[-1],
        interleaved_delta=adapter.family.startswith("Qwen3Next"),
        windows=_windows(text.to_dict(), adapter.num_layers),
        expert_layers=experts,
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        etp=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        dtype=DTYPES[config.dtype],
    )
    _refuse_sizes(adapter, layout, shape, config.mtp_steps)
    return shape


def _windows(text: dict[str, object], layers: int) -> tuple[int | None, ...]:
    """By layer type, or (Mistral) one window for all."""
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    assert window is None or isinstance(window, int)
    if not isinstance(kinds, list):
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_settings(config: EngineConfig, layout: Layout) -> None:
    refuse_options(config.megatron)
    for wanted, what, way_out in (
        (config.compile, "compile=True", "Set compile=False or use backend='fsdp'"),
        (bool(config.offload), f"offload={config.offload}", "Leave offload empty"),
    ):
        if wanted:
            raise UserError(f"{what} is not built for backend='megatron'. {way_out}")


def _refuse_sizes(adapter: Adapter, layout: Layout, shape: Shape, mtp_steps: int) -> None:
    if shape.num_layers % shape.num_stages:
        raise UserError(_stages_refusal(layout, shape.num_layers))
    if len(shape.expert_layers) < shape.num_layers:
        divides("tp", layout.tp, shape.ffn_size, "MLP columns")
    _refuse_experts(adapter, layout)
    if mtp_steps and layout.pp > 1 and (shape.vision or not shape.tied):
        needs = "the vision tower" if shape.vision else "the embeddings, which are not tied to the output layer here"
        raise UserError(
            f"mtp_steps={mtp_steps} with pp={layout.pp}: the multi-token-prediction head on the last stage reads {needs}, "
            "on the first. Set pp=1 or mtp_steps=0"
        )
    if shape.delta is not None:
        divides("tp", layout.tp, shape.delta.key_heads, "key heads of its recurrent layers")
        own = own_delta(shape.delta, layout.tp)
        if layout.linear == "heads" and (reason := heads_refusal(layout.cp, own)):
            raise UserError(f"at tp={layout.tp} {reason}")
    if shape.deepstack and shape.num_stages > 1:
        deepest = len(adapter.model.config.vision_config.deepstack_visual_indexes)
        if deepest > len(shape.stage(0)):
            raise UserError(
                f"pp * vpp = {layout.pp} * {layout.vpp} cuts the first {deepest} layers, which take DeepStack features. "
                f"Use pp * vpp of at most {shape.num_layers // deepest}"
            )


def _refuse_experts(adapter: Adapter, layout: Layout) -> None:
    """Experts spread over data ranks, evenly. A dense model has none: ep2 is dp2 then."""
    data = layout.dp * layout.cp
    blocks = expert_modules(adapter.model).values()
    counts = {module.num_experts for module in blocks}
    if layout.etp > 1 and not counts:
        raise UserError(f"etp={layout.etp} cuts experts, and {adapter.family} has none. Set etp=1")
    if layout.etp not in (1, layout.tp):
        raise UserError(
            f"etp={layout.etp} must be 1 or tp={layout.tp}: the columns of an expert lie over its tensor-parallel ranks. "
            f"Use etp in ({', '.join(map(str, sorted({1, layout.tp})))})"
        )
    for module in blocks:
        divides("etp", layout.etp, module.down_proj.shape[-1], "columns of an expert")
    fitting = [n for n in range(1, data + 1) if data % n == 0 and not any(count % n for count in counts)]
    if layout.ep not in fitting:
        what = f" and the model's {max(counts)} experts" if counts else ""
        raise UserError(
            f"ep={layout.ep} must divide dp * cp = {layout.dp} * {layout.cp} = {data}{what}: this backend spreads experts "
            f"over data ranks, and tensor-parallel ranks repeat or (etp) share each. Use ep in ({', '.join(map(str, fitting))}) or "
            "change dp or cp"
        )


def own_delta(whole: DeltaShape, tp: int) -> DeltaShape:
    """A tensor-parallel rank's share of the heads of recurrent layers."""
    return DeltaShape(whole.key_heads // tp, whole.value_heads // tp, whole.key_dim, whole.value_dim)


def _stages_refusal(layout: Layout, layers: int) -> str:
    """The message for pp * vpp that does not divide the layers, with the sizes that work."""
    counts = [n for n in range(1, layers + 1) if layers % n == 0]
    if layout.vpp == 1:
        return f"pp={layout.pp} must divide the model's {layers} layers. Use pp in ({', '.join(map(str, counts))})"
    chunks = [count // layout.pp for count in counts if count % layout.pp == 0]
    fitting = (
        f"vpp in ({', '.join(map(str, chunks))})" if chunks else f"pp in ({', '.join(map(str, counts))}) with vpp=1"
    )
    return f"pp * vpp = {layout.pp} * {layout.vpp} must divide the model's {layers} layers. Use {fitting}"


def divides(axis: str, size: int, total: int, what: str) -> None:
    """Raises UserError with the sizes that work."""
    if total % size:
        fitting = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise UserError(f"{axis}={size} must divide the model's {total} {what}. Use {axis} in ({fitting})")
