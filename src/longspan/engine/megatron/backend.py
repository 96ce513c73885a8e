"""The megatron backend: megatron-core's model parallelism under the engine's contract.

Weights are cut over tp and pp, experts over ep, and repeated over data ranks. Gradients stay local until they are read:
`step` and `gradients` sum them over the data ranks (and, for parameters that see a part of the heads or rows, over tp),
once for any number of calls; nothing divides. The sum, AdamW and the norm are this project's and torch's, since
megatron-core's DDP and optimizers allocate on CUDA by name. Optimizer state is cut over the data ranks (zero.py).
bf16: fp32 masters; gradients are added in fp32 after each micro-step.
"""

import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longspan.engine import checkpoint
from longspan.engine.backend import Head, Held, MicroStep, Program
from longspan.engine.common import (
    check_finite,
    check_shapes,
    empty_settings,
    export_weights,
    owners_of,
    pick_adapter,
    use_settings,
    zero_slots,
)
from longspan.engine.config import EngineConfig
from longspan.engine.megatron.build import build_chunks
from longspan.engine.megatron.copies import check_copies, spread_first
from longspan.engine.megatron.groups import make_groups
from longspan.engine.megatron.model import Stage
from longspan.engine.megatron.pipeline import UpToError, connect, run_pipeline
from longspan.engine.megatron.weights import Entry, Part, gather, gather_within, join, local, split, take, take_within
from longspan.engine.megatron.zero import own_slice, sum_into_slice, whole_from_slices
from longspan.engine.optim import SGD, AdamW, clip_coefficient, make_optimizer
from longspan.engine.optim import local as local_of
from longspan.errors import UserError
from longspan.layout import CPGroup, Mesh
from longspan.models.adapter import Adapter
from longspan.models.lora import adapter_of
from longspan.models.skeleton import MemoryWeights

__all__ = ["MegatronBackend"]


