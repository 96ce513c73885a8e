"""Multi-token prediction (MTP) heads of Qwen3.5 and Qwen3-Next checkpoints: `mtp.*`, which transformers drops.

Step j (from 1) of token t reads the hidden state of step j - 1 (step 0: the decoder's, after its final norm) and the
embedding of token t + j, and predicts what token t + j predicts:

    h_j = norm(layer(fc([pre_fc_norm_embedding(embedding(x_{t+j})) | pre_fc_norm_hidden(h_{j-1})])))

one full-attention decoder layer per step (with experts where the decoder has them), used in turn when there are fewer
layers than steps; positions stay those of token t. The ids, rows of visual features, targets and weights of the k
steps are shifted per sample on the CPU, before packing (law 1): they are streams [k, T] like any other, so no rank or
document edge is ever crossed, and steps that reach past a sample's end weigh zero. Weights are those of the token
predicted, divided by k: a mean over steps. Order of the concatenation, the normed input, and an image's features in
place of its placeholders' embeddings: vLLM's qwen3_5_mtp.py @ 01d9980 (so SGLang, by its mm_input_embeds). `joint`
False: the head's gradient stays in `mtp.*`; True: it flows on into the decoder, the embeddings, the tower and the
output layer. Its routers are in no auxiliary loss and no recorded route, and its experts are whole on every rank.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import cached_file

from longspan.data.pack import FieldSpec
from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.layout.mesh import CPGroup
from longspan.layout.shard import Shard
from longspan.models.adapter import Context
from longspan.models.experts import EXPERTS, expert_modules, shard_experts
from longspan.models.norms import replace_zero_centred_norms
from longspan.models.vision import MediaShard, place_ahead

__all__ = ["MTPHead", "make_mtp_head", "mtp_declared", "mtp_exported", "mtp_tensors", "shifted"]

PREFIX = "mtp."
AHEAD = "mtp_ahead"  # in Context.scratch: (positions, features) of each step
THREE_AXES = ("Qwen3_5TextRotaryEmbedding", "Qwen3_5MoeTextRotaryEmbedding")
LAYER = re.compile(r"layers\.(\d+)\.")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")  # checkpoints that keep each expert apart


class MTPHead(nn.Module):
    """hidden [T_local, E] -> the hidden states [T_local, E] of each step. Parameter names are the checkpoint's."""

    def __init__(
        self, layers: list[nn.Module], norms: tuple[nn.Module, nn.Module, nn.Module], decoder: nn.Module
    ) -> None:
        super().__init__()
        size = decoder.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norms
        self.steps = 0  # of a training run; 0: the head is only carried along
        self.joint = False
        self.experts_apart = False  # how the checkpoint stores experts: one by one, or stacked as here
        self._decoder = (decoder,)  # in a tuple: its parameters are not this module's

    def read_from(self, decoder: Any) -> None:
        """Take RoPE tables and embeddings from this object instead: a backend that spread the decoder's own."""
        self._decoder = (decoder,)

    def see(self, features: Tensor, media: MediaShard, context: Context) -> None:
        """Keep for this micro-step the visual features that its steps read. features [n, E] of this rank; collective."""
        if self.steps:
            context.scratch[AHEAD] = place_ahead(features if self.joint else features.detach(), media)

    def forward(self, hidden: Tensor, shard: Shard, context: Context) -> list[Tensor]:
        decoder = self._decoder[0]
        weight = decoder.embed_tokens.weight
        if not self.joint:
            hidden, weight = hidden.detach(), weight.detach()
        position = shard.fields["position"]
        axes = position[:, None] if position.dim() == 2 else position[None]  # [3, 1, T_local] or [1, T_local]
        if position.dim() == 1 and type(decoder.rotary_emb).__name__ in THREE_AXES:
            axes = axes.expand(3, 1, -1)
        rotation = decoder.rotary_emb(hidden[None], axes)
        found = []
        for step in range(self.steps):
            embeds = functional.embedding(shard.fields["mtp_ids"][step], weight)
            if AHEAD in context.scratch:
                positions, features = context.scratch[AHEAD][step]
                embeds = embeds.index_copy(0, positions, features.to(embeds.dtype))
            both = torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], 1)
            out = self.layers[step % len(self.layers)](
                self.fc(both)[None],
                position_embeddings=rotation,
                attention_mask=None,
                longspan=Context(context.info, context.mixer, context.prepared, context.kernel),  # nothing is kept
            )
            hidden = self.norm(out[0])
            found.append(hidden)
        return found


def make_mtp_head(model: PreTrainedModel, decoder: nn.Module, folder: str | None) -> MTPHead | None:
    """The head with the checkpoint's weights (`folder` None: random, the same on every rank).

    As many layers as the config says (0: none are read); Qwen3-Next's says nothing, then as the checkpoint has. None where it
    has none.
    """
    config = decoder.config
    values = config.to_dict()
    tensors = None if folder is None else _read(folder)
    stated = values.get("mtp_num_hidden_layers")
    num = _layers(tensors or {}) if stated is None else stated
    if not num or tensors == {}:
        return None
    if values.get("mtp_use_dedicated_embeddings"):
        raise UserError("mtp_use_dedicated_embeddings=True is not supported: the head reads the model's embeddings")
    own = copy.deepcopy(config)
    own.layer_types, own.num_hidden_layers = ["full_attention"], 1
    own._experts_implementation = EXPERTS
    layers = [type(decoder.layers[0])(own, 0) for _ in range(num)]
    for layer in layers:
        replace_zero_centred_norms(layer)
    norms = tuple(copy.deepcopy(decoder.norm) for _ in range(3))
    head = MTPHead(layers, norms, decoder)
    if expert_modules(head):
        shard_experts(head, CPGroup.alone())
    if tensors is None:
        _draw(head, config.initializer_range)
    else:
        head.experts_apart = any(EXPERT.fullmatch(name) for name in tensors)
        _fill(head, _stacked(tensors))
    return head.to(model.dtype)


