"""The experts' matmuls behind transformers' ExpertsInterface (name "longspan"): dropless, grouped, local or
expert-parallel.

Token-expert pairs are sorted by expert (stable), so each expert gets one run. 16-bit inputs use torch's grouped
matmul; fp32 and fp64 one matmul an expert, which grouped_mm does not take in fp64. An idle expert's gradient is zero,
never None or garbage (bugs I10). Expert parallel: rank r of the group holds experts r*n .. (r+1)*n - 1; pairs travel
to their expert and back by all-to-all, so an expert sees all its tokens and its gradient is whole on its rank. Counts
are exchanged first and read on the host: dropless needs the sizes (one synchronisation a layer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from longspan.errors import UserError
from longspan.layout import comm
from longspan.layout.mesh import CPGroup

__all__ = ["EXPERTS", "EXPERT_CLASSES", "expert_modules", "register_experts", "shard_experts"]

EXPERTS = "longspan"
EXPERT_CLASSES = (
    "Qwen3MoeExperts",
    "Qwen3NextExperts",
    "Qwen3VLMoeTextExperts",
    "Qwen3_5MoeExperts",
    "GptOssExperts",
)


def experts_forward(module: nn.Module, hidden: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """hidden [T, E], experts [T, k] int64, scores [T, k] -> [T, E]: sum over k of score times expert(hidden)."""
    top_k = experts.shape[1]
    sorted_ids, order = torch.sort(experts.reshape(-1), stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.bincount(sorted_ids, minlength=module.num_experts)
    pairs_SE = hidden[order // top_k]
    out_SE = _over_ranks(module, pairs_SE, counts, module.longspan_group)
    return (out_SE[back].view(len(hidden), top_k, -1) * scores[..., None]).sum(1).to(hidden.dtype)


def _over_ranks(module: nn.Module, pairs: Tensor, counts: Tensor, group: CPGroup) -> Tensor:
    """[S, E] sorted by expert -> [S, E], each row through its expert, wherever that lives."""
    if group.size == 1:
        return _mlp(module, pairs, counts)
    table = comm.all_to_all(counts, group).view(group.size, -1)  # [ranks, n]: pairs each rank sends to my experts
    send = counts.view(group.size, -1).sum(1).tolist()
    receive = table.sum(1).tolist()
    arrived = _Exchange.apply(pairs, group, receive, send)
    local = torch.arange(table.shape[1], device=counts.device).repeat(group.size).repeat_interleave(table.reshape(-1))
    order = torch.sort(local, stable=True).indices  # by my expert, then by sender
    made = _mlp(module, arrived[order], table.sum(0))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return _Exchange.apply(made[back], group, send, receive)


def _mlp(module: nn.Module, pairs: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by local expert; counts [n] int64 rows each."""
    up = _linear(module, pairs, module.gate_up_proj, module.gate_up_proj_bias if module.has_bias else None, counts)
    gated = module._apply_gate(up)
    return _linear(module, gated, module.down_proj, module.down_proj_bias if module.has_bias else None, counts)


def _linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    weight, bias = _own(weight), None if bias is None else _own(bias)
    weight_nio = weight if module.is_transposed else weight.transpose(1, 2)
    if x.dtype in (torch.bfloat16, torch.float16):
        out = _Grouped.apply(x, weight_nio, counts)
    else:
        parts = zip(x.split(counts.tolist()), weight_nio.unbind(0), strict=True)
        out = torch.cat([part @ matrix for part, matrix in parts])
    return out if bias is None else out + bias.repeat_interleave(counts, 0, output_size=len(x))


def _own(parameter: Tensor) -> Tensor:
    """This rank's experts of a parameter that is spread over the expert axis; a plain one is whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Grouped(torch.autograd.Function):
    """torch's grouped matmul; the gradient of an expert without rows is set to zero, which the kernel need not write."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        offsets = counts.cumsum(0).to(torch.int32)
        ctx.save_for_backward(x, weight, counts, offsets)
        return functional.grouped_mm(x, weight, offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, counts, offsets = ctx.saved_tensors
        dout = grads[0].contiguous()
        dx = functional.grouped_mm(dout, weight.transpose(1, 2), offs=offsets)
        dweight = functional.grouped_mm(x.t(), dout, offs=offsets)
        return dx, torch.where(counts[:, None, None] > 0, dweight, 0), None


class _Exchange(torch.autograd.Function):
    """All-to-all with uneven parts: [sum(send), E] -> [sum(receive), E]; the gradient travels back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CPGroup, receive: list[int], send: list[int]) -> Tensor:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        return comm.all_to_all(x, group, receive=receive, send=send)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = comm.all_to_all(grads[0].contiguous(), ctx.group, receive=ctx.send, send=ctx.receive)
        return grad, None, None, None


def register_experts() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of every block of experts."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in EXPERT_CLASSES}


def shard_experts(model: nn.Module, group: CPGroup, mesh: DeviceMesh | None = None) -> None:
    """Spread the experts over the ranks of `group`: each keeps its part of dim 0 of every parameter. Once, while building.

    mesh: the same ranks as an axis; parameters become DTensors on it, so that gathering, checkpoints and names need nothing
    special. Size 1 keeps all experts here.
    """
    for name, module in expert_modules(model).items():
        if module.num_experts % group.size:
            raise UserError(
                f"ep={group.size} must divide the {module.num_experts} experts of {name!r}. Use a divisor of it"
            )
        module.longspan_group = group
        if group.size > 1:
            for key, parameter in list(module.named_parameters(recurse=False)):
                mine = parameter.detach().chunk(group.size)[group.rank].clone()
                spread = mine if mesh is None else DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
                module.register_parameter(key, nn.Parameter(spread, requires_grad=parameter.requires_grad))
