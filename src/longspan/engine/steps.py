"""From a plan to this rank's micro-steps: pack the row, cut it, decode the media, prepare the mixers.

Lazily, one micro-step at a time, so that host memory holds one. Every rank builds the same number and enters every group in
plan order, also groups of other rows (law 2).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longspan.data import Plan, Row, Stream, pack
from longspan.engine.backend import MicroStep
from longspan.engine.batch import Batch
from longspan.engine.checkpoint import agree
from longspan.engine.config import EngineConfig
from longspan.engine.kernels import start_kernel
from longspan.errors import UserError
from longspan.launch import host_threads
from longspan.layout import Mesh, SeqInfo, Shard, shard
from longspan.mixers import AttentionCache, make_mixer, make_transport
from longspan.models.adapter import Adapter, Context
from longspan.models.moe import MoEState
from longspan.models.vision import MediaShard, media_shard, offset_media_rows, plan_media

__all__ = ["Keep", "StepBuilder"]


@dataclass(frozen=True, slots=True)
class Keep:
    """What a call keeps of a micro-step's layers."""

    attention: bool = False  # outputs of the decoder's attention, for selective recomputation
    tower: bool = False  # the same of the vision tower
    router_logits: bool = False  # for the auxiliary losses of mixture-of-experts layers
    routes: bool = False  # the experts used, for outputs


class StepBuilder:
    """Builds micro-steps for one engine."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh, dtype: torch.dtype) -> None:
        self.config = config
        self.adapter = adapter
        self.mesh = mesh
        transport, lean = make_transport(mesh.all, mesh.device), config.recompute == "selective"
        self.mixer = make_mixer(mesh.layout, transport, lean=lean)
        self.kernel = start_kernel(config, adapter, mesh, dtype)

    def steps(self, batch: Batch, plan: Plan, keep: Keep) -> Iterator[MicroStep]:
        """This rank's micro-steps in order. Raises on every rank if one rank cannot read an image."""
        for number, rows in enumerate(plan.micro_steps):
            groups = {row: self.mesh.group(row.start, row.size) for row in rows}
            row = plan.row(number, self.mesh.data_rank)
            any_media = any(batch.media_tokens[sample] for other in rows for sample in other.samples)
            stream = self._pack(batch, row)
            piece = shard(stream, groups[row], self.mesh.device)
            media = self._media(batch, row, stream, piece.info) if any_media else None
            yield MicroStep(
                piece,
                media,
                self._context(piece, keep),
                needed=stream.fields["needed"].index_select(0, piece.info.index),
                drafted=stream.fields["mtp_needed"][:, piece.info.index] if "mtp_needed" in stream.fields else None,
            )

    def _pack(self, batch: Batch, row: Row) -> Stream:
        tensors = [batch.tensors[sample] for sample in row.samples]
        if "media_row" in batch.declared:
            tensors = offset_media_rows(tensors, [sum(batch.media_tokens[sample]) for sample in row.samples])
        pinned = self.mesh.device.type == "cuda" and row.size == 1  # else a rank's part is pinned as it is sent
        return pack(row, tensors, batch.declared, self.mesh.layout.index, pinned=pinned)

    def _media(self, batch: Batch, row: Row, stream: Stream, info: SeqInfo) -> MediaShard:
        samples = [batch.samples[sample] for sample in row.samples]
        advice = "What this call had added is for clear_gradients()"
        with agree(self.mesh, "reading media", raises=UserError, advice=advice):
            plan = plan_media(samples, self.adapter.reader, row.size)
            return media_shard(
                plan,
                samples=samples,
                reader=self.adapter.reader,
                stream=stream,
                info=info,
                device=self.mesh.device,
                threads=host_threads(),
            )

    def _context(self, piece: Shard, keep: Keep) -> Context:
        replay = piece.fields.get("routed_experts")
        routers = MoEState(replay, keep_logits=keep.router_logits, keep_routes=keep.routes or keep.router_logits)
        return Context(
            piece.info,
            self.mixer,
            self.mixer.prepare(piece.info, self.mesh.device),
            self.kernel,
            AttentionCache() if keep.attention else None,
            AttentionCache() if keep.tower else None,
            routers if replay is not None or keep.routes or keep.router_logits else None,
            self.mesh.layout.linear,
        )
