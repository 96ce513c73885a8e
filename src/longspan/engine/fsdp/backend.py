"""The fsdp backend: PyTorch FSDP2 over dp x cp, Hugging Face modules, torch optimizers.

Every parameter is cut over all dp x cp ranks, so a micro-step may group those ranks in any way (dynamic CP) without moving
a weight. Refuses tp > 1 and pp > 1: those are the megatron backend's.
"""

import fnmatch
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from longspan.engine import checkpoint
from longspan.engine.backend import Head, Held, MicroStep, Program
from longspan.engine.common import (
    check_finite,
    check_lora,
    check_shapes,
    empty_settings,
    export_weights,
    make_value_head,
    owners_of,
    pick_adapter,
    set_mtp,
    use_settings,
    zero_slots,
)
from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.fsdp.compiled import compile_layers, keeps_of
from longspan.engine.fsdp.host import CHECKPOINT, HostStore
from longspan.engine.fsdp.host_optimizer import HostOptimizer
from longspan.engine.fsdp.policy import Policy, public_name, shard_policy
from longspan.engine.fsdp.tiled_mlp import tile_mlps
from longspan.engine.fsdp.waiting import (
    drop_waiting,
    has_waiting,
    keep_gathered,
    let_go,
    reduce_after,
    settle,
    shard_bytes,
    waiting_units,
    whole_gradients,
    whole_weights,
)
from longspan.engine.memory import explain_out_of_memory
from longspan.engine.optim import SGD, AdamW, clip_coefficient, gradient_norm, local, make_optimizer
from longspan.errors import UserError
from longspan.layout import CPGroup, Mesh
from longspan.layout.comm import all_gather
from longspan.models.adapter import Adapter
from longspan.models.lora import adapter_of, add_adapters
from longspan.models.moe import moe_shape

__all__ = ["FSDPBackend"]

Stepper = torch.optim.Optimizer | HostOptimizer


