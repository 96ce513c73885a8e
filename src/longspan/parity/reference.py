"""THE ORACLE: one process, a plain Hugging Face model, one unpacked sample at a time, autograd, and AdamW written
out.

Independent of the engine on purpose: it shares with it the tiny configs and the `Sample` class, nothing else. Losses,
weights and metrics come from formulas.py, attention and DeltaNet in fp64 from oracle_attention.py; in fp32 Hugging
Face runs unmodified (eager). Images go through HF's own processor and HF's own multimodal forward. The plainest code
wins here: no batching, no fused head, no caching. Every public tensor is fp64 (fp32 for an fp32 oracle), [L] per
sample.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from longspan.data import Sample
from longspan.models.tiny import tiny
from longspan.parity import formulas
from longspan.parity.cases import Case
from longspan.parity.formulas import Tokens
from longspan.parity.oracle_attention import use_plain_layers
from longspan.parity.oracle_media import MediaInputs, hidden_with_media
from longspan.parity.oracle_mtp import DecoderLog, plain_mtp
from longspan.parity.oracle_routers import BatchRoutes, RouterLog

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_: coefficient = clip / (norm + 1e-6), at most 1


@dataclass(slots=True)
class Result:
    """What one batch of one case gives: loss terms and metrics as numbers, gradients by parameter name."""

    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Reference:
    """The oracle of one model. freeze: prefixes of parameter names. mtp_steps: of a head, where the model has one; 0
    leaves it as it is.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        seed: int = 0,
        value_head: bool = False,
        freeze: Sequence[str] = (),
        mtp_steps: int = 2,
        device: str = "cpu",
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.model = load_plain(name, dtype, seed).to(self.device)
        if dtype == torch.float64:
            use_plain_layers(self.model)
        self.media = MediaInputs(name, self.model.config)
        hidden_size = self.model.config.get_text_config().hidden_size
        self.value_head = plain_value_head(hidden_size, seed, dtype) if value_head else None
        self.mtp = plain_mtp(self.model, name, mtp_steps)
        if self.mtp is not None:
            self.mtp.to(self.device).requires_grad_(mtp_steps > 0)
        for parameter_name, parameter in self.named_parameters():
            if any(parameter_name.startswith(prefix) for prefix in freeze):
                parameter.requires_grad_(False)
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """HF names, tied weights once, then the value head and the multi-token-prediction head."""
        head = (
            [] if self.value_head is None else [(f"value_head.{n}", p) for n, p in self.value_head.named_parameters()]
        )
        drafts = [] if self.mtp is None else [(f"mtp.{n}", p) for n, p in self.mtp.named_parameters()]
        return [*self.model.named_parameters(), *head, *drafts]

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self.named_parameters()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])

    def outputs(self, sample: Sample, *, value: bool = False) -> Tokens:
        """HF's forward of one unpacked sample, then plain log-softmax, entropy and gather."""
        hidden, logits = self._forward(sample)
        temperature = sample.fields.get("temperature")
        if temperature is not None:
            logits = logits / temperature.to(logits.dtype)[:, None]
        log_softmax = torch.log_softmax(logits, -1)  # [L, V]
        mask = sample.mask.to(self.dtype)
        targets = torch.where(sample.mask > 0, sample.target_ids, 0)
        return Tokens(
            logprob=log_softmax.gather(1, targets[:, None])[:, 0] * mask,
            entropy=-(log_softmax.exp() * log_softmax).sum(-1) * mask,
            log_softmax=log_softmax,
            mask=mask,
            value=self.value_head(hidden)[:, 0] if value else None,
            fields={n: x.to(self.dtype) if x.is_floating_point() else x for n, x in sample.fields.items()},
        )

    def _forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm [L, E] and logits [L, V], on the CPU like all that follows."""
        hidden = hidden_with_media(self.model, sample, self.media)
        logits = self.model.get_output_embeddings()(hidden).cpu()
        cap = self.model.config.get_text_config().to_dict().get("final_logit_softcapping")
        return hidden.cpu(), logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def routes(self, sample: Sample) -> Tensor:
        """[L, layers, k] experts that each token of a sample is sent to."""
        with RouterLog(self.model) as routers:
            hidden_with_media(self.model, sample, self.media)
        return routers.routes()

    def run(self, samples: Sequence[Sample], case: Case, teacher: "Reference | None" = None) -> Result:
        """Add the gradient of `case` over `samples`; the result holds this call's metrics and the accumulated
        gradients. teacher: of a case that uses one.
        """
        terms = case.terms()
        coefficients = {name: coefficient for name, coefficient, _ in terms}
        coefficients |= dict(case.router_terms()) | dict(case.draft_terms())
        weights = {name: self._weights(samples, name, case) for name in coefficients}
        sums = dict.fromkeys(weights, 0.0)
        batch = {name: self._batch_routes(samples, weights[name]) for name, _ in case.router_terms() if case.over_batch}
        seen = []
        for number, sample in enumerate(samples):
            decoder_log = nullcontext() if self.mtp is None else DecoderLog(self.model)
            with RouterLog(self.model) as routers, decoder_log as decoder:
                tokens = self.outputs(sample, value=case.uses_value)
            if case.uses_teacher:
                with torch.no_grad():
                    tokens = replace(tokens, teacher=teacher.outputs(sample).log_softmax)
            loss = torch.zeros((), dtype=self.dtype)
            for name, coefficient in case.draft_terms():
                output = self.model.get_output_embeddings().weight
                term = self.mtp.loss(decoder, sample, weights[name][number], output)
                loss = loss + coefficient * term
                sums[name] += float(term.detach())
            for name, coefficient in case.router_terms():
                weight = weights[name][number].sum()
                if (
                    case.over_batch and weight > 0
                ):  # a part of the batch's one number, which weighs what all samples weigh
                    weight = sum(each.sum() for each in weights[name])
                term = routers.losses(batch.get(name))[name] * weight
                loss = loss + coefficient * term
                sums[name] += float(term.detach())
            for name, coefficient, formula in terms:
                weight = weights[name][number]
                term = (formula(replace(tokens, mask=(weight > 0).to(self.dtype)), case.settings) * weight).sum()
                loss = loss + coefficient * term
                sums[name] += float(term.detach())
            loss.backward()
            seen.append(
                (replace(tokens, mask=(weights[case.loss][number] > 0).to(self.dtype)), weights[case.loss][number])
            )
        metrics = {f"loss/{name}": value for name, value in sums.items()}
        metrics["loss/total"] = sum(coefficient * sums[name] for name, coefficient in coefficients.items())
        metrics |= formulas.metrics(seen, case.loss, case.settings)
        return Result(metrics, self.gradients())

    def _batch_routes(self, samples: Sequence[Sample], weights: Sequence[Tensor]) -> BatchRoutes:
        pairs = zip(samples, weights, strict=True)
        return BatchRoutes([self.routes(sample) for sample, weight in pairs if weight.any()])

    def _weights(self, samples: Sequence[Sample], term: str, case: Case) -> list[Tensor]:
        masks = [formulas.term_mask(sample.fields, sample.mask, term) for sample in samples]
        return [w.to(self.dtype) for w in formulas.token_weights(masks, case.normalise, case.denominator)]

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.detach().cpu().clone()
            for name, p in self.named_parameters()
            if p.requires_grad
        }

    def clear(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def adamw(
        self,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
    ) -> float:
        """One AdamW step as Loshchilov and Hutter 2019, algorithm 2, after clipping by the global norm; returns that
        norm.
        """
        gradients = self.gradients()
        norm = float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + CLIP_EPSILON))
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name not in gradients:
                    continue
                g = gradients[name].to(parameter.device) * scale
                first, second = self.moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
                first = betas[0] * first + (1 - betas[0]) * g
                second = betas[1] * second + (1 - betas[1]) * g * g
                self.moments[name] = (first, second)
                first_hat = first / (1 - betas[0] ** self.steps)
                second_hat = second / (1 - betas[1] ** self.steps)
                parameter.mul_(1 - lr * weight_decay)
                parameter.sub_(lr * first_hat / (second_hat.sqrt() + eps))
        self.clear()
        return norm


def load_plain(name: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The model as transformers makes it. Buffers keep fp32 (RoPE frequencies); parameters get `dtype`."""
    if name.startswith("tiny:"):
        config = tiny(name.removeprefix("tiny:"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto_class(config).from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model
    return auto_class(AutoConfig.from_pretrained(name)).from_pretrained(name, dtype=dtype, attn_implementation="eager")


def auto_class(config: PretrainedConfig) -> type:
    """AutoModelForImageTextToText for configs with a vision tower, else AutoModelForCausalLM."""
    return AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM


def plain_value_head(hidden_size: int, seed: int, dtype: torch.dtype) -> nn.Linear:
    """The engine's documented start: weights N(0, 0.02) from the seed, bias 0."""
    head = nn.Linear(hidden_size, 1, dtype=dtype)
    with torch.no_grad():
        head.weight.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
        head.bias.zero_()
    return head
