"""What a loss sees of this rank's tokens: TokenOut (what the model says) and Fields (what the samples brought), all
[T].

`where(trained)` replaces every value outside a term's mask by 0 before the loss sees it. So whatever stands at a
masked token (an old_logprob of 1e30, a log-prob that was not computed) can reach neither the loss nor, as 0 * inf, its
gradient. Streams keep the token dim last (`[..., T]`); `Fields.from_streams` moves it first, where losses want it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.objective.segments import Segments

__all__ = ["Fields", "TokenOut"]


def _masked(x: Tensor, trained: Tensor) -> Tensor:
    """x [T, ...], 0 where trained [T] is False."""
    mask = trained.reshape(trained.shape[0], *[1] * (x.dim() - 1))
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


@dataclass(frozen=True, slots=True, eq=False)
class TokenOut:
    """What the model says at each of this rank's T tokens. None: not computed in this call."""

    logprob: Tensor  # [T] f32/f64, of target_ids under the tempered distribution; 0 where not needed
    entropy: Tensor | None = None  # [T]
    segments: Segments | None = None  # which sample each token belongs to, for reductions over a sample
    value: Tensor | None = None  # [T] value head
    topk_logprob: Tensor | None = None  # [T, K] log-probs of the sample's teacher_ids
    teacher_kl: Tensor | None = None  # [T] KL against a teacher's whole distribution

    def where(self, trained: Tensor) -> "TokenOut":
        """The same with 0 outside `trained` [T] bool, and segments that count only those tokens."""
        changed: dict[str, Tensor | Segments | None] = {}
        for name in (f.name for f in fields(self) if f.name != "segments"):
            x: Tensor | None = self.__getattribute__(name)
            changed[name] = None if x is None else _masked(x, trained)
        changed["segments"] = None if self.segments is None else replace(self.segments, mask=trained)
        return replace(self, **changed)

    def need_entropy(self, loss: str) -> Tensor:
        return _given(self.entropy, loss, "the entropy: compute the head with entropy=True")

    def need_value(self, loss: str) -> Tensor:
        return _given(self.value, loss, "a value head: build the engine with one")

    def need_topk(self, loss: str) -> Tensor:
        return _given(self.topk_logprob, loss, "log-probs at teacher_ids: compute the head with teacher_ids")

    def need_teacher_kl(self, loss: str) -> Tensor:
        return _given(self.teacher_kl, loss, "the KL against a teacher: give the call a teacher engine")

    def need_segments(self, loss: str) -> Segments:
        if self.segments is None:
            raise UserError(
                f"loss {loss!r} reduces over samples and needs TokenOut.segments, which this call did not give."
            )
        return self.segments


def _given(x: Tensor | None, loss: str, what: str) -> Tensor:
    if x is None:
        raise UserError(f"loss {loss!r} needs {what}. This call did not compute it.")
    return x


class Fields:
    """Sample fields as [T, ...] tensors, read as `fields["advantage"]` or `fields.advantage`."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    @classmethod
    def from_streams(cls, streams: Mapping[str, Tensor], dtype: torch.dtype) -> "Fields":
        """Streams [..., T] -> fields [T, ...]; floats in `dtype` (the log-probs'), the rest as they are."""
        moved = {name: x.movedim(-1, 0) for name, x in streams.items()}
        return cls({name: x.to(dtype) if x.is_floating_point() else x for name, x in moved.items()})

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise UserError(
                f"the loss reads field {name!r}, which this call does not carry (it has {sorted(self._tensors)}). "
                f"Give every sample fields={{{name!r}: [...]}}, and name it in Objective(fn, fields=({name!r},))."
            )
        return self._tensors[name]

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        return self[name]

    def __getstate__(self) -> dict[str, Tensor]:
        return self._tensors

    def __setstate__(self, state: dict[str, Tensor]) -> None:
        self._tensors = state

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def where(self, trained: Tensor) -> "Fields":
        """The same with 0 outside `trained` [T] bool."""
        return Fields({name: _masked(x, trained) for name, x in self._tensors.items()})

    def take(self, rows: Tensor | slice) -> "Fields":
        """The fields of some tokens only."""
        return Fields({name: x[rows] for name, x in self._tensors.items()})
