"""The backend protocol: what owns parameters, gradients and the optimizer. Two implementations: fsdp/ and megatron/.

The engine hands a backend finished micro-steps (shards with their context) and a program (what to compute from hidden
states). A backend knows nothing of samples, normalisation, plans or loss terms.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from longspan.engine.optim import SGD, AdamW
from longspan.layout import Shard
from longspan.models.adapter import Context
from longspan.models.lora import Routing
from longspan.models.vision import MediaShard
from longspan.objective import TeacherHead

__all__ = ["Backend", "Head", "Held", "MicroStep", "Program"]


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer's live parameters: weight [V, E], bias [V] or None, softcap (logits = c * tanh(logits / c)) or None."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    drafts: Callable[[Tensor], list[Tensor]] | None = None  # hidden [T, E] -> hidden of each MTP step
    draft_weight: Tensor | None = None  # `weight`, detached unless the MTP head is joint


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One forward (and backward) of the model on this rank: its tokens, the media it encodes, and how tokens meet."""

    shard: Shard
    media: MediaShard | None  # None: no rank has media in this micro-step
    context: Context
    needed: Tensor  # [T_local] bool CPU: tokens whose log-prob anything reads
    drafted: Tensor | None = None  # [k, T_local] bool CPU: tokens whose MTP log-probs anything reads
    teacher: TeacherHead | None = None  # a second engine's side of these tokens
    reduces: bool = True  # gradients that wait since the last sum over ranks are summed after this micro-step
    gathered: bool = False  # weights stay gathered from a layer's forward to its backward


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on a rank's device: what it would hold in a call, and what it holds now."""

    gradients: int  # whole ones, of all that may wait for a sum over ranks
    layers: int  # decoder layers, gathered
    own: int  # weights, gradients and optimizer state of this engine, now


class Program(Protocol):
    """What to do with the hidden states of a micro-step. `trains` says whether backward runs."""

    trains: ClassVar[bool]

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        """hidden [T_local, E], value [T_local] or None -> scalar to differentiate (already weighted: only sums follow)."""
        ...

    def aside(self, step: MicroStep) -> Tensor | None:
        """Pipelines: what a stage before the last has from its own layers, and the sum of its own loss terms or None."""
        ...

    def found(self) -> object:
        """What `compute` and `aside` collected on this rank, to be saved with torch.save."""
        ...

    def adopt(self, found: Sequence[object]) -> None:
        """Take over what the stages of a pipeline `found`, this rank's own among them, in stage order."""
        ...


class Backend(Protocol):
    """Owner of parameters. Every method is collective: all ranks call it in the same order."""

    routing: Routing | None  # LoRA: which adapter a sample trains; None without adapters

    def run(self, steps: Iterable[MicroStep], program: Program) -> None:
        """Run the program on every micro-step; training programs add their gradient to the accumulators."""
        ...

    def opened(self, step: MicroStep) -> AbstractContextManager[tuple[Tensor, Head]]:
        """Last hidden states [T_local, E] and the output layer, without gradient, both alive inside the block."""
        ...

    def held(self) -> Held | None:
        """None where neither sums nor gathers over ranks may be saved."""
        ...

    def step(self, settings: AdamW | SGD, adapter: str | None) -> dict[str, float]:
        """Clip, step once and clear; returns grad/norm and grad/clip. Raises before anything changes if the norm is not finite."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """{Hugging Face name: full CPU tensor} of the accumulated gradient, before clipping."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """{Hugging Face name: full CPU tensor} of the master weights."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path, optimizer: bool) -> None: ...

    def export(self, folder: Path, merge: str | None) -> None: ...

    def clear_gradients(self) -> None: ...

    def has_gradients(self) -> bool: ...
