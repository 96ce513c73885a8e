"""Adapter for Qwen3.5 with its vision tower: Qwen3-VL's tower without DeepStack, in front of the hybrid decoder of
qwen3_5.py.

Positions [3, L] and `media_row` [L] are made per sample on the CPU, before packing, by Qwen3-VL's rules (videos are
frames with timestamps between them). Recurrent: `contiguous` only. HF's own multimodal forward is bypassed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longspan.data.pack import FieldSpec
from longspan.data.sample import Sample
from longspan.layout.shard import Shard
from longspan.mixers.linear import DeltaShape, heads_refusal
from longspan.models.adapter import Context, Family
from longspan.models.attention_bridge import use_vision_bridge
from longspan.models.checks import check_config
from longspan.models.images import MediaReader
from longspan.models.mtp import MTPHead, make_mtp_head, mtp_declared, mtp_tensors
from longspan.models.placeholders import MediaIds, match_spans, media_rows, mrope_positions
from longspan.models.qwen3_5 import EXPERTS, SHARED, prepare_recurrent
from longspan.models.qwen3_5_deltanet import replace_deltanets
from longspan.models.qwen3_vl import TOWER, qwen3_vl_media, run_tower
from longspan.models.vision import MediaShard, place_rows

__all__ = ["FAMILIES", "Qwen35VLAdapter"]


@dataclass(slots=True)
class Qwen35VLAdapter:
    """Qwen3.5 with images and videos. See `Adapter` for the contract of every member."""

    model: PreTrainedModel
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_shape: DeltaShape
    reader: MediaReader
    ids: MediaIds
    windowed: bool = False
    recurrent: bool = True
    mtp: MTPHead | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def units(self) -> list[nn.Module]:
        return [*self.model.model.language_model.layers, *self.model.model.visual.blocks]

    def parts(self) -> dict[str, tuple[str, ...]]:
        tower, text = "model.visual.", "model.language_model."
        return {
            "vision": (f"{tower}patch_embed.", f"{tower}pos_embed.", f"{tower}blocks."),
            "merger": (f"{tower}merger.",),
            "language": (f"{text}layers.", f"{text}norm.", "lm_head."),
            "embeddings": (f"{text}embed_tokens.",),
        }

    def declared(self) -> dict[str, FieldSpec]:
        return {
            "position": FieldSpec(torch.int64, 0, (3,)),
            "media_row": FieldSpec(torch.int64, -1, ()),
        } | mtp_declared(self.mtp, media=True)

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

    def linear_refusal(self, how: str, size: int) -> str | None:
        return heads_refusal(size, self.linear_shape) if how == "heads" else None

    def hidden(self, shard: Shard, media: MediaShard | None, context: Context) -> Tensor:
        embeds_TE = self.model.get_input_embeddings()(shard.fields["input_ids"])
        if media is not None:
            features = run_tower(self.model.model.visual, media, context).pooler_output
            placed = place_rows(features, media)
            embeds_TE = embeds_TE.index_copy(0, media.positions, placed.to(embeds_TE.dtype))
            if self.mtp is not None:
                self.mtp.see(features, media, context)
        prepare_recurrent(context, embeds_TE)
        out = self.model.model.language_model(
            inputs_embeds=embeds_TE[None],
            position_ids=shard.fields["position"][:, None],  # [3, 1, T_local]; never read as packed text positions (D3)
            use_cache=False,
            longspan=context,
        )
        return out.last_hidden_state[0]

    def head(self) -> tuple[Tensor, Tensor | None, float | None]:
        return self.model.lm_head.weight, self.model.lm_head.bias, None


def qwen3_5_vl_adapter(model: PreTrainedModel, folder: str | None) -> Qwen35VLAdapter:
    config = model.config
    text = config.text_config
    check_config(config.vision_config)
    use_vision_bridge(model.model.visual)
    reader, ids = qwen3_vl_media(config, folder)
    return Qwen35VLAdapter(
        model=model,
        family=type(model).__name__,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        linear_shape=replace_deltanets(model),
        mtp=make_mtp_head(model, model.model.language_model, folder),
        reader=reader,
        ids=ids,
    )


def _family(prefix: str, *more: str) -> Family:
    names = ["ForConditionalGeneration", "Model", "TextModel", "TextRotaryEmbedding", *SHARED, *more]
    names += [f"Vision{part}" for part in TOWER]
    return Family(
        build=qwen3_5_vl_adapter,
        media=qwen3_vl_media,
        modules=frozenset(["Conv1d"] + [f"{prefix}{name}" for name in names]),
    )


FAMILIES = {
    "Qwen3_5ForConditionalGeneration": _family("Qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": _family("Qwen3_5Moe", *EXPERTS),
}
