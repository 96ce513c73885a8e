"""A model without its weights, and any part of any of them straight from safetensors: no rank holds a whole copy.

`load_skeleton` builds modules and buffers as transformers does; every parameter is one zero, expanded to its shape
(`hollow`), so that sizes, dtypes and ties read as always and a write fails instead of vanishing. `SafetensorsWeights`
reads slices under the model's own parameter names; where a checkpoint stores them otherwise it converts as transformers'
loading does: experts one by one, experts transposed, a text decoder inside a vision-language checkpoint. A tensor that
is missing is an error. "tiny:" models and files that are no safetensors (GGUF) have their weights in memory, as
`load_model` makes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from longspan.errors import UserError
from longspan.models.adapter import Adapter
from longspan.models.attention_bridge import DECODER, register
from longspan.models.loading import adapt, auto_class, family_of, load_model, locate, read_config, read_tokenizer

__all__ = ["MemoryWeights", "SafetensorsWeights", "Weights", "hollow", "load_skeleton", "materialise", "open_weights"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights(Protocol):
    """Where a model's weights are."""

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop along `dim` (0 or 1) of a parameter."""
        ...


class MemoryWeights:
    """Weights that a process holds."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        whole = self.parameters[name].detach()
        return whole if stop is None else whole.narrow(dim, start, stop - start)


class SafetensorsWeights:
    """Weights in files. places: tensor name -> file; shapes: parameter name -> shape that the model wants."""

    def __init__(self, places: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.places, self.shapes = places, shapes
        self.files: dict[Path, Any] = {}
        self.stack = ExitStack()

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        size = self.shapes[name][dim] if self.shapes[name] else 0
        stop = size if stop is None else stop
        parent, _, kind = name.rpartition(".")
        key = self._key(name)
        if key is None and kind in ("gate_up_proj", "down_proj") and dim == 0:
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            return torch.stack([self._expert(name, parent, expert, parts) for expert in range(start, stop)])
        if key is None:
            raise UserError(
                f"the checkpoint has no tensor {name!r}. Give the folder of a complete model of this family"
            )
        stored = self._slice(key)
        shape, wanted = tuple(stored.get_shape()), self.shapes[name]
        if shape == wanted:
            return stored[start:stop] if dim == 0 else stored[:, start:stop]
        if len(shape) == 3 and dim == 0 and (shape[0], shape[2], shape[1]) == wanted:
            return stored[start:stop].transpose(1, 2)
        raise UserError(f"{key!r} has shape {list(shape)} in the checkpoint; its config wants {list(wanted)}")

    def _expert(self, name: str, parent: str, expert: int, parts: tuple[str, ...]) -> Tensor:
        keys = [self._key(f"{parent}.{expert}.{part}.weight") for part in parts]
        if None in keys:
            raise UserError(f"the checkpoint has neither {name!r} nor {parent}.{expert}.{parts[0]}.weight")
        return torch.cat([self._slice(key)[:] for key in keys if key is not None])

    def _key(self, name: str) -> str | None:
        name = name.replace(".base_layer.", ".")  # a linear under LoRA
        text = name.replace("model.", "model.language_model.", 1)
        return next((key for key in (name, text, name.removeprefix("model.")) if key in self.places), None)

    def _slice(self, key: str) -> Any:
        path = self.places[key]
        if path not in self.files:
            self.files[path] = self.stack.enter_context(safe_open(path, "pt"))
        return self.files[path].get_slice(key)


def load_skeleton(name_or_path: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Adapter:
    """The adapter with hollow parameters where the weights lie in safetensors; else `load_model`'s."""
    if name_or_path.startswith("tiny:") or _places(name_or_path) is None:
        return load_model(name_or_path, dtype, seed)[0]
    register()
    config = read_config(name_or_path)
    with torch.device("meta"):
        model = auto_class(family_of(config)).from_config(config, attn_implementation=DECODER)
    _empty(model, dtype)
    adapter = adapt(model, locate(name_or_path)[0])
    adapter.tokenizer = read_tokenizer(name_or_path)
    return adapter


def open_weights(adapter: Adapter, name_or_path: str) -> Weights:
    """Where the weights of an adapter made by `load_skeleton(name_or_path)` are."""
    parameters = dict(adapter.model.named_parameters())
    if not any(map(hollow, parameters.values())):
        return MemoryWeights(parameters)
    places = _places(name_or_path)
    assert places is not None, name_or_path
    return SafetensorsWeights(places, {name: tuple(parameter.shape) for name, parameter in parameters.items()})


def hollow(tensor: Tensor) -> bool:
    """Whether it has a shape and no weights."""
    return tensor.dim() > 0 and tensor.numel() > 0 and not any(tensor.stride())


def materialise(model: nn.Module) -> None:
    """Memory for every hollow parameter, to be filled."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if hollow(parameter):
                made = torch.empty(parameter.shape, dtype=parameter.dtype)
                module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def _empty(model: nn.Module, dtype: torch.dtype) -> None:
    """Hollow parameters in place of meta ones, ties kept; buffers (RoPE frequencies) as the model makes them."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shell = nn.Parameter(torch.zeros((), dtype=dtype).expand(parameter.shape))
            module.register_parameter(name, made.setdefault(id(parameter), shell))
        buffers = list(module.named_buffers(recurse=False))
        for name, buffer in buffers:
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
        if buffers:
            assert not list(module.parameters(recurse=False)), f"{type(module).__name__} has weights beside buffers"
            model._init_weights(module)


def _places(name_or_path: str) -> dict[str, Path] | None:
    """Tensor name -> file of a local folder or a hub id; None where there are no safetensors."""
    folder, more = locate(name_or_path)
    if more:
        return None
    index = cached_file(folder, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        files = json.loads(Path(index).read_text())["weight_map"]
        found = {file: cached_file(folder, file) for file in sorted(set(files.values()))}
        return {key: Path(found[file]) for key, file in files.items()}
    single = cached_file(folder, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is None:
        return None
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), Path(single))