class MegatronBackend:
    """Backend protocol on megatron-core. Build with `MegatronBackend(config, adapter, mesh)` on every rank."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh) -> None:
        self.mesh, self.adapter, self.lora = mesh, adapter, config.lora or {}
        self.groups = make_groups(mesh)
        connect(self.groups, mesh.device)
        self.built = build_chunks(config, adapter, mesh, self.groups)
        self.shape, self.table = self.built.shape, self.built.table
        self.chunks = [stage for stage in self.built.chunks if isinstance(stage, Stage)]
        self.parameters = dict(self.built.chunks.named_parameters())
        self.masters, self.routing = self.built.masters, self.built.routing
        self.wide: dict[str, Tensor] = {}  # bf16: fp32 sums of gradients by parameter name
        self.slices = {name: own_slice(self.masters[name], self._repeats(entry)) for name, entry in self.trainable()}
        self.optimizers: dict[str | None, torch.optim.Optimizer] = {}  # one an adapter; None: what is in none
        self.touched: set[str | None] = set()  # whose gradients wait for a step
        self.stranded = False  # a call ended with tensors between two stages

    def run(self, steps: Iterable[MicroStep], program: Program) -> None:
        self._check_links()
        made = UpToError(list(steps) if self.shape.vpp > 1 else steps)  # interleaved: none starts if one cannot be made
        if program.trains:
            self.touched = set(self.lora) or {None}
        self.stranded = self.groups.pp.size > 1
        run_pipeline(self.chunks, self.groups, made, program, after_backward=self._widen)
        self.stranded = False
        made.check()
        if self.groups.pp.size > 1:
            self._share(program)

    def _check_links(self) -> None:
        if self.stranded:
            raise UserError(
                f"a call before failed half-way through the pipeline (pp={self.groups.pp.size}): its tensors between two stages would "
                "be taken for those of the next call. Start the run anew from its last checkpoint"
            )

    def opened(self, step: MicroStep) -> AbstractContextManager[tuple[Tensor, Head]]:
        raise UserError("backend='megatron' cannot be a teacher. Build it with backend='fsdp'")

    def held(self) -> Held | None:
        return None

    def _widen(self) -> None:
        """bf16: move the micro-step's gradients into fp32 sums; other dtypes add up in parameter.grad."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter and parameter.grad is not None:
                wide = parameter.grad.to(self.masters[name].dtype)
                self.wide[name] = self.wide[name].add_(wide) if name in self.wide else wide
                parameter.grad = None

    def _share(self, program: Program) -> None:
        """What every stage found reaches all of them."""
        blob = io.BytesIO()
        torch.save(program.found(), blob)
        blobs: list[bytes] = [b""] * self.groups.pp.size
        dist.all_gather_object(blobs, blob.getvalue(), group=self.groups.pp.group)
        load = partial(torch.load, map_location=self.mesh.device, weights_only=False)
        program.adopt([load(io.BytesIO(found)) for found in blobs])

    # gradients

    @contextmanager
    def per_call_grad_scaling(self, count: float) -> Iterator[None]:
        """Around one call of a model that insists on dividing its loss by `count` (its tokens, say): what the call adds is
        taken times `count` again, what was there stays, so k calls add whatever each was divided by.

        Scales the accumulators in place, by 1 / count and back: no second buffer, one rounding of what was there.
        """
        if not 0.0 < count < math.inf:
            raise UserError(f"per_call_grad_scaling({count}) needs the positive number that the model divides by")
        self._scale(1.0 / count)
        try:
            yield
        finally:
            self._scale(count)

    def _scale(self, factor: float) -> None:
        for held in (*self.wide.values(), *(p.grad for p in self.parameters.values() if p.grad is not None)):
            held.mul_(factor)

    def trainable(self) -> Iterator[tuple[str, Entry]]:
        """(parameter name, entry) of every trainable parameter of this rank, in the same order on its ranks."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                yield name, self.table[name]

    def _moved_by(self, adapter: str | None) -> list[tuple[str, Entry]]:
        """What a step moves: the factors of one adapter, with the value head where it is the only one; or everything."""
        owners = owners_of(self.lora, adapter)
        return [(name, entry) for name, entry in self.trainable() if adapter_of(entry.parts[0].name) in owners]

    def _repeats(self, entry: Entry) -> CPGroup:
        """The data ranks that hold the same parameter."""
        return self.groups.replica if entry.axis == "ep" else self.groups.data

    def _reduced(
        self, entries: Iterable[tuple[str, Entry]], sum_over_data: Callable[[Tensor, CPGroup], Tensor]
    ) -> dict[str, Tensor]:
        """Parameter name -> what sum_over_data makes of this rank's gradient, summed over whoever else has a part
        of it; what tensor-parallel ranks repeat is the first one's. Accumulators stay as they are. Collective."""
        found, repeated = {}, []
        for name, entry in entries:
            held = self.wide.get(name, self.parameters[name].grad)
            held = torch.zeros_like(self.masters[name]) if held is None else held.detach()
            found[name] = sum_over_data(held, self._repeats(entry))
            if entry.partial:
                _sum(found[name], self.groups.tp)
            elif not entry.over_tp:
                repeated.append(found[name])
        spread_first(repeated, self.groups.tp)
        if self.shape.tied and self.groups.pp.size > 1 and (self.groups.first or self.groups.last):
            last = f"{self.shape.vpp - 1}.gpt.output_layer.weight"
            name = "0.gpt.embedding.word_embeddings.weight" if self.groups.first else last
            if name in found:
                _sum(found[name], self.groups.ends)
        return found

    def gradients(self) -> dict[str, Tensor]:
        return self._whole(self._reduced(self.trainable(), _summed))

    def weights(self) -> dict[str, Tensor]:
        return self._whole({name: master.detach() for name, master in self.masters.items()})

    def _whole(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """{Hugging Face name: full CPU tensor} on every rank, in the model's order. Collective."""
        found = {}
        for name, value in values.items():
            entry = self.table[name]
            for part, piece in zip(entry.parts, split(value, entry, self.shape), strict=True):
                if not entry.copy:
                    piece = gather_within(piece, part, self.groups.tp)
                    whole = gather(piece, part, self._rows(part), self._group(part))
                    found[part.name] = whole.detach().to("cpu", copy=True)
        found = self._of_all_stages(found)
        return {name: found[name] for name in self.built.shapes if name in found}

    def _of_all_stages(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """What every stage found, on every stage: names by object, tensors one by one from the device. Collective."""
        group, every = self.groups.pp, dict(mine)
        for source, rank in enumerate(group.ranks if group.size > 1 else ()):
            sends = source == group.rank
            box = [[(name, value.shape, value.dtype) for name, value in mine.items()] if sends else []]
            dist.broadcast_object_list(box, src=rank, group=group.group)
            for name, shape, dtype in box[0]:
                device = self.mesh.device
                value = mine[name].to(device) if sends else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(value, src=rank, group=group.group)
                every[name] = mine[name] if sends else value.to("cpu", copy=True)
        return every

    def _group(self, part: Part) -> CPGroup:
        return self.groups.ep if part.axis == "ep" else self.groups.tp

    def _rows(self, part: Part) -> int:
        return self.built.shapes[part.name][part.dim] if part.axis else 0

    # the step

    def step(self, settings: AdamW | SGD, adapter: str | None) -> dict[str, float]:
        adapter = pick_adapter(self.lora, adapter)
        if adapter not in self.touched:
            raise UserError("optim_step found no gradient. Call forward_backward first")
        moved = self._moved_by(adapter)
        gradients = self._reduced(moved, sum_into_slice)
        norm = self._norm(gradients)
        parts = ((part.name, gradient) for name, gradient in gradients.items() for part in self.table[name].parts)
        check_finite(norm, parts, self.mesh.rank)
        coefficient = clip_coefficient(norm, settings.clip_norm)
        self._clear([name for name, _ in moved])
        self.touched.discard(adapter)
        optimizer = self._optimizer(settings, adapter)
        for name, gradient in gradients.items():
            self.slices[name].grad = gradient if coefficient is None else gradient * coefficient.to(gradient.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._publish()
        return {"grad/norm": float(norm), "grad/clip": 1.0 if coefficient is None else float(coefficient)}

    def _norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Global L2 norm from slices, each element counted once: repeated parameters by the first tp rank. [] fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for name, gradient in gradients.items():
            entry = self.table[name]
            if not entry.copy and (entry.over_tp or self.groups.tp.rank == 0):
                total += gradient.to(torch.float64).square().sum()
        if self.mesh.host_group is not None:
            dist.all_reduce(total, group=self.mesh.host_group)
        return total.sqrt()

    def _optimizer(self, settings: AdamW | SGD, adapter: str | None) -> torch.optim.Optimizer:
        """An adapter's optimizer with the settings of this step; its state starts at the first one."""
        if adapter not in self.optimizers:
            slices = [self.slices[name] for name, _ in self._moved_by(adapter)]
            # a pipeline stage may have no layer of this adapter, and torch wants a parameter
            self.optimizers[adapter] = make_optimizer(settings, slices or [torch.zeros(0)])
        optimizer = self.optimizers[adapter]
        use_settings(optimizer.param_groups, type(optimizer).__name__, settings)
        return optimizer

    def _publish(self) -> None:
        """The slices that moved make the masters whole on every data rank; under bf16 these reach what computes."""
        with torch.no_grad():
            for name, part in self.slices.items():
                group = self._repeats(self.table[name])
                if group.size > 1:
                    self.masters[name].copy_(whole_from_slices(part, self.masters[name], group))
            self._round()

    def _round(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.data.copy_(self.masters[name])

    def clear_gradients(self) -> None:
        """Raises UserError after a call that failed on its way between stages: no call can follow it."""
        self._check_links()
        self.touched.clear()
        self._clear(self.parameters)

    def _clear(self, names: Iterable[str]) -> None:
        for name in names:
            self.wide.pop(name, None)
            self.parameters[name].grad = None

    def has_gradients(self) -> bool:
        return bool(self.touched)

    # checkpoints

    def save(self, folder: Path) -> None:
        check_copies(self._labelled(), self.mesh)
        checkpoint.write_tensors(folder, self._state(), self.mesh)
        if self.mesh.rank == 0:
            kinds = {adapter or "": type(optimizer).__name__ for adapter, optimizer in self.optimizers.items()}
            (folder / "backend.json").write_text(json.dumps({"optimizers": kinds, "shapes": self.built.shapes}))

    def load(self, folder: Path, optimizer: bool) -> None:
        self._check_links()
        saved = json.loads((folder / "backend.json").read_text())
        shapes = {name: list(shape) for name, shape in self.built.shapes.items()}
        check_shapes(folder, saved["shapes"], shapes)
        self.optimizers = {}
        keys = checkpoint.saved_keys(folder)
        for adapter, kind in saved["optimizers"].items() if optimizer else ():
            self._empty_optimizer(adapter or None, kind, keys)
        state = self._state(copies=True)
        checkpoint.read_tensors(folder, state, self.mesh)
        self._fill(state)
        self._round()
        self.clear_gradients()

    def _labelled(self) -> dict[str, Tensor]:
        """Weights and optimizer state of this rank under labels that are equal where ranks hold the same."""
        held = {self._label("weights/{}", name): master for name, master in self.masters.items()}
        for key, name, value in self._moments():
            group = self._repeats(self.table[name])
            held[f"{self._label(key, name)}, slice {group.rank} of {group.size}"] = value
        return held

    def _label(self, key: str, name: str) -> str:
        part = self.table[name].parts[0]
        cuts = [group for cut, group in ((part.axis, self._group(part)), (part.within, self.groups.tp)) if cut]
        return ", ".join([key.format(part.name), *(f"part {group.rank} of {group.size}" for group in cuts)])

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """(key, parameter name, this rank's slice or a scalar) of optimizer state, in one order on all ranks."""
        for adapter, optimizer in self.optimizers.items():
            for name, _ in self._moved_by(adapter):
                for slot, value in optimizer.state[self.slices[name]].items():
                    if value is not None:
                        yield "optimizer/{}/" + slot, name, value

    def _state(self, copies: bool = False) -> dict[str, Tensor]:
        """Flat {key: tensor} under Hugging Face names, cut tensors as DTensors of their wholes. Collective."""
        state: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            self._put(state, "weights/{}", name, master.detach(), copies)
        for key, name, value in self._moments():
            group = self._repeats(self.table[name])
            whole = value if value.dim() == 0 else whole_from_slices(value, self.masters[name], group)
            self._put(state, key, name, whole, copies)
        return state

    def _put(self, state: dict[str, Tensor], key: str, name: str, value: Tensor, copies: bool) -> None:
        entry = self.table[name]
        if entry.copy and not copies:
            return
        pieces = [value] * len(entry.parts) if value.dim() == 0 else split(value, entry, self.shape)
        for part, piece in zip(entry.parts, pieces, strict=True):
            state[key.format(part.name)] = piece.clone() if value.dim() == 0 else self._spread(piece, part)

    def _spread(self, piece: Tensor, part: Part) -> Tensor:
        piece, group = gather_within(piece, part, self.groups.tp), self._group(part)
        if part.axis is None or group.group is None:
            return piece.contiguous()
        whole = torch.empty(self.built.shapes[part.name], device="meta")
        if part.segments:
            return gather(piece, part, self._rows(part), group)
        real = local(piece, part, self._rows(part), group).contiguous()
        mesh = self.built.meshes[part.axis]
        return DTensor.from_local(
            real, mesh, [Shard(part.dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def _fill(self, state: dict[str, Tensor]) -> None:
        """Copy loaded pieces back into weights and moments."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(self._joined(state, "weights/{}", name))
            for key, name, value in self._moments():
                if value.dim() == 0:
                    value.copy_(state[key.format(self.table[name].parts[0].name)])
                else:
                    value.copy_(own_slice(self._joined(state, key, name), self._repeats(self.table[name])))

    def _joined(self, state: dict[str, Tensor], key: str, name: str) -> Tensor:
        """A parameter's shape, from the pieces of its Hugging Face tensors."""
        entry = self.table[name]
        joined = join([self._own(state[key.format(part.name)], part) for part in entry.parts], entry, self.shape)
        whole = torch.zeros_like(self.masters[name])  # a padded vocabulary has more rows
        whole[: len(joined)] = joined
        return whole

    def _own(self, loaded: Tensor, part: Part) -> Tensor:
        """This rank's part of what a checkpoint gave."""
        if not part.segments:
            return take_within(local_of(loaded), part, self.groups.tp)
        return take(MemoryWeights({part.name: loaded}), part, self._rows(part), self._group(part))

    def _empty_optimizer(self, adapter: str | None, kind: str, keys: Collection[str]) -> None:
        """An optimizer with zero state of the right shapes, for the checkpoint with these keys to fill."""
        optimizer = self._optimizer(empty_settings(kind), adapter)
        moved = self._moved_by(adapter)
        momentum = any(f"optimizer/{part.name}/momentum_buffer" in keys for _, entry in moved for part in entry.parts)
        for name, _ in moved:
            optimizer.state[self.slices[name]] = zero_slots(kind, self.slices[name], momentum=momentum)

    def export(self, folder: Path, merge: str | None) -> None:
        lead = self.mesh.rank == 0
        export_weights(
            folder, self.weights(), self.adapter, names=self.built.shapes, lora=self.lora, merge=merge, lead=lead
        )


def _summed(x: Tensor, group: CPGroup) -> Tensor:
    total = x.clone()
    _sum(total, group)
    return total


def _sum(x: Tensor, group: CPGroup) -> None:
    if group.group is not None:
        dist.all_reduce(x, group=group.group)
