"""Refusals at build: what a model may contain and which of its settings would make results depend on the layout.

Every module class in the tree must be known: per-token layers of torch, activations, and the classes that the
family names. A layer that mixes tokens in a way we have no rule for (a convolution, a recurrence, another
attention) is therefore refused by name instead of silently seeing 1/CP of the sequence (bugs D12).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS

from longspan.errors import UserError

__all__ = ["check_config", "check_modules", "check_tie", "unknown_architecture"]

# Work on each token alone. Conv3d is the patch embedding of the vision towers: kernel = stride, one patch in, one out.
PER_TOKEN = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList, nn.Identity, nn.Conv3d, nn.SiLU, nn.GELU, nn.ReLU)
LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
# Recompute their frequencies from the largest position they see, which differs between ranks.
LIVE_ROPE = ("dynamic", "longrope")


def unknown_architecture(name: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"architecture {name!r} is not known to be exact under packing and CP. Known: {', '.join(sorted(known))}"
    )


def check_modules(model: PreTrainedModel, allowed: frozenset[str]) -> None:
    """Every module of the tree is per-token or named by the family."""
    activations = {(c[0] if isinstance(c, tuple) else c).__name__ for c in ACT2CLS.values()}
    for name, module in model.named_modules():
        kind = type(module)
        known = kind.__name__ in allowed or kind in PER_TOKEN or kind.__name__ in activations
        known = known or (isinstance(module, nn.Dropout) and module.p == 0)
        if not known or (isinstance(module, nn.Conv3d) and module.kernel_size != module.stride):
            raise UserError(
                f"{type(model).__name__}: layer {name!r} is a {kind.__name__}, which has no rule for packing and CP. "
                f"Known in this family: {', '.join(sorted(allowed))}"
            )


def check_config(config: PretrainedConfig, layer_types: tuple[str, ...] = LAYER_TYPES) -> None:
    """Settings of one (text or vision) config that cannot be honoured at every layout."""
    values = config.to_dict()
    for key, value in values.items():
        if key.endswith(("dropout", "pdrop", "dropout_rate")) and isinstance(value, float | int) and value:
            raise UserError(f"{key}={value} draws noise that depends on the layout; set it to 0 in the model's config")
    unknown = sorted(set(values.get("layer_types") or ()) - set(layer_types))
    if unknown:
        raise UserError(f"layer_types {unknown} of {config.model_type} are not supported; known: {list(layer_types)}")
    for rope in _ropes(values.get("rope_parameters")):
        if rope.get("rope_type") in LIVE_ROPE:
            raise UserError(
                f"rope_type={rope['rope_type']!r} of {config.model_type} depends on the longest sequence a rank sees; "
                "use a static one (default, linear, llama3, yarn)"
            )
    if values.get("use_bidirectional_attention"):
        raise UserError(f"use_bidirectional_attention of {config.model_type}: the mixers are causal")
    if values.get("attn_logit_softcapping") is not None:
        raise UserError(f"attn_logit_softcapping={values['attn_logit_softcapping']} is not supported by the mixers")


def check_tie(model: PreTrainedModel) -> None:
    """The config's tie holds in storage (bugs K1)."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is table.weight
    if bool(model.config.tie_word_embeddings) != tied:  # of the outermost config, as transformers ties
        raise UserError(
            f"tie_word_embeddings={model.config.tie_word_embeddings} but head and embeddings "
            f"{'share' if tied else 'do not share'} storage; fix the config or the checkpoint"
        )


def _ropes(rope: object) -> list[dict[str, object]]:
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
