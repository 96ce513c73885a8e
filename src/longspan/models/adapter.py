"""What the engine must know of one model family (`Adapter`), and what a model's layers get from the engine
(`Context`).

`Context` travels as the Hugging Face forward keyword `longspan=` to every attention layer, vision layer and expert
block: the boundaries of the packed row are explicit data, never guessed from masks or positions. An adapter never
patches a class of `transformers`: it calls the base decoder with embeddings and positions made here, and may
replace a module *instance* while building. T_local is this rank's part of one packed row; the batch dim of every HF
call is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from longspan.data.pack import FieldSpec
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.layout.seqinfo import SeqInfo
from longspan.layout.shard import Shard
from longspan.mixers.attention import AttentionCache, Saved

if TYPE_CHECKING:
    from longspan.mixers.attention import Mixer
    from longspan.mixers.kernels import Kernel
    from longspan.models.images import MediaReader
    from longspan.models.moe import MoEState
    from longspan.models.mtp import MTPHead
    from longspan.models.placeholders import MediaIds
    from longspan.models.vision import MediaShard

__all__ = ["Adapter", "Context", "Family", "read_samples", "tower_blocks", "tower_trains"]


@dataclass(slots=True)
class Context:
    """One micro-step's sequence facts for the layers of one rank. Made by the engine, read by the bridge."""

    info: SeqInfo
    mixer: Mixer
    prepared: Any  # what `mixer` prepared for this row, on the device; Any: each mixer takes back only its own
    kernel: Kernel
    cache: AttentionCache | None = None  # given: selective recomputation of decoder layers, attention runs once
    tower_cache: AttentionCache | None = None  # the same of the vision tower's blocks
    moe: MoEState | None = None  # what routers record or replay; None: nothing
    linear: str = "state"  # how recurrent layers cross ranks: Layout.linear, resolved
    scratch: dict[str, object] = field(default_factory=dict)  # what a family keeps for one micro-step: "linear"

    def slot(self, layer: nn.Module) -> Saved | None:
        """The place where an attention layer of the decoder keeps (out, lse) between forward and recomputation."""
        return None if self.cache is None else self.cache.slot(id(layer))

    def tower_slot(self, layer: nn.Module) -> Saved | None:
        """The same for an attention layer of the vision tower."""
        return None if self.tower_cache is None else self.tower_cache.slot(id(layer))


class Adapter(Protocol):
    """One model family. `model.named_parameters()` are the public parameter names."""

    model: PreTrainedModel
    family: str  # architecture class name
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    recurrent: bool  # has layers that need token order: `contiguous` only
    windowed: bool  # has sliding-window layers
    reader: MediaReader | None  # None: no vision tower
    ids: MediaIds | None
    mtp: MTPHead | None  # multi-token-prediction head
    tokenizer: PreTrainedTokenizerBase | None

    def units(self) -> list[nn.Module]:
        """Modules to shard, compile and checkpoint one by one: decoder layers and vision blocks."""
        ...

    def parts(self) -> dict[str, tuple[str, ...]]:
        """Part name ("vision", "merger", "language", "embeddings") to the prefixes of its parameters' names."""
        ...

    def declared(self) -> dict[str, FieldSpec]:
        """The stream fields that `sample_tensors` makes."""
        ...

    def sample_tensors(self, sample: Sample) -> dict[str, Tensor]:
        """CPU fields [..., L] of one sample: "position" ([L] or [3, L]); with a vision tower also "media_row" [L],
        relative to the sample's first visual token, -1 = text."""
        ...

    def media_tokens(self, sample: Sample) -> tuple[int, ...]:
        """Visual tokens of each media item; a UserError where placeholders and grids disagree."""
        ...

    def hidden(self, shard: Shard, media: MediaShard | None, context: Context) -> Tensor:
        """[T_local, E], final norm included. `media` is None only if no rank has media in this micro-step."""
        ...

    def linear_refusal(self, how: str, size: int) -> str | None:
        """Why recurrent layers cannot cross `size` ranks by `how`; None when they can, or there are none."""
        ...

    def head(self) -> tuple[Tensor, Tensor | None, float | None]:
        """Live parameters of the LM head: weight [V, E], bias [V] or None, final soft cap or None."""
        ...


def read_samples(adapter: Adapter, samples: Sequence[Sample]) -> tuple[list[dict[str, Tensor]], list[tuple[int, ...]]]:
    """`sample_tensors` and `media_tokens` of a batch; a UserError names the sample by its number in the batch."""
    tensors, tokens = [], []
    for number, sample in enumerate(samples):
        try:
            tensors.append(adapter.sample_tensors(sample))
            tokens.append(adapter.media_tokens(sample))
        except UserError as error:
            raise UserError(f"sample {number}: {error}") from error
    return tensors, tokens


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is loaded and which module classes it may contain."""

    build: Callable[[PreTrainedModel, str | None], Adapter]  # (model, folder or None)
    modules: frozenset[str]  # class names; anything else in the module tree is refused
    media: Callable[[PretrainedConfig, str | None], tuple[MediaReader, MediaIds]] | None = None  # a model with a tower


def tower_blocks(adapter: Adapter) -> list[nn.Module]:
    """The units that are blocks of a vision tower."""
    names = {module: f"{name}." for name, module in adapter.model.named_modules()}
    return [unit for unit in adapter.units() if names[unit].startswith(adapter.parts()["vision"])]


def tower_trains(adapter: Adapter) -> bool:
    """Whether any parameter of the tower's blocks, or of what stands before them, gets a gradient."""
    tower = adapter.parts()["vision"]
    return any(name.startswith(tower) and p.requires_grad for name, p in adapter.model.named_parameters())
