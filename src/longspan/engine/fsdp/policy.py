"""The module that FSDP2 wraps: a Hugging Face model, its optional value head, and the program run on its hidden states.

The head's matmul happens inside `forward`, where FSDP has gathered the root's parameters (embeddings, final norm, output layer).
Parameters are cut over the flattened dp x cp axis; gradients are SUMMED there and nothing divides (law 5).
Gradients land summed in fp32 shards, after each micro-step or once a call (waiting.py), so any number of calls adds up.
Source of the two switches: torch.distributed.fsdp FSDPModule.set_gradient_divide_factor, set_force_sum_reduction_for_comms.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from longspan.engine.backend import Head, MicroStep, Program
from longspan.layout import Mesh
from longspan.models.adapter import Adapter
from longspan.models.experts import expert_modules, shard_experts
from longspan.models.lora import Routing

__all__ = ["MODEL_PREFIX", "Policy", "public_name", "shard_policy"]

MODEL_PREFIX = "model."


class Policy(nn.Module):
    """model: the Hugging Face model. value_head: nn.Linear(E, 1) or None."""

    def __init__(self, adapter: Adapter, value_head: nn.Module | None, routing: Routing | None) -> None:
        super().__init__()
        self.model = adapter.model
        self.value_head = value_head
        self.mtp = adapter.mtp
        self.adapter = adapter
        self.routing = routing

    def forward(self, step: MicroStep, program: Program) -> Tensor:
        """[] the program's weighted sum on this rank's tokens."""
        if self.routing is not None:
            self.routing.ids = step.shard.fields["adapter"]
        hidden_TE = self.adapter.hidden(step.shard, step.media, step.context)
        value_T = None if self.value_head is None else self.value_head(hidden_TE)[:, 0]
        return program.compute(hidden_TE, self._head(step), value_T, step)

    def _head(self, step: MicroStep) -> Head:
        weight, bias, softcap = self.adapter.head()
        if self.mtp is None or not self.mtp.steps:
            return Head(weight, bias, softcap)
        drafts = partial(self.mtp, shard=step.shard, context=step.context)
        return Head(weight, bias, softcap, drafts, weight if self.mtp.joint else weight.detach())


def public_name(name: str) -> str:
    """Parameter name as users see it: the Hugging Face name, or value_head.*"""
    return name.removeprefix(MODEL_PREFIX)


def shard_policy(
    policy: Policy, mesh: Mesh, *, compute: torch.dtype, master: torch.dtype, on_host: bool = False
) -> None:
    """Cut every unit of the model and then the rest over all data ranks, with sums as the only reduction.

    Under ep > 1 an expert block is spread over the ep axis first and cut over the replicas of its experts only.
    on_host: shards, their gradients and the optimizer's step stay in host memory; units are gathered from there.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute,
        reduce_dtype=None if compute == master else master,
        cast_forward_inputs=False,
    )
    where = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if on_host else OffloadPolicy()
    if mesh.layout.ep > 1:
        shard_experts(policy.model, mesh.experts(), mesh.expert_mesh["ep"])
        for experts in expert_modules(policy.model).values():
            fully_shard(experts, mesh=mesh.expert_mesh["replica"], mp_policy=precision)
    for unit in policy.adapter.units():
        fully_shard(unit, mesh=mesh.device_mesh, mp_policy=precision, offload_policy=where)
    fully_shard(policy, mesh=mesh.device_mesh, mp_policy=precision, offload_policy=where)
    if mesh.device_mesh.size() == 1:  # a mean is a sum here; with a factor FSDP2 would divide every gradient by it
        return
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
