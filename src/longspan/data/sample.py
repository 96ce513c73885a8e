"""A sample: one trajectory as per-token tensors on the CPU, with references to its media.

Every per-token tensor has the token dim first: `[L]` or `[L, ...]`. `target_ids[t]` is what token t predicts: the
shift was made by whoever made the sample, on the whole trajectory, and nothing here or later rolls it again (law
`shift_before_pack`). Images and videos stay references until a rank that needs them decodes them (data/media.py).

A sample is valid by construction. `check_samples` adds what needs the batch: an empty batch, ids outside the
vocabulary. This file does not expand placeholders (`longspan.expand`) and knows no model but the size of its
vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from longspan.data.media import Image, ImageSource, Video
from longspan.errors import UserError
from longspan.typed import typed

Values = Tensor | np.ndarray | Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]
Media = Image | Video
LEAST_TEMPERATURE = 1e-30  # a logit of 1e8 divided by it still fits fp32


@typed
@dataclass(frozen=True, slots=True, init=False, eq=False)
class Sample:
    """One trajectory of L tokens. Lists, arrays and tensors are taken; CPU tensors are kept."""

    input_ids: Tensor  # [L] int64
    target_ids: Tensor  # [L] int64, already shifted; anything (say -100) where mask is 0
    mask: Tensor  # [L] f32, 1 where the target is trained on, else 0
    fields: Mapping[str, Tensor]  # name -> [L, ...] f32 or f64 (floats keep their width) or int64, finite everywhere
    media: tuple[Media, ...]  # in the order of their placeholders in input_ids
    group: str | int | None  # samples of one prompt share it
    adapter: str | None  # LoRA adapter that this sample trains

    def __init__(
        self,
        input_ids: Values,
        target_ids: Values,
        mask: Values,
        fields: Mapping[str, Values] | None = None,
        media: Sequence[Media] = (),
        group: str | int | None = None,
        adapter: str | None = None,
        images: Sequence[Image | ImageSource] | None = None,
    ) -> None:
        if images is not None and len(media):
            raise UserError(
                "a sample got both media= and images=: they say the same thing. Give all items as media=[...]."
            )
        if images is not None:
            media = [item if isinstance(item, Image) else Image(item) for item in images]
        put = object.__setattr__  # the dataclass is frozen
        put(self, "input_ids", _ids("input_ids", input_ids))
        put(self, "target_ids", _ids("target_ids", target_ids))
        put(self, "mask", _mask(mask))
        put(self, "fields", {name: _values(name, values) for name, values in (fields or {}).items()})
        put(self, "media", tuple(media))
        put(self, "group", group)
        put(self, "adapter", adapter)
        self._check()

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def __repr__(self) -> str:
        parts = [f"L={len(self)}", f"trained={int(self.mask.sum())}", f"fields={sorted(self.fields)}"]
        parts += [f"media={len(self.media)}"] if self.media else []
        parts += [f"group={self.group!r}"] if self.group is not None else []
        return f"Sample({', '.join(parts)})"

    @property
    def num_trained(self) -> int:
        """Tokens with mask 1."""
        return int(self.mask.sum())

    def _check(self) -> None:
        length = len(self)
        if length == 0:
            raise UserError(
                f"{self._name()} is empty: input_ids has 0 tokens. A sample needs at least 1; drop it from the batch."
            )
        columns = {"target_ids": self.target_ids, "mask": self.mask} | {
            f"fields[{k!r}]": v for k, v in self.fields.items()
        }
        for name, values in columns.items():
            if values.shape[0] != length:
                raise UserError(
                    f"{self._name()}: {name} has length {values.shape[0]}, input_ids has length {length}. Every "
                    "per-token "
                    "field has one value a token: pad it on the prompt with a value that mask 0 hides, or cut it."
                )
        for name, values in self.fields.items():
            finite = torch.isfinite(values.float()) if values.is_floating_point() else None  # losses compute in fp32
            if finite is not None and not bool(finite.all()):
                where = int((~finite).reshape(length, -1).any(1).nonzero()[0, 0])
                raise UserError(
                    f"{self._name()}: fields[{name!r}] is {values[where].tolist()} at position {where}. Fields must "
                    "be finite in fp32 (within 3.4e38) "
                    "everywhere (0 times NaN is NaN): write 0 where mask is 0, and drop samples whose reward or "
                    "log-prob failed."
                )
        if "temperature" in self.fields:
            self._check_temperature(self.fields["temperature"])

    def _check_temperature(self, temperature: Tensor) -> None:
        if temperature.dim() != 1:
            raise UserError(
                f"{self._name()}: fields['temperature'] has shape {list(temperature.shape)}, not [L]. Give one "
                "temperature a token."
            )
        low = temperature < LEAST_TEMPERATURE
        if bool(low.any()):
            where = int(low.nonzero()[0, 0])
            raise UserError(
                f"{self._name()}: fields['temperature'] is {float(temperature[where])} at position {where}. "
                f"Temperatures are above 0, {LEAST_TEMPERATURE} or more (logits are divided by them in fp32); for greedy "
                "sampling give 1."
            )

    def _name(self) -> str:
        return "sample" if self.group is None else f"sample of group {self.group!r}"


@typed
def check_samples(samples: Sequence[Sample], *, vocab_size: int, name: str = "samples") -> None:
    """Raises UserError for an empty batch, or for an id outside the vocabulary, naming the sample."""
    joined_ids(samples, vocab_size=vocab_size, name=name)


def joined_ids(samples: Sequence[Sample], *, vocab_size: int, name: str = "samples") -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, target_ids (0 where masked) and mask > 0 of all samples, one after the other: [N] each.

    Raises what check_samples raises.
    """
    if len(samples) == 0:
        raise UserError(f"{name} is empty: 0 samples. A call needs at least one; skip the call when a batch has none.")
    ids = torch.cat([sample.input_ids for sample in samples])
    trained = torch.cat([sample.mask for sample in samples]) > 0
    targets = torch.where(trained, torch.cat([sample.target_ids for sample in samples]), 0)
    for column, values in (("input_ids", ids), ("target_ids", targets)):
        low, high = values.aminmax()
        if low < 0 or high >= vocab_size:
            _refuse_id(column, values, list(map(len, samples)), vocab_size)
    return ids, targets, trained


