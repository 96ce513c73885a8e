"""The oracle's multi-token-prediction head (Qwen3.5's `mtp.*`, which transformers drops), for one unpacked sample.

Step j of token t reads the state of step j - 1 (the decoder's last one before step 1) and the decoder's own input row
of token t + j, image features included, and predicts what token t + j predicts. Plain code: one transformers layer a
step, no packing, no streams; weights of a tiny model as the engine documents them (N(0, std) drawn from seed 0 in the
order of the names, norms zero). Unless `joint`, the loss stays apart from the decoder: all it reads is detached.
"""

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import cached_file

from longspan.data import Sample
from longspan.parity.oracle_attention import NAME, PlainNorm, plain_attention, use_plain_norms


class DecoderLog:
    """Inside the block, keeps the decoder's input rows [1, L, E], its rotation and its last states [1, L, E]."""

    def __init__(self, model: nn.Module) -> None:
        self.decoder = text_decoder(model)
        self.embeds, self.rotation, self.hidden = torch.empty(0), (), torch.empty(0)
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "DecoderLog":
        first = self.decoder.layers[0].register_forward_pre_hook(self._keep_inputs, with_kwargs=True)
        self.hooks = [first, self.decoder.norm.register_forward_hook(self._keep_states)]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep_inputs(self, layer: nn.Module, args: tuple[Tensor], kwargs: dict[str, object]) -> None:
        self.embeds, self.rotation = args[0], kwargs["position_embeddings"]

    def _keep_states(self, norm: nn.Module, args: object, output: Tensor) -> None:
        self.hidden = output


class PlainMTP(nn.Module):
    """Parameter names are the checkpoint's, without "mtp."."""

    def __init__(self, model: nn.Module, name: str, steps: int) -> None:
        super().__init__()
        decoder = text_decoder(model)
        config = copy.deepcopy(decoder.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        AttentionInterface.register(NAME, plain_attention)
        config._attn_implementation, config._experts_implementation = NAME, "eager"
        size = config.hidden_size
        self.steps, self.joint = steps, False
        self.fc = nn.Linear(2 * size, size, bias=False)
        layer = type(decoder.layers[0])
        self.layers = nn.ModuleList([layer(config, 0) for _ in range(config.mtp_num_hidden_layers)])
        use_plain_norms(self.layers)
        norms = [PlainNorm(copy.deepcopy(decoder.norm)) for _ in range(3)]
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norms
        if name.startswith("tiny:"):
            self._draw(config.initializer_range)
        else:
            self.load_state_dict(_tensors(name))
        self.to(model.dtype)

    def _draw(self, std: float) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                drawn = (
                    torch.empty(parameter.shape).normal_(0.0, std, generator=generator) if parameter.dim() > 1 else 0
                )
                parameter.copy_(torch.as_tensor(drawn))

    def loss(self, seen: DecoderLog, sample: Sample, weight: Tensor, output: Tensor) -> Tensor:
        """[] minus the sum over steps and tokens of weight / steps times the log-prob. weight [L], output [V, E]."""
        hidden, embeds, length = seen.hidden, seen.embeds, len(sample)
        if not self.joint:
            hidden, embeds, output = hidden.detach(), embeds.detach(), output.detach()
        targets = torch.where(sample.mask > 0, sample.target_ids, 0).to(embeds.device)
        total = torch.zeros((), dtype=embeds.dtype, device=embeds.device)
        for step in range(1, min(self.steps, length - 1) + 1):
            ahead = torch.zeros_like(embeds)
            ahead[:, : length - step] = embeds[:, step:]
            both = torch.cat([self.pre_fc_norm_embedding(ahead), self.pre_fc_norm_hidden(hidden)], -1)
            layer = self.layers[(step - 1) % len(self.layers)]
            made = layer(self.fc(both), position_embeddings=seen.rotation, attention_mask=None)
            hidden = self.norm(made)
            logprob = torch.log_softmax(hidden[0] @ output.T, -1)[: length - step]
            picked = logprob.gather(1, targets[step:, None])[:, 0]
            total = total - (weight.to(embeds.device)[step:] * picked).sum() / self.steps
        return total.cpu()


def plain_mtp(model: nn.Module, name: str, steps: int) -> PlainMTP | None:
    """The head that the model's config names; None where it names none."""
    return (
        PlainMTP(model, name, steps) if model.config.get_text_config().to_dict().get("mtp_num_hidden_layers") else None
    )


def text_decoder(model: nn.Module) -> nn.Module:
    """The module that holds the decoder's layers, final norm and rotation."""
    modules = dict(model.named_modules())
    return modules.get("model.language_model", modules["model"])


def _tensors(name: str) -> dict[str, Tensor]:
    """Every mtp.* tensor of a folder or hub id, without the prefix."""
    folder = Path(cached_file(name, "config.json")).parent
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {key[4:]: tensor for key, tensor in load_file(path).items() if key.startswith("mtp.")}
    return found