class FSDPBackend:
    """Backend protocol on FSDP2. Build with `FSDPBackend(config, adapter, mesh)` on every rank."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh) -> None:
        for axis, size in (("tp", config.layout.tp), ("pp", config.layout.pp)):
            if size > 1:
                raise UserError(f"{axis}={size} needs backend='megatron'; the fsdp backend runs dp, cp and ep")
        if config.layout.ep > 1 and moe_shape(adapter.model) is None:
            raise UserError(f"ep={config.layout.ep} needs a model with experts; {config.model} has none. Set ep=1")
        _check_offload(config)
        if config.layout.etp > 1:
            raise UserError(f"etp={config.layout.etp} needs backend='megatron'; the fsdp backend keeps an expert whole")
        self.mesh = mesh
        self.adapter = adapter
        check_lora(config)
        self.compute = DTYPES[config.dtype]
        self.master = torch.float64 if self.compute == torch.float64 else torch.float32
        value_head = make_value_head(adapter, config.seed, self.master) if config.value_head else None
        self.routing = None if config.lora is None else add_adapters(adapter, config.lora, config.seed)
        self.lora = config.lora or {}
        set_mtp(adapter, config)
        self.policy = Policy(adapter, value_head, self.routing)
        _freeze(self.policy, config.freeze, adapter)
        if config.mlp_tile and not tile_mlps(adapter, config.mlp_tile):
            raise UserError(
                f"mlp_tile={config.mlp_tile}: {config.model} has no gated MLP to run in tiles. Set mlp_tile=0"
            )
        self.offload = config.offload
        self.host = HostStore(mesh.device) if "checkpoints" in config.offload else None
        keep = keeps_of(config)
        if keep is None:
            _recompute(adapter, config.recompute, self.host)
        if config.compile:
            compile_layers(adapter, config)
        shard_policy(
            self.policy, mesh, compute=self.compute, master=self.master, on_host="parameters" in config.offload
        )
        self.policy.train()
        self.waiting = waiting_units(self.policy) if mesh.data_ranks > 1 else []  # whose gradients may wait for a sum
        self.whole = whole_gradients(self.waiting, self.master), whole_weights(self.waiting[:-1], self.compute)
        self.shards = shard_bytes(self.policy, mesh.device)
        self.optimizers: dict[str | None, Stepper] = {}  # one an adapter; None: everything that is in none

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(public name, parameter) of every trainable parameter; tied weights once."""
        return ((name, parameter) for name, parameter in self._parameters() if parameter.requires_grad)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(public name, parameter) of every parameter, never a gathered copy of it; tied weights once."""
        let_go(self.policy)
        for name, parameter in self.policy.named_parameters():
            yield public_name(name), parameter

    def run(self, steps: Iterable[MicroStep], program: Program) -> None:
        for step in steps:
            with self._ready(step, trains=program.trains):
                loss = self.policy(step, program)
                if loss.requires_grad:
                    loss.backward()
                else:
                    # Without backward FSDP keeps the root gathered.
                    self.policy.reshard()
        assert not (program.trains and has_waiting(self.policy)), "the last micro-step sums all gradients over ranks"

    def held(self) -> Held | None:
        if not self.waiting:
            return None
        own = sum(size if each.sharded_param.grad is None else 2 * size for each, size in self.shards)
        states = (slots for optimizer in self.optimizers.values() for slots in optimizer.state.values())
        with torch.no_grad():  # or each shard becomes a view that autograd knows
            shards = [local(each) for slots in states for each in slots.values() if isinstance(each, Tensor)]
        own += sum(shard.nbytes for shard in shards if shard.device.type == self.mesh.device.type)
        return Held(*self.whole, own)

    @contextmanager
    def _ready(self, step: MicroStep, *, trains: bool) -> Iterator[None]:
        """Inside, the policy runs on this micro-step. Without backward, layers do not stay gathered after their forward."""
        if self.host is not None:
            self.host.begin(step.context.cache, step.context.tower_cache)
        reduce_after(self.waiting, step.reduces)
        keep_gathered(self.waiting[:-1], step.gathered and trains)  # the root always stays gathered
        with explain_out_of_memory(step, trains=trains), self._settled(), torch.set_grad_enabled(trains):
            yield

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """A failure inside leaves FSDP ready for the next forward; gradients that wait stay until clear_gradients or load."""
        with ExitStack() as stack:
            stack.callback(settle, self.policy)
            yield
            stack.pop_all()

    @contextmanager
    def opened(self, step: MicroStep) -> Iterator[tuple[Tensor, Head]]:
        seen = _Seen()
        with self._ready(step, trains=False):
            self.policy(step, seen)
        assert seen.pair is not None, "the policy runs the program it is given"
        try:
            yield seen.pair
        finally:
            self.policy.reshard()

    def step(self, settings: AdamW | SGD, adapter: str | None) -> dict[str, float]:
        adapter = pick_adapter(self.lora, adapter)
        parameters = self._stepped(adapter)
        norm = gradient_norm(parameters, self.mesh.all)
        gradients = ((n, None if p.grad is None else local(p.grad)) for n, p in self.named_parameters())
        check_finite(norm, gradients, self.mesh.data_rank)
        for parameter in parameters:
            if parameter.grad is None:  # unused in every call: a zero gradient, the same at every layout
                parameter.grad = torch.zeros_like(parameter)
        coefficient = clip_coefficient(norm, settings.clip_norm)
        if coefficient is not None:
            torch._foreach_mul_([local(parameter.grad) for parameter in parameters], coefficient.to(self.master))
        optimizer = self._optimizer(settings, parameters, adapter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"grad/norm": float(norm), "grad/clip": 1.0 if coefficient is None else float(coefficient)}

    def _stepped(self, adapter: str | None) -> list[nn.Parameter]:
        """What a step moves: the factors of one adapter, with the value head where it is the only one; or everything."""
        owners = owners_of(self.lora, adapter)
        return [parameter for name, parameter in self.named_parameters() if adapter_of(name) in owners]

    def _optimizer(self, settings: AdamW | SGD, parameters: list[nn.Parameter], adapter: str | None) -> Stepper:
        """This adapter's optimizer with the settings of this step; its state starts at the first one."""
        if adapter not in self.optimizers:
            # state lives where its parameters do, so offloaded parameters have theirs on the host already
            parked = "optimizer" in self.offload and "parameters" not in self.offload
            self.optimizers[adapter] = (
                HostOptimizer(settings, parameters, self.mesh.device)
                if parked
                else make_optimizer(settings, parameters)
            )
        optimizer = self.optimizers[adapter]
        use_settings(optimizer.param_groups, kind_of(optimizer), settings)
        return optimizer

    def clear_gradients(self) -> None:
        drop_waiting(self.policy)
        for _, parameter in self._parameters():
            parameter.grad = None

    def has_gradients(self) -> bool:
        return has_waiting(self.policy) or any(parameter.grad is not None for _, parameter in self._parameters())

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = full(gradient)
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: full(parameter.detach()) for name, parameter in self._parameters()}

    def save(self, folder: Path) -> None:
        with self._moments():
            checkpoint.write_tensors(folder, self._state(), self.mesh)
        if self.mesh.data_rank == 0:
            kinds = {adapter or "": kind_of(optimizer) for adapter, optimizer in self.optimizers.items()}
            (folder / "backend.json").write_text(json.dumps({"optimizers": kinds, "shapes": self._shapes()}))

    def load(self, folder: Path, optimizer: bool) -> None:
        saved = json.loads((folder / "backend.json").read_text())
        check_shapes(folder, saved["shapes"], self._shapes())
        self.optimizers = {}
        keys = checkpoint.saved_keys(folder)
        for adapter, kind in saved["optimizers"].items() if optimizer else ():
            self._empty_optimizer(adapter or None, kind, keys)
        with self._moments():
            checkpoint.read_tensors(folder, self._state(), self.mesh)
        self.clear_gradients()

    @contextmanager
    def _moments(self) -> Iterator[None]:
        """All optimizer state on the device inside."""
        with ExitStack() as stack:
            for optimizer in self.optimizers.values():
                if isinstance(optimizer, HostOptimizer):
                    stack.enter_context(optimizer.brought())
            yield

    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self._parameters()}

    def _state(self) -> dict[str, Tensor]:
        """Flat {key: tensor} of everything saved: weights, and moments where there are any."""
        names = {parameter: name for name, parameter in self._parameters()}
        state = {f"weights/{name}": parameter.detach() for parameter, name in names.items()}
        for optimizer in self.optimizers.values():
            for parameter, slots in optimizer.state.items():
                state |= {
                    f"optimizer/{names[parameter]}/{slot}": value for slot, value in slots.items() if value is not None
                }
        return state

    def _empty_optimizer(self, adapter: str | None, kind: str, keys: Collection[str]) -> None:
        """An optimizer with zero state of the right shapes, for the checkpoint with these keys to fill."""
        parameters = self._stepped(adapter)
        optimizer = self._optimizer(empty_settings(kind), parameters, adapter)
        names = {parameter: name for name, parameter in self._parameters()}
        momentum = any(f"optimizer/{names[parameter]}/momentum_buffer" in keys for parameter in parameters)
        for parameter in parameters:
            slots = zero_slots(kind, parameter, momentum=momentum)
            if isinstance(optimizer, HostOptimizer):
                optimizer.start(parameter, slots)
            else:
                optimizer.state[parameter] = slots

    def export(self, folder: Path, merge: str | None) -> None:
        lead = self.mesh.data_rank == 0
        export_weights(
            folder, self.weights(), self.adapter, names=self._shapes(), lora=self.lora, merge=merge, lead=lead
        )


