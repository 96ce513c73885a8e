"""Adapter for Qwen3-VL: a vision tower, with DeepStack, in front of a Qwen3 decoder with three-axis RoPE. Qwen3.5's tower
without DeepStack before a hybrid decoder is the same adapter (qwen3_5_vl.py).

Positions [3, L] and `media_row` [L] are made per sample on the CPU, before packing. The tower is never cut: ranks
encode whole images (vision.py), and visual and DeepStack features reach a rank's own tokens through the same rows.
HF's own multimodal forward is bypassed; tower and decoder are called directly with embeddings, positions and
`longspan=Context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from longspan.data.pack import FieldSpec
from longspan.data.sample import Sample
from longspan.layout.shard import Shard
from longspan.layout.travel import sent
from longspan.mixers.linear import DeltaShape
from longspan.models.adapter import Context, Family
from longspan.models.attention_bridge import use_vision_bridge
from longspan.models.checks import check_config
from longspan.models.hf_text import sizes
from longspan.models.images import MediaReader, media_reader
from longspan.models.mtp import MTPHead, mtp_declared, mtp_tensors
from longspan.models.placeholders import MediaIds, match_spans, media_rows, mrope_positions
from longspan.models.qwen3_5_deltanet import prepare_recurrent, recurrent_refusal
from longspan.models.vision import MediaShard, place_rows

__all__ = ["FAMILIES", "VisionAdapter", "qwen3_vl_media", "run_tower", "with_tower"]


@dataclass(slots=True)
class VisionAdapter:
    """A decoder with images and videos. See `Adapter` for the contract of every member."""

    model: PreTrainedModel
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    reader: MediaReader
    ids: MediaIds
    deepstack: bool  # features of inner tower layers are added to the first decoder layers
    windowed: bool = False
    recurrent: bool = False
    linear_shape: DeltaShape | None = None  # of its recurrent layers
    mtp: MTPHead | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def units(self) -> list[nn.Module]:
        return [*self.model.model.language_model.layers, *self.model.model.visual.blocks]

    def parts(self) -> dict[str, tuple[str, ...]]:
        tower, text = "model.visual.", "model.language_model."
        return {
            "vision": (f"{tower}patch_embed.", f"{tower}pos_embed.", f"{tower}blocks."),
            "merger": (f"{tower}merger.", *([f"{tower}deepstack_merger_list."] if self.deepstack else [])),
            "language": (f"{text}layers.", f"{text}norm.", "lm_head."),
            "embeddings": (f"{text}embed_tokens.",),
        }

    def declared(self) -> dict[str, FieldSpec]:
        own = {"position": FieldSpec(torch.int64, 0, (3,)), "media_row": FieldSpec(torch.int64, -1, ())}
        return own | mtp_declared(self.mtp, media=True)

    def sample_tensors(self, sample: Sample) -> dict[str, Tensor]:
        spans = match_spans(sample, self.reader, self.ids)
        length = len(sample.input_ids)
        rows = media_rows(length, spans)
        return {"position": mrope_positions(length, spans), "media_row": rows} | mtp_tensors(self.mtp, sample, rows)

    def media_tokens(self, sample: Sample) -> tuple[int, ...]:
        counts = [0] * len(sample.media)
        for span in match_spans(sample, self.reader, self.ids):
            counts[span.item] += span.length
        return tuple(counts)

    def hidden(self, shard: Shard, media: MediaShard | None, context: Context) -> Tensor:
        embeds_TE = self.model.get_input_embeddings()(shard.fields["input_ids"])
        inner: dict[str, Any] = {}  # Any: what DeepStack adds to the decoder's call
        if media is not None:
            out = run_tower(self.model.model.visual, media, context)
            features = [out.pooler_output, *(out.deepstack_features if self.deepstack else ())]
            placed, *deepstack = place_rows(torch.cat(features, 1), media).chunk(len(features), 1)
            embeds_TE = embeds_TE.index_copy(0, media.positions, placed.to(embeds_TE.dtype))
            if self.deepstack:
                mask = (shard.fields["media_row"] >= 0)[None]
                inner = {"visual_pos_masks": mask, "deepstack_visual_embeds": deepstack}
            if self.mtp is not None:
                self.mtp.see(out.pooler_output, media, context)
        if self.linear_shape is not None:
            prepare_recurrent(context, embeds_TE)
        out = self.model.model.language_model(
            inputs_embeds=embeds_TE[None],
            position_ids=shard.fields["position"][:, None],  # [3, 1, T_local]; never read as packed text positions (D3)
            use_cache=False,
            longspan=context,
            **inner,
        )
        return out.last_hidden_state[0]

    def linear_refusal(self, how: str, size: int) -> str | None:
        return recurrent_refusal(how, size, self.linear_shape, self.family)

    def head(self) -> tuple[Tensor, Tensor | None, float | None]:
        return self.model.lm_head.weight, self.model.lm_head.bias, None


def run_tower(tower: PreTrainedModel, media: MediaShard, context: Context) -> BaseModelOutputWithPooling:
    """A Qwen-VL tower on this rank's images: `pooler_output` [n, E]. Index tensors come from the CPU: no sync."""
    device = media.pixels.device
    indices, weights = get_vision_interpolation_indices_and_weights(
        media.grid,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    lengths = (media.grid[:, 1] * media.grid[:, 2]).repeat_interleave(media.grid[:, 0])
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    made = {
        "interp_indices": indices,
        "interp_weights": weights,
        "position_ids": get_vision_position_ids(media.grid, tower.spatial_merge_size),
        "cu_seqlens": cu_seqlens,
    }
    trained = any(parameter.requires_grad for parameter in tower.parameters())
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        return tower(
            media.pixels,  # the patch embedding casts to the weights' dtype
            grid_thw=media.grid,
            max_seqlen=int(lengths.max()),
            longspan=context,
            **{name: sent(tensor, device) for name, tensor in made.items()},
        )


def qwen3_vl_adapter(model: PreTrainedModel, folder: str | None) -> VisionAdapter:
    return VisionAdapter(model, **sizes(model), **with_tower(model, folder), deepstack=True)


def with_tower(model: PreTrainedModel, folder: str | None) -> dict[str, Any]:
    """Check the tower, send its attention over the bridge, and say how its media are read."""
    check_config(model.config.vision_config)
    use_vision_bridge(model.model.visual)
    reader, ids = qwen3_vl_media(model.config, folder)
    return {"reader": reader, "ids": ids}


def qwen3_vl_media(config: PretrainedConfig, folder: str | None) -> tuple[MediaReader, MediaIds]:
    """How media of this family are read, and their ids; needs no weights."""
    ids = MediaIds(
        config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id
    )
    return media_reader(config.vision_config, folder), ids


TOWER = ("Model", "PatchEmbed", "RotaryEmbedding", "PatchMerger", "Attention", "Block", "MLP")
TEXT = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")


def _family(prefix: str, *more: str) -> Family:
    names = [f"{prefix}ForConditionalGeneration", f"{prefix}Model", *[f"{prefix}Vision{part}" for part in TOWER]]
    names += [f"{prefix}Text{part}" for part in (*TEXT, *more)]
    return Family(build=qwen3_vl_adapter, modules=frozenset(names), media=qwen3_vl_media)


FAMILIES = {
    "Qwen3VLForConditionalGeneration": _family("Qwen3VL"),
    "Qwen3VLMoeForConditionalGeneration": _family("Qwen3VLMoe", "SparseMoeBlock", "TopKRouter", "Experts"),
}
