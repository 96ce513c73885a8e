"""What a task gives to the loop, and what rollouts are. No engine, no ranks.

Prompt number i is a pure function of i: a task holds no stream state, so the data cursor of a run is one integer, and
every rank makes the same prompts. `EpochOrder` turns that integer into a seeded walk over a finite data set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from longspan.data import Image, Video
from longspan.errors import UserError
from longspan.typed import typed

__all__ = ["EpochOrder", "Prompt", "Rollout", "Task"]


@typed
@dataclass(frozen=True, slots=True)
class Prompt:
    """A question: token ids with expanded placeholders, its media, and the right answer's ids where there is one."""

    id: str  # names the row in rows.jsonl; equal for equal prompts
    input_ids: tuple[int, ...]
    media: tuple[Image | Video, ...] = ()
    answer: tuple[int, ...] = ()  # with its end token


@typed
@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response. `finished` says whether an end token was sampled; a cut response has none added."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = field(repr=False)  # of each id, under the sampling temperature
    finished: bool


class Task(Protocol):
    """A source of prompts with a checkable reward."""

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids that end a response."""
        ...

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt the task can make: sizes are checked against it before the first step."""
        ...

    def train_prompt(self, index: int) -> Prompt:
        """Prompt number `index` of the training stream, for any index >= 0."""
        ...

    def eval_prompts(self) -> Sequence[Prompt]:
        """The fixed held-out prompts."""
        ...

    def reward(self, prompt: Prompt, response: Sequence[int]) -> float:
        """Reward of a response given as token ids (with its end token, where one was sampled)."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Readable form of ids, for the report."""
        ...


@typed
class EpochOrder:
    """An endless seeded walk over a data set of `size` rows; each epoch is its own permutation. `order[i]` is a row."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise UserError(f"the data set has {size} rows: it needs at least 1")
        self.size, self.seed = size, seed
        self.epoch, self.permutation = -1, np.zeros(0, dtype=np.int64)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self.size)
        if epoch != self.epoch:
            self.epoch, self.permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return int(self.permutation[position])
