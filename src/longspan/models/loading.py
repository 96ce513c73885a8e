"""From a name to an adapter: "tiny:<family>", a local Hugging Face folder, a hub id, or a GGUF file (or its folder).

Architectures outside FAMILIES, unknown layers and settings that depend on the layout are refused by name before the
engine sees the model. Weights of "tiny:" models come from the seed alone, so every process draws the same ones.
Parameters get the asked dtype; buffers (RoPE frequencies) keep fp32, as `transformers` loads them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longspan.errors import UserError
from longspan.layout.mesh import CPGroup
from longspan.models import hf_text, qwen3_5, qwen3_5_vl, qwen3_vl
from longspan.models.adapter import Adapter, Family
from longspan.models.attention_bridge import DECODER, register
from longspan.models.checks import check_config, check_modules, check_tie, unknown_architecture
from longspan.models.experts import EXPERTS, expert_modules, register_experts, shard_experts
from longspan.models.images import MediaReader
from longspan.models.moe import tap_routers
from longspan.models.placeholders import MediaIds
from longspan.models.tiny import tiny

__all__ = ["FAMILIES", "adapt", "build_random", "load_model", "media_of", "read_config", "read_tokenizer"]

FAMILIES: dict[str, Family] = {
    **hf_text.FAMILIES,
    **qwen3_vl.FAMILIES,
    **qwen3_5.FAMILIES,
    **qwen3_5_vl.FAMILIES,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_model(
    name_or_path: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Adapter, PreTrainedTokenizerBase | None]:
    """The adapter on the CPU, and the tokenizer where there is one."""
    register()
    config = read_config(name_or_path)
    family = family_of(config)
    if name_or_path.startswith("tiny:"):
        return adapt(build_random(config, dtype, seed), None), None
    folder, more = locate(name_or_path)
    try:
        model, report = auto_class(family).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=DECODER,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named below
            **more,
        )
    except OSError as error:
        raise UserError(
            f"model {name_or_path!r} has no weights that can be read ({error}). Give a complete folder or a hub id"
        ) from error
    absent = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if absent:  # transformers would go on with random values
        raise UserError(
            f"model {name_or_path!r} lacks {absent[:3]}, or has them in another shape ({len(absent)} tensors in all). "
            "Export or download the folder again"
        )
    adapter = adapt(model, folder)
    adapter.tokenizer = read_tokenizer(name_or_path)
    return adapter, adapter.tokenizer


def build_random(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Random weights that depend on the config and the seed only; the process's own random state is left alone."""
    register()
    auto = auto_class(family_of(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, attn_implementation=DECODER)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def adapt(model: PreTrainedModel, folder: str | None) -> Adapter:
    """Check a built model and wrap it; `folder` is where processor files may lie."""
    register_experts()
    family = FAMILIES.get(type(model).__name__)
    if family is None:
        raise unknown_architecture(type(model).__name__, FAMILIES)
    check_modules(model, family.modules)
    check_tie(model)
    adapter = family.build(model, folder)
    tap_routers(adapter.units())
    if expert_modules(model):
        model.set_experts_implementation(EXPERTS)
        shard_experts(model, CPGroup.alone())
    if adapter.reader is not None:
        # The Qwen towers rotate in fp32 at every dtype, so the gradient of an image encoded once is 4e-8 (relative) off
        # the sum over its copies. fp64 is for proofs to 1e-8: there each copy is encoded.
        adapter.reader = dataclasses.replace(adapter.reader, share=model.dtype != torch.float64)
    return adapter


def read_config(name_or_path: str) -> PretrainedConfig:
    if name_or_path.startswith("tiny:"):
        return tiny(name_or_path.removeprefix("tiny:"))
    folder, more = locate(name_or_path)
    try:
        return AutoConfig.from_pretrained(folder, **more)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"model {name_or_path!r} has no readable config ({why}). Give 'tiny:<family>', a folder with config.json "
            "or a hub id"
        ) from error


def family_of(config: PretrainedConfig) -> Family:
    """The family of a config, whose settings it can honour; refused before any weight is read."""
    # A GGUF file names no architecture, only the kind of model.
    names = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)]
    if names[0] not in FAMILIES:
        raise unknown_architecture(names[0], FAMILIES)
    check_config(config.get_text_config())
    return FAMILIES[names[0]]


def auto_class(family: Family) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    return AutoModelForCausalLM if family.media is None else AutoModelForImageTextToText


def media_of(config: PretrainedConfig, name_or_path: str) -> tuple[MediaReader | None, MediaIds | None]:
    """How the media of a model that need not be loaded are read."""
    media = family_of(config).media
    return (None, None) if media is None else media(config, name_or_path)


def read_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase | None:
    name, more = locate(name_or_path)
    folder = Path(name)
    if not more and folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(name, **more)


def locate(name_or_path: str) -> tuple[str, dict[str, str]]:
    """Folder or hub id, and the GGUF file in it where that is what holds the model."""
    path = Path(name_or_path)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    return name_or_path, {"gguf_file": files[0].name} if len(files) == 1 else {}
