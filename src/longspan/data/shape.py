"""ModelShape: the few numbers of a model that time and memory depend on, read from its Hugging Face config."""

from collections.abc import Mapping
from dataclasses import dataclass

from longspan.errors import UserError

NORMED = ("qwen3", "olmo", "gemma3", "glm4")  # model types with RMSNorm on q and k
Config = Mapping[str, object]  # PretrainedConfig.to_dict()


@dataclass(frozen=True, slots=True)
class VisionShape:
    """A ViT whose `merge` patches become one visual token."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    merge: int = 4  # patches a visual token
    patch_values: int = 1536  # numbers in one patch of pixels
    gated: bool = False  # three MLP matrices, not two
    deepstack: int = 0  # layers whose features go into the decoder as well, each through a merger of its own


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one decoder. Counts are per model; a layer is softmax or linear attention plus an MLP or experts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width of a dense MLP (gated: three matrices)
    vocab: int
    tied: bool = False
    window: int | None = None  # of the windowed layers
    windowed_layers: int = 0
    linear_layers: int = 0  # Gated DeltaNet layers among `layers`
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_head_dim: int = 0
    normed_queries: bool = True  # RMSNorm on q and k, as Qwen3 has
    gated_attention: bool = False  # a query projection of twice the width
    sinks: bool = False  # a logit more a query head, of value 0
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0  # of an MoE model: layers with a dense MLP
    vision: VisionShape | None = None

    @property
    def attention_layers(self) -> int:
        return self.layers - self.linear_layers

    @property
    def attention_weights(self) -> int:
        """Of one softmax layer."""
        queries = self.heads * self.head_dim
        return self.hidden * (queries * (3 if self.gated_attention else 2) + 2 * self.kv_heads * self.head_dim)

    @property
    def linear_weights(self) -> int:
        """Of one Gated DeltaNet layer: q, k, v, z, output, and the two gates."""
        keys = self.linear_key_heads * self.linear_head_dim
        values = self.linear_value_heads * self.linear_head_dim
        return self.hidden * (2 * keys + 3 * values + 2 * self.linear_value_heads)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def mlp_weights(self, experts: int) -> int:
        """Of all layers' MLPs, `experts` routed experts counted: experts_per_token for time, experts for memory."""
        routed = self.moe_layers * (experts * 3 * self.expert_mlp + 3 * self.shared_mlp + self.experts)
        return self.hidden * (routed + (self.layers - self.moe_layers) * 3 * self.mlp)

    @property
    def active_weights(self) -> int:
        """Matrix weights that one token meets in the decoder layers."""
        mixers = self.attention_layers * self.attention_weights + self.linear_layers * self.linear_weights
        return mixers + self.mlp_weights(self.experts_per_token)

    @property
    def vision_weights(self) -> int:
        vision = self.vision
        if vision is None:
            return 0
        block = vision.hidden * (4 * vision.hidden + (3 if vision.gated else 2) * vision.mlp)
        merged = vision.hidden * vision.merge
        mergers = (1 + vision.deepstack) * merged * (merged + self.hidden)
        return vision.layers * block + vision.patch_values * vision.hidden + mergers

    @property
    def embedding_weights(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weights(self) -> int:
        """All weights, norms and biases left out (below 0.1 %)."""
        mixers = self.attention_layers * self.attention_weights + self.linear_layers * self.linear_weights
        return mixers + self.mlp_weights(self.experts) + self.embedding_weights + self.vision_weights

    @staticmethod
    def from_config(config: Config) -> "ModelShape":
        """From `PretrainedConfig.to_dict()`; a VLM's text and vision parts are found inside."""
        nested = config.get("text_config")
        text: Config = nested if isinstance(nested, dict) else config
        hidden, heads = _number(text, "hidden_size", least=1), _number(text, "num_attention_heads", least=1)
        layers = _number(text, "num_hidden_layers", least=1)
        kinds = text.get("layer_types")
        kinds = list(kinds) if isinstance(kinds, list) else []
        experts = _number(text, "num_experts", _number(text, "num_local_experts", 0))
        dense = text.get("mlp_only_layers")
        window = text.get("sliding_window")
        windowed = kinds.count("sliding_attention") if kinds else (layers if isinstance(window, int) else 0)
        mlp = _number(text, "intermediate_size", 0)
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        return ModelShape(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=_number(text, "num_key_value_heads", heads, least=1),
            head_dim=_number(text, "head_dim", hidden // heads, least=1),
            mlp=mlp,
            vocab=_number(text, "vocab_size", least=1),
            tied=tied,
            window=window if isinstance(window, int) and windowed else None,
            windowed_layers=windowed if isinstance(window, int) else 0,
            linear_layers=kinds.count("linear_attention"),
            linear_key_heads=_number(text, "linear_num_key_heads", 0),
            linear_value_heads=_number(text, "linear_num_value_heads", 0),
            linear_head_dim=_number(text, "linear_value_head_dim", 0),
            normed_queries=str(text.get("model_type", "qwen3")).startswith(NORMED),
            gated_attention=bool(text.get("attn_output_gate", False)),
            sinks=text.get("model_type") == "gpt_oss",
            experts=experts,
            experts_per_token=_number(text, "num_experts_per_tok", 0) if experts else 0,
            expert_mlp=_number(text, "moe_intermediate_size", mlp) if experts else 0,
            shared_mlp=_number(text, "shared_expert_intermediate_size", 0) if experts else 0,
            dense_layers=len(dense) if experts and isinstance(dense, list) else 0,
            vision=_vision(config),
        )


def _vision(config: Config) -> VisionShape | None:
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        return None
    deepstack = tower.get("deepstack_visual_indexes")
    patch, frames = _number(tower, "patch_size", 16), _number(tower, "temporal_patch_size", 2)
    return VisionShape(
        hidden=_number(tower, "hidden_size"),
        layers=_number(tower, "depth", 0) or _number(tower, "num_hidden_layers", 0),
        heads=_number(tower, "num_heads", 0) or _number(tower, "num_attention_heads", 1),
        mlp=_number(tower, "intermediate_size"),
        merge=_number(tower, "spatial_merge_size", 1) ** 2,
        patch_values=3 * patch * patch * frames,
        gated=tower.get("hidden_act") == "silu",
        deepstack=len(deepstack) if isinstance(deepstack, list) else 0,
    )


def _number(config: Config, name: str, default: int | None = None, *, least: int = 0) -> int:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < least:
            raise UserError(f"the model config has {name}={value}, which must be at least {least}. Correct config.json")
        return value
    if default is None:
        raise UserError(
            f"the model config has no {name}: longspan plan cannot tell what the model costs. It has "
            f"{sorted(config)[:12]}..."
        )
    return default
