"""The embedded sampler: a plain `transformers` model on this rank's device, its KV cache, and our own draw of each
token.

`generate()` is not used: it would expand a group before the prompt pass (8 times the vision tower) and read sampling
settings from the model's folder (top-k, penalties) that the trainer's log-probs know nothing of. Here a group shares
one pass over its prompt, and the log-prob of a token is that of the plain softmax at the given temperature: what the
trainer computes too. No id is banned, in sampling or training: a sampled placeholder is a plain token (its text
embedding), counts as an answer, and is as wrong as any other.

Positions and pixels come from the engine's adapter, so both sides place tokens by one rule. Models with recurrent
layers repeat the prompt instead of the cache (their states cannot be repeated in transformers' caches).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longspan.data import Image, Sample, Video
from longspan.engine import Engine
from longspan.engine.config import DTYPES
from longspan.errors import UserError
from longspan.models.loading import auto_class, family_of, read_config
from longspan.models.lora import merge_weights
from longspan.rl.rollout.draw import draw
from longspan.rl.rollout.share import Sampling
from longspan.rl.task import Prompt, Rollout

__all__ = ["EmbeddedSampler"]

MEDIA_INPUTS = ((Image, "pixel_values", "image_grid_thw"), (Video, "pixel_values_videos", "video_grid_thw"))


class EmbeddedSampler:
    """Holds full weights on one device. `load` before `sample`."""

    def __init__(self, engine: Engine, eos: Sequence[int]) -> None:
        adapters = sorted(engine.config.lora or {})
        if len(adapters) > 1:
            raise UserError(f"the sampler serves one policy, but the engine trains the adapters {adapters}. Use one")
        self.lora = adapters[0] if adapters else None
        config = read_config(engine.config.model)
        auto = auto_class(family_of(config))
        device, dtype = engine.mesh.device, DTYPES[engine.config.dtype]
        with torch.random.fork_rng(devices=[]):  # from_config draws weights: the run's random state must not notice
            model = auto.from_config(config, attn_implementation="sdpa", dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.adapter = engine.adapter
        self.device = device
        self.eos = torch.tensor(list(eos), device=device)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the trainer's weights ({Hugging Face name: full tensor}); a parameter that is missing is an error.

        With LoRA the adapter is added into the base, so what is sampled from is what is trained.
        """
        if self.lora is not None:
            weights = merge_weights(weights, self.adapter.model, self.lora)
        wanted = dict(self.model.named_parameters())
        missing, extra = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
        if missing:
            raise UserError(
                f"the engine gave no {missing[:3]} ({len(missing)} in all) to the sampler; it gave {extra[:3]}"
            )
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(weights[name])

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], uniform: Tensor, sampling: Sampling) -> list[list[Rollout]]:
        """`sampling.num` rollouts of each prompt. uniform: [prompts, num, max_new_tokens] f64; prompts have one
        length."""
        num = sampling.num
        once = num if self.adapter.recurrent else 1  # rows of a prompt in the prompt pass
        rows = [prompt for prompt in prompts for _ in range(once)]
        inputs, position = self._inputs(rows)
        result = self.model(**inputs, use_cache=True, logits_to_keep=1)
        cache, logits = result.past_key_values, result.logits[:, -1]
        if once < num:
            cache.batch_repeat_interleave(num)
            logits, position = logits.repeat_interleave(num, 0), position.repeat_interleave(num, -2)
        uniform = uniform.reshape(len(prompts) * num, -1)
        tokens, logprobs = [], []
        ended = torch.zeros(len(logits), dtype=torch.bool, device=self.device)
        for step in range(sampling.max_new_tokens):
            token, logprob = draw(logits, uniform[:, step], sampling.temperature)
            tokens.append(token)
            logprobs.append(logprob)
            ended |= torch.isin(token, self.eos)
            if step + 1 == sampling.max_new_tokens or bool(ended.all()):
                break
            result = self.model(
                input_ids=token[:, None], position_ids=position + step, past_key_values=cache, use_cache=True
            )
            cache, logits = result.past_key_values, result.logits[:, -1]
        found = _rollouts(torch.stack(tokens, 1).cpu(), torch.stack(logprobs, 1).cpu(), set(self.eos.tolist()))
        return [found[start : start + num] for start in range(0, len(found), num)]

    def _inputs(self, prompts: Sequence[Prompt]) -> tuple[dict[str, Tensor], Tensor]:
        """Keywords of the prompt pass, and the position ([B, 1] or [3, B, 1]) of the first sampled token."""
        ids = torch.tensor([prompt.input_ids for prompt in prompts])
        samples = [
            Sample(row, row, torch.zeros(len(row)), media=prompt.media)
            for row, prompt in zip(ids, prompts, strict=True)
        ]
        # [B, L], or [3, B, L] with mRoPE
        position = torch.stack([self.adapter.sample_tensors(sample)["position"] for sample in samples], dim=-2)
        after = position.amax(-1, keepdim=True)
        if after.dim() == 3:
            after = after.amax(0, keepdim=True).expand(
                3, -1, -1
            )  # text after media goes on from the largest of the three
        inputs = {"input_ids": ids, "position_ids": position, **self._media(prompts)}
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}, (after + 1).to(self.device)

    def _media(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Pixels [patches, C] and grids [n, 3] of all images, and of all videos, in prompt order."""
        inputs = {}
        for kind, pixel_name, grid_name in MEDIA_INPUTS:
            items = [item for prompt in prompts for item in prompt.media if isinstance(item, kind)]
            if items:
                reader = self.adapter.reader
                assert reader is not None, "sample_tensors refuses media for a model without a vision tower"
                inputs[pixel_name] = torch.cat([reader.pixels(item) for item in items])
                inputs[grid_name] = torch.tensor([reader.grid(item) for item in items])
        return inputs


def _rollouts(tokens: Tensor, logprobs: Tensor, eos: set[int]) -> list[Rollout]:
    """Rows [B, steps] cut after their first end token."""
    found = []
    for row, numbers in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        end = next((place for place, token in enumerate(row) if token in eos), None)
        count = len(row) if end is None else end + 1
        found.append(Rollout(tuple(row[:count]), tuple(numbers[:count]), end is not None))
    return found
