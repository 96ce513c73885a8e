"""The oracle's auxiliary losses of mixture-of-experts layers, for one sample, from what HF's routers returned.

With n tokens, E experts, k a token, c_e tokens sent to expert e and p the softmax of the router's logits, summed over
layers: aux = E / (k n^2) sum_e c_e sum_t p_te (Switch Transformer eq. 4), z = 1 / n sum_t logsumexp(logits_t)^2
(ST-MoE eq. 5).
"""

import torch
from torch import Tensor, nn


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

    def losses(self) -> dict[str, Tensor]:
        """moe_aux and moe_z of the sample, summed over layers; empty for a dense model."""
        if not self.seen:
            return {}
        aux, z = [], []
        for logits, experts in self.seen:
            length, num_experts = logits.shape
            counts = torch.bincount(experts.flatten(), minlength=num_experts).to(logits.dtype)
            mass = torch.softmax(logits, -1).sum(0)
            aux.append(num_experts / (experts.shape[1] * length**2) * (counts * mass).sum())
            z.append(torch.logsumexp(logits, -1).square().sum() / length)
        return {"moe_aux": torch.stack(aux).sum().cpu(), "moe_z": torch.stack(z).sum().cpu()}