def mtp_declared(head: MTPHead | None, *, media: bool = False) -> dict[str, FieldSpec]:
    """The streams of `mtp_tensors`."""
    if head is None or not head.steps:
        return {}
    ids = FieldSpec(torch.int64, 0, (head.steps,))
    rows = {"mtp_media_row": FieldSpec(torch.int64, -1, (head.steps,))} if media else {}
    return {"mtp_ids": ids, "mtp_targets": ids, "mtp_needed": FieldSpec(torch.bool, False, (head.steps,)), **rows}


def mtp_tensors(head: MTPHead | None, sample: Sample, media_row: Tensor | None = None) -> dict[str, Tensor]:
    """[k, L] each: what every step reads, what it predicts, and whether anything reads its log-prob.

    media_row [L]: the sample's, for a family with a vision tower.
    """
    if head is None or not head.steps:
        return {}
    trained = sample.mask > 0
    rows = {} if media_row is None else {"mtp_media_row": shifted(media_row + 1, head.steps) - 1}  # -1 past the end
    return {
        "mtp_ids": shifted(sample.input_ids, head.steps),
        "mtp_targets": shifted(torch.where(trained, sample.target_ids, 0), head.steps),
        "mtp_needed": shifted(trained, head.steps),
        **rows,
    }


def shifted(values: Tensor, steps: int) -> Tensor:
    """[L] -> [steps, L]: row j - 1 holds values[t + j], zero past the sample's end."""
    length = values.shape[0]
    padded = torch.cat([values, values.new_zeros(steps)])
    return torch.stack([padded[step : step + length] for step in range(1, steps + 1)])


def mtp_exported(head: MTPHead | None, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with its head's under the names they were loaded from."""
    found = dict(weights)
    if head is None or not head.experts_apart:
        return found
    for name in [name for name in weights if name.startswith(PREFIX) and ".experts." in name]:
        base, _, kind = name.rpartition(".")
        for number, expert in enumerate(found.pop(name)):
            kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
            for part, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                found[f"{base}.{number}.{part}_proj.weight"] = matrix.contiguous()
    return found


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts kept one by one (gate, up, down) as the layers hold them: gate_up_proj and down_proj over all experts."""
    found = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    parts = {match.groups(): tensors[match.string] for match in map(EXPERT.fullmatch, tensors) if match}
    for base in sorted({base for base, _, _ in parts}):
        count = 1 + max(int(number) for own, number, _ in parts if own == base)
        missing = [(n, kind) for n in range(count) for kind in KINDS if (base, str(n), kind) not in parts]
        if missing:
            raise UserError(
                f"the checkpoint's {PREFIX}{base} lack {missing[0][1]}_proj of expert {missing[0][0]} ({len(missing)} "
                "tensors in all). Take a complete checkpoint, or set mtp_num_hidden_layers to 0 in its config"
            )
        gate, up, down = (torch.stack([parts[base, str(n), kind] for n in range(count)]) for kind in KINDS)
        found |= {f"{base}.gate_up_proj": torch.cat([gate, up], 1), f"{base}.down_proj": down}
    return found


KINDS = ("gate", "up", "down")


def _layers(tensors: Mapping[str, Tensor]) -> int:
    """How many layers the names speak of."""
    found = [int(match[1]) for match in map(LAYER.match, tensors) if match]
    return 1 + max(found, default=-1)


def _draw(head: MTPHead, std: float) -> None:
    """Weights N(0, std) from a fixed seed, norms at their start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            else:
                parameter.zero_()


def _fill(head: MTPHead, tensors: dict[str, Tensor]) -> None:
    """Names and shapes must agree exactly."""
    wanted = {name: list(parameter.shape) for name, parameter in head.named_parameters()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        raise UserError(
            f"the checkpoint's mtp.* tensors do not fit its config: {wrong[:3]} ({len(wrong)} in all); "
            f"expected {wanted.get(wrong[0])}, found {found.get(wrong[0])}"
        )
    head.load_state_dict(tensors, assign=True)  # the decoder's norms may be hollow (skeleton.py)


def _read(folder: str) -> dict[str, Tensor]:
    """{name without "mtp.": tensor} of a local folder or a hub id; empty where there is none."""
    index = cached_file(folder, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    files = ["model.safetensors"]
    if index is not None:
        places = json.loads(Path(index).read_text())["weight_map"]
        files = sorted({place for name, place in places.items() if name.startswith(PREFIX)})
    found = {}
    for name in files:
        path = cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
        if path is None:
            continue
        with safe_open(path, "pt") as file:
            found |= {key.removeprefix(PREFIX): file.get_tensor(key) for key in file.keys() if key.startswith(PREFIX)}  # noqa: SIM118
    return found