def _refuse_id(column: str, values: Tensor, sizes: Sequence[int], vocab_size: int) -> NoReturn:
    flat = int(((values < 0) | (values >= vocab_size)).nonzero()[0, 0])
    ends = np.cumsum(sizes)
    number = int(np.searchsorted(ends, flat, side="right"))
    position = flat - int(ends[number]) + sizes[number]
    hint = "set mask 0 where the target is a placeholder" if column == "target_ids" else "use the model's own tokenizer"
    raise UserError(
        f"sample {number}: {column}[{position}] is {int(values[flat])}, outside the vocabulary of {vocab_size} "
        f"(ids 0..{vocab_size - 1}); {hint}."
    )


def _values(name: str, values: Values) -> Tensor:
    """CPU tensor: int64, or f32 / f64 as given (Python floats are f64)."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        try:
            tensor = torch.from_numpy(np.array(values))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"sample: {name} is not a rectangular array of numbers ({error}). Give [L] or [L, ...] numbers."
            ) from None
    if tensor.dim() == 0:
        raise UserError(f"sample: {name} is a single number, {tensor.item()}. Give one value a token: [L] or [L, ...].")
    if tensor.numel() == 0 and not tensor.is_floating_point():
        return tensor.long()
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.clone() if isinstance(values, Tensor) else tensor
    if tensor.is_complex():
        raise UserError(f"sample: {name} is complex ({tensor.dtype}). Fields are real numbers.")
    return tensor.float() if tensor.is_floating_point() else tensor.long().clone()


def _ids(name: str, values: Values) -> Tensor:
    tensor = _values(name, values)
    if tensor.dim() != 1:
        raise UserError(f"sample: {name} has shape {list(tensor.shape)}, not [L]. Give one sample's ids, not a batch.")
    if tensor.is_floating_point() and tensor.numel():
        raise UserError(f"sample: {name} holds floats ({tensor.dtype}); ids are integers. Convert them before.")
    return tensor.long()


def _mask(values: Values) -> Tensor:
    tensor = _values("mask", values)
    if tensor.dim() != 1:
        raise UserError(f"sample: mask has shape {list(tensor.shape)}, not [L]. Give one 0 or 1 a token.")
    wrong = (tensor != 0) & (tensor != 1)
    if bool(wrong.any()):
        where = int(wrong.nonzero()[0, 0])
        raise UserError(
            f"sample: mask[{where}] is {tensor[where].item()}, not 0 or 1. The mask says only whether a target is "
            "trained on; "
            "put weights into advantages or into a field."
        )
    return tensor.float()