class _Seen:
    """A program that keeps what it is shown."""

    trains: ClassVar[bool] = False

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Head] | None = None

    def compute(self, hidden: Tensor, head: Head, value: Tensor | None, step: MicroStep) -> Tensor:
        self.pair = hidden, head
        return torch.zeros((), device=hidden.device)

    def aside(self, step: MicroStep) -> None:
        return None

    def found(self) -> object:
        return self.pair

    def adopt(self, found: Sequence[object]) -> None:
        raise AssertionError("pipelines have no teachers")


def kind_of(optimizer: Stepper) -> str:
    """AdamW or SGD."""
    return optimizer.kind if isinstance(optimizer, HostOptimizer) else type(optimizer).__name__


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU, on every rank. Collective."""
    whole = _gathered(tensor) if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", copy=True)  # a copy: on one rank the whole is the live shard


def _gathered(tensor: DTensor) -> Tensor:
    """`full_tensor()` by blocking collectives: gloo's asynchronous one, which torch takes, ended one in about a hundred launches
    by a corrupt heap (torch 2.13, docs/log.md). Rows were cut over the last axis of the mesh first (policy.shard_policy: experts
    over ep, then over the replicas of theirs), so they are joined over the first axis first."""
    mesh, whole = tensor.device_mesh, tensor.to_local()
    # by type, since older torch calls both cuts equal: else a cut of what a later axis had cut already
    plain = [type(place) is Shard and place.dim == 0 for place in tensor.placements]
    assert plain == [False] * (mesh.ndim - 1) + [True], tensor.placements
    for axis, size in enumerate(mesh.shape):
        rows = tensor.shape[0] // math.prod(mesh.shape[axis + 1 :])
        padded = torch.cat([whole, whole.new_zeros(-(-rows // size) - len(whole), *whole.shape[1:])])
        group = mesh.get_group(axis)
        ranks = tuple(dist.get_process_group_ranks(group))
        whole = all_gather(padded, CPGroup(group, mesh.get_local_rank(axis), size, ranks))[:rows]
    return whole


def _freeze(policy: Policy, freeze: tuple[str, ...], adapter: Adapter) -> None:
    """Turn off gradients by part name or by fnmatch pattern; a name that matches nothing is an error."""
    parts = adapter.parts()
    for entry in freeze:
        matched = 0
        for name, parameter in policy.named_parameters():
            public = public_name(name)
            if any(public.startswith(p) for p in parts[entry]) if entry in parts else fnmatch.fnmatch(public, entry):
                parameter.requires_grad_(False)
                matched += 1
        if not matched:
            raise UserError(
                f"freeze={entry!r} matches no parameter. Parts of this model: {sorted(parts)}; or use a name pattern"
            )
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise UserError(f"freeze={freeze} leaves nothing to train")


def _check_offload(config: EngineConfig) -> None:
    if "checkpoints" in config.offload and config.recompute == "none":
        raise UserError(
            f"offload={config.offload} with recompute='none': there are no checkpoints to keep on the host. "
            "Set recompute='selective' or 'full', or leave 'checkpoints' out"
        )
    if "parameters" in config.offload and config.layout.ep > 1:
        raise UserError(
            f"offload={config.offload} with ep={config.layout.ep}: experts spread over ranks stay on their devices. Set ep=1, or leave "
            "'parameters' out"
        )


def _recompute(adapter: Adapter, policy: str, host: HostStore | None) -> None:
    """Recompute each layer in backward. "selective" differs from "full" by the attention cache in the context."""
    if policy == "none":
        return
    adapter.model.gradient_checkpointing_enable(CHECKPOINT)
    for layer in adapter.model.modules() if host is not None else ():
        if isinstance(layer, GradientCheckpointingLayer):
            layer._gradient_checkpointing_func = host.checkpoint
