"""Hybrid: Ulysses inside small groups, a ring (or gather) across them (USP, Fang & Zhao 2024).

rank = ring_index * u + ulysses_index. The u neighbours swap tokens for heads; the union of their zigzag chunks out of
N ranks is rank ring_index's part of a zigzag over N / u ranks once it is sorted, and likewise for contiguous runs. So
the inner mixer sees an ordinary layout of N / u ranks. Each ring hop carries 1/u of the heads of u times the tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.layout.resolve import ulysses_refusal
from longspan.layout.seqinfo import SeqInfo, make_seqinfo
from longspan.mixers.attention import Saved, SizeCheck
from longspan.mixers.kernels import Kernel
from longspan.mixers.local import Local, LocalPrepared
from longspan.mixers.ring import Ring
from longspan.mixers.ulysses import Ulysses, UlyssesPrepared, exchange
from longspan.mixers.ulysses_overlap import OverlappedPrepared, OverlappedUlysses

__all__ = ["Hybrid"]


@dataclass(frozen=True, slots=True)
class Hybrid:
    """ulysses * ring ranks. A smaller dynamic group of `size` ranks has gcd(ulysses, size) of them swap heads."""

    ulysses: int
    swap: Ulysses | OverlappedUlysses = field(default_factory=Ulysses)
    ring: Ring = field(default_factory=Ring)
    name: str = "hybrid"

    def sizes(self, heads: int, kv_heads: int) -> SizeCheck:
        """Every size works once the ulysses part divides the query heads."""
        return lambda size: ulysses_refusal(self.ulysses, heads) if size > 1 else None

    def prepare(self, info: SeqInfo, device: torch.device) -> OverlappedPrepared | UlyssesPrepared | LocalPrepared:
        """The exchange of this rank's neighbours around the ring of its column."""
        if info.size == 1:
            return Local().prepare(info, device)
        assert info.group.parts is not None, "a hybrid row needs a group with parts: Mesh.group of a hybrid layout"
        neighbours, column = info.group.parts
        outer = make_seqinfo(info.kind, info.cu_seqlens, column)
        first = info.rank - neighbours.rank
        indices = info.indices[first : first + neighbours.size]
        return self.swap.around(exchange(neighbours, indices, outer.index, self.ring.prepare(outer, device), device))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: Any,  # what `prepare` gave
        *,
        scale: float,
        kernel: Kernel,
        window: int | None = None,
        sink: Tensor | None = None,
        saved: Saved | None = None,
    ) -> Tensor:
        """See attention.Mixer."""
        return self.swap.attend(q, k, v, prepared, scale=scale, kernel=kernel, window=window, sink=sink, saved=saved)
