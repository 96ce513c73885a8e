"""The oracle's auxiliary losses of mixture-of-experts layers, for one sample, from what HF's routers returned; or the sample's
part of a batch's, where n and c_e count the tokens of all samples that weigh.

With n tokens, E experts, k a token, c_e tokens sent to expert e and p the softmax of the router's logits, summed over
layers: aux = E / (k n^2) sum_e c_e sum_t p_te (Switch Transformer eq. 4), z = 1 / n sum_t logsumexp(logits_t)^2
(ST-MoE eq. 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class BatchRoutes:
    """Where the tokens of a batch were sent. routes: of each sample that weighs, [L, layers, k]."""

    routes: Sequence[Tensor]

    @property
    def num_tokens(self) -> int:
        return max(sum(len(each) for each in self.routes), 1)

    def counts(self, layer: int, experts: int) -> Tensor:
        """[E] tokens sent to each expert of a layer."""
        return sum(torch.bincount(each[:, layer].flatten(), minlength=experts) for each in self.routes)


class RouterLog:
    """Inside the block, keeps (logits, experts) of every router call of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "RouterLog":
        self.hooks = [router.register_forward_hook(self._keep) for router in self.routers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, router: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self.seen.append((output[0], output[2]))

    def routes(self) -> Tensor:
        """[L, layers, k] experts that each token was sent to."""
        return torch.stack([experts for _, experts in self.seen], 1).cpu()

    def losses(self, batch: BatchRoutes | None = None) -> dict[str, Tensor]:
        """moe_aux and moe_z of the sample, or its part of the batch's, summed over layers; empty for a dense model."""
        if not self.seen:
            return {}
        whole = BatchRoutes([self.routes()]) if batch is None else batch
        length, aux, z = whole.num_tokens, [], []
        for layer, (logits, experts) in enumerate(self.seen):
            num_experts = logits.shape[1]
            counts = whole.counts(layer, num_experts).to(logits)
            mass = torch.softmax(logits, -1).sum(0)
            aux.append(num_experts / (experts.shape[1] * length**2) * (counts * mass).sum())
            z.append(torch.logsumexp(logits, -1).square().sum() / length)
        return {"moe_aux": torch.stack(aux).sum().cpu(), "moe_z": torch.stack(z).sum().cpu()}
