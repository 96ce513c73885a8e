"""LoRA through `peft`: several adapters over one frozen base, each packed token seeing its own.

peft builds the layers (target modules by name or regular expression, rsLoRA, initial values) and writes the export. What is ours is
the routing: a hook before every lora_A zeroes the input of the tokens that belong to another adapter, so that neither their
output nor the adapter's gradient sees them, whatever is packed together. `Routing` is set once per micro-step, before the
forward; recomputation in backward meets the same one. The LoRA factors start from the seed and the adapter's name alone.
Options outside HONOURED are refused by name (dropout, DoRA, biases, trained tokens, starts that change the base ...), and so
are targets that are no linear layer (embeddings, the output layer, convolutions, experts and routers) and several adapters on a
vision tower (patches carry no adapter id).
"""

import copy
import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.models.adapter import Adapter

__all__ = ["Routing", "add_adapters", "adapter_of", "merge_weights", "write_adapter"]

HONOURED = (
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
)
RECORDS = (  # say what an adapter is or was made with; change no number
    *(
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("megatron_core", "runtime_config"),
)
STARTS = (True, False, "gaussian", "orthogonal")  # of the factors alone: the others change the base's weights


class Routing:
    """Which tokens of the micro-step belong to which adapter."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.ids: Tensor | None = None  # [T_local] int64 on the device, -1: pads

    def number(self, sample: Sample, index: int) -> int:
        """The adapter's number for a sample; None means the only adapter there is."""
        name = sample.adapter if sample.adapter is not None or len(self.names) > 1 else self.names[0]
        if name not in self.names:
            raise UserError(
                f"sample {index} has adapter={name!r}; this engine has {sorted(self.names)}. Name one of them"
            )
        return self.names.index(name)

    def hook(self, name: str, tokens: bool) -> "object":
        """The hook before lora_A of adapter `name`; `tokens`: the module sees the stream's tokens (not image patches)."""
        number = self.names.index(name)

        def keep_own(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not tokens:
                return None
            assert self.ids is not None, "the backend sets routing.ids before every forward"
            (x,) = inputs  # [1, T_local, E] or [T_local, E]
            return (torch.where((self.ids == number)[:, None], x, torch.zeros((), dtype=x.dtype, device=x.device)),)

        return keep_own


def add_adapters(adapter: Adapter, configs: Mapping[str, LoraConfig], seed: int) -> Routing:
    """Put the adapters into the model's layers and freeze everything else. Every rank draws the same factors."""
    if not configs:
        raise UserError("lora={} names no adapter. Give lora={'name': LoraConfig(...)}, or leave it out")
    routing, model = Routing(list(configs)), adapter.model
    for name, config in configs.items():
        _check(name, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + zlib.crc32(name.encode()))
            _inject(config, model, name)
    vision = (*adapter.parts().get("vision", ()), *adapter.parts().get("merger", ()))
    for path, layer in _layers(model):
        if not isinstance(layer.get_base_layer(), nn.Linear) or path in ("lm_head", "model.embed_tokens"):
            raise UserError(
                f"LoRA on {path} ({type(layer.get_base_layer()).__name__}) is not supported: target linear layers inside the "
                "decoder or the vision tower, and name others in exclude_modules"
            )
        inside_tower = any(path.startswith(prefix.rstrip(".")) for prefix in vision)
        if inside_tower and len(configs) > 1:
            raise UserError(
                f"{len(configs)} adapters on the vision tower ({path}): patches carry no adapter. Use one adapter, or target the language model"
            )
        layer.set_adapter(list(layer.lora_A))
        for name, lora_a in layer.lora_A.items():
            lora_a.register_forward_pre_hook(routing.hook(name, not inside_tower))
    factors = {id(p) for _, layer in _layers(model) for p in (*layer.lora_A.parameters(), *layer.lora_B.parameters())}
    if not factors:
        raise UserError(f"no module matches the target_modules of {sorted(configs)}")
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in factors)
    return routing


def _inject(config: LoraConfig, model: nn.Module, name: str) -> None:
    """peft's own refusals (unknown targets, layers it has no LoRA for), as ours."""
    try:
        inject_adapter_in_model(copy.deepcopy(config), model, adapter_name=name)  # peft writes into what it is given
    except (ValueError, TypeError) as error:
        raise UserError(
            f"adapter {name!r}: peft cannot put LoRA on target_modules={config.target_modules!r}: {str(error)[:200]} "
            "Target linear layers inside the decoder or the vision tower"
        ) from error


def _check(name: str, config: LoraConfig) -> None:
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        default = option.default_factory() if option.default is dataclasses.MISSING else option.default
        if option.name not in (*HONOURED, *RECORDS) and value != default:
            raise UserError(
                f"adapter {name!r}: LoraConfig {option.name}={value!r} is not supported. Leave it at its default; supported: "
                f"{', '.join(HONOURED)}"
            )
    if config.init_lora_weights not in STARTS:
        raise UserError(
            f"adapter {name!r}: LoraConfig init_lora_weights={config.init_lora_weights!r} would change the frozen base. Use one of "
            f"{', '.join(map(repr, STARTS))}"
        )
    if not config.lora_alpha > 0:  # scales the factors: at 0 the adapter does nothing and gets no gradient
        raise UserError(
            f"adapter {name!r}: lora_alpha={config.lora_alpha!r} must be above 0. Leave it out for peft's default of 8"
        )
    if "." in name or not name:
        raise UserError(f"adapter name {name!r} must be a word without dots")


def _layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def adapter_of(parameter_name: str) -> str | None:
    """The adapter that a parameter belongs to; None for the base. Names are peft's: ...lora_A.<adapter>.weight."""
    words = parameter_name.split(".")
    for word, following in itertools.pairwise(words):
        if word in ("lora_A", "lora_B"):
            return following
    return None


def write_adapter(folder: Path, name: str, config: LoraConfig, weights: Mapping[str, Tensor]) -> None:
    """One adapter in peft's own format: adapter_config.json and adapter_model.safetensors, which PeftModel loads."""
    own = {
        f"base_model.model.{key.replace(f'.{name}.', '.')}": value.contiguous()
        for key, value in weights.items()
        if adapter_of(key) == name
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / "adapter_model.safetensors")
    settings = config.to_dict() | {"peft_type": "LORA", "inference_mode": True}
    settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, default=str))


def merge_weights(weights: Mapping[str, Tensor], model: nn.Module, name: str | None) -> dict[str, Tensor]:
    """The base under its own names, with adapter `name` added in (None: the bare base): W + scaling * B @ A."""
    scaling = {path: layer.scaling for path, layer in _layers(model)}
    merged = {}
    for key, value in weights.items():
        if adapter_of(key) is not None:
            continue
        path = key.rsplit(".base_layer.", 1)[0]
        if name is not None and key.endswith(".base_layer.weight") and f"{path}.lora_A.{name}.weight" in weights:
            a, b = weights[f"{path}.lora_A.{name}.weight"], weights[f"{path}.lora_B.{name}.weight"]
            value = value + scaling[path][name] * (b @ a)
        merged[key.replace(".base_layer.", ".")] = value
    return merged
