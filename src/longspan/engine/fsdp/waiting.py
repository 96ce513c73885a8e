"""Gradients that wait, whole and in master precision, until they are summed over ranks: whose may, and how they are dropped. And
weights that stay gathered between forward and backward.

FSDP2 itself adds them up between micro-steps: FSDPModule.set_requires_gradient_sync, FSDPParam.unsharded_accumulated_grad (compute below
master precision) or the gathered parameter's own .grad. FSDPState._fsdp_param_group is a field in torch 2.11 and a property in 2.13; a
unit here has one group.

The vision tower's blocks never wait: a micro-step without media does not run them, and nothing says that FSDP reduces a unit
that did not run. Where no decoder layer is trained nothing waits at all: the last micro-step may then have no backward.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from longspan.engine.fsdp.policy import Policy
from longspan.engine.optim import local
from longspan.models.adapter import tower_blocks

__all__ = [
    "drop_waiting", "has_waiting", "keep_gathered", "let_go", "reduce_after", "settle", "shard_bytes", "waiting_units", "whole_gradients",
    "whole_weights",
]  # fmt: skip


def waiting_units(policy: Policy) -> list[FSDPModule]:
    """What every micro-step runs forward and backward on every rank: decoder layers with their experts, and the root."""
    tower = tower_blocks(policy.adapter)
    layers = [unit for unit in policy.adapter.units() if unit not in tower]
    if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        return []
    inside = [module for layer in layers for module in layer.modules() if isinstance(module, FSDPModule)]
    assert isinstance(policy, FSDPModule), "shard_policy comes first"
    return [*inside, policy]


def whole_gradients(units: Sequence[FSDPModule], master: torch.dtype) -> int:
    """Bytes that a rank holds while the gradients of these units wait."""
    parameters = (each for unit in units for each in _parameters(unit) if each.sharded_param.requires_grad)
    return master.itemsize * sum(each._orig_size.numel() for each in parameters)


def whole_weights(units: Sequence[FSDPModule], compute: torch.dtype) -> int:
    """Bytes that a rank holds while these units are gathered."""
    return compute.itemsize * sum(each._orig_size.numel() for unit in units for each in _parameters(unit))


def shard_bytes(policy: Policy, device: torch.device) -> list[tuple[FSDPParam, int]]:
    """Every parameter, and the bytes of this rank's shard on `device`: 0 where it stays on the host."""
    shards = [(each, local(each.sharded_param)) for each in _all(policy)]
    return [(each, shard.nbytes if shard.device.type == device.type else 0) for each, shard in shards]


def keep_gathered(units: Sequence[FSDPModule], stays: bool) -> None:
    """Whether these units stay gathered after the next forward. Only before a backward, which lets them go."""
    for unit in units:
        unit.set_reshard_after_forward(not stays, recurse=False)


def let_go(policy: Policy) -> None:
    """No unit stays gathered: its parameters are then the shards, which a step moves and a checkpoint holds."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_after(units: Sequence[FSDPModule], reduces: bool) -> None:
    """Whether the next backward sums the gradients of these units over ranks, or lets them wait."""
    for unit in units:
        unit.set_requires_gradient_sync(reduces, recurse=False)


def has_waiting(policy: Policy) -> bool:
    """Whether any gradient waits: inside a call, and after one that stopped half-way."""
    return any(each.unsharded_accumulated_grad is not None or _own(each) is not None for each in _all(policy))


def drop_waiting(policy: Policy) -> None:
    """Forget gradients that wait."""
    for each in _all(policy):
        each.unsharded_accumulated_grad = None
        if _own(each) is not None:
            each.unsharded_param.grad = None


def settle(policy: Policy) -> None:
    """After a forward or backward that failed: FSDP takes the next one for a first one."""
    assert isinstance(policy, FSDPModule), "shard_policy comes first"
    state = policy._get_fsdp_state()
    if state._is_root is None:  # failed before the first forward: there is nothing to forget
        return
    if hasattr(policy, "reset_iter_state"):  # torch 2.13 has it, 2.11 has not
        policy.reset_iter_state()
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # gathers and sums under way keep their buffers until then
    shared, traffic = state._state_ctx, state._comm_ctx
    shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
    traffic.all_gather_state = None
    vars(traffic)["reduce_scatter_state"] = None  # a field of 2.11 alone
    traffic.post_forward_order.clear()
    for each in shared.all_states:
        each._training_state = TrainingState.IDLE
        group = each._fsdp_param_group
        if group is not None:
            group._training_state = TrainingState.IDLE
            group._all_gather_result = group._post_reduce_event = group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group.reshard()


def _all(policy: Policy) -> Iterator[FSDPParam]:
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            yield from _parameters(module)


def _parameters(unit: FSDPModule) -> Sequence[FSDPParam]:
    group = unit._get_fsdp_state()._fsdp_param_group
    return () if group is None else group.fsdp_params


def _own(parameter: FSDPParam) -> torch.Tensor | None:
    """The gradient at the gathered parameter, which is made by its first gather."""
    gathered = vars(parameter).get("_unsharded_param")
    return None if gathered is None else gathered.grad
