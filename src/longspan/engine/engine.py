"""The conductor. Read this first: `Engine.forward_backward` is the whole of Longspan in six lines.

samples -> weights -> plan -> streams -> shards -> hidden -> log-probs -> token losses -> sum(w * l) -> gradients -> step

Every rank builds the same engine and passes the same samples; every rank gets the same outputs. The engine knows samples,
weights and plans; the backend knows parameters; the layout decides where tokens live and changes no number.
"""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from longspan.data import Plan, Sample, check_fit, check_samples
from longspan.engine import rng
from longspan.engine.backend import Backend
from longspan.engine.batch import Batch, fingerprint, make_batch
from longspan.engine.checkpoint import publish, telling, verify
from longspan.engine.common import check_same_settings
from longspan.engine.config import DTYPES, EngineConfig
from longspan.engine.fsdp.backend import FSDPBackend
from longspan.engine.fsdp.compiled import keeps_of
from longspan.engine.memory import peak_gib, reset_peak
from longspan.engine.optim import SGD, AdamW
from longspan.engine.outputs import Outputs, TokenBuffer
from longspan.engine.planning import Expected, Planner, heads_per_rank, mixer_choice
from longspan.engine.program import WEIGHT, Forward, Train
from longspan.engine.reductions import Reductions, Room, Traffic, marked
from longspan.engine.steps import Keep, StepBuilder
from longspan.engine.teachers import check_teacher, with_teacher
from longspan.errors import RankError, UserError
from longspan.launch import world
from longspan.layout import Mesh, resolve
from longspan.models.adapter import Adapter, tower_trains
from longspan.models.loading import load_model
from longspan.models.moe import check_routes, moe_shape, route_shares
from longspan.models.mtp import shifted
from longspan.models.skeleton import load_skeleton
from longspan.objective import Objective, Stats, over_batch, over_samples, token_weights
from longspan.objective.losses import TEACHER
from longspan.typed import typed

__all__ = ["Engine"]


def _megatron(config: EngineConfig, adapter: Adapter, mesh: Mesh) -> Backend:
    """The megatron backend, imported when asked for: megatron-core is an extra, and importing it takes 7 s."""
    if importlib.util.find_spec("megatron") is None:
        raise UserError("backend='megatron' needs megatron-core==0.19.2, which is not installed. See docs/megatron.md")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and TransformerEngine, which this backend does without
        from longspan.engine.megatron.backend import MegatronBackend

        return MegatronBackend(config, adapter, mesh)


BACKENDS: dict[str, Callable[[EngineConfig, Adapter, Mesh], Backend]] = {"fsdp": FSDPBackend, "megatron": _megatron}
# the megatron backend's ranks read only their own part of the weights
LOADERS: dict[str, Callable[[str, torch.dtype, int], Adapter]] = {
    "fsdp": lambda name, dtype, seed: load_model(name, dtype, seed)[0],
    "megatron": load_skeleton,
}
OUTPUTS = ("logprob", "entropy", "value", "routed_experts", *TEACHER)
ROUTES = "routed_experts"  # sample field [L, layers, k]: experts to replay


class Engine:
    """One model under one layout. Build with `Engine.build(config)` inside every rank."""

    def __init__(self, config: EngineConfig, adapter: Adapter, mesh: Mesh, backend: Backend, why: str = "") -> None:
        self.config = config
        self.adapter = adapter
        self.mesh = mesh
        self.backend = backend
        self.planner = Planner(config, adapter, mesh, why)
        self.reductions = Reductions(self.planner, backend, mesh.device)
        self.builder = StepBuilder(config, adapter, mesh, DTYPES[config.dtype])
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32
        # whether selective recomputation runs a tower again: neither a frozen one nor megatron's
        self.tower_again = config.backend == "fsdp" and tower_trains(adapter)
        self.experts = moe_shape(adapter.model)  # None: a dense model
        self.step = 0
        self.alone = False  # the accumulated gradient is that of a call that must be its step's only one
        self.torn = False  # a call stopped half-way: the accumulators hold a part of its gradient

    @classmethod
    @typed
    def build(cls, config: EngineConfig) -> "Engine":
        """Load the model, check that the layout fits it and the ranks, and shard it. Collective.

        Raises UserError (a ValueError) on every rank for a layout or a setting that cannot be honoured.
        """
        here = world()
        check_same_settings(config, here.ranks)
        if config.backend not in BACKENDS:
            raise UserError(f"backend={config.backend!r} is not built yet. Use one of {sorted(BACKENDS)}")
        master = torch.float64 if config.dtype == "float64" else torch.float32
        adapter = LOADERS[config.backend](config.model, master, config.seed)
        heads, kv_heads = heads_per_rank(config.layout, adapter)
        choice = mixer_choice(config, adapter)
        layout = resolve(
            choice.layout,
            heads=heads,
            kv_heads=kv_heads,
            recurrent=adapter.recurrent,
            windowed=adapter.windowed,
            model=config.model if config.layout.tp == 1 else f"{config.model} at tp={config.layout.tp}",
        )
        if reason := adapter.linear_refusal(layout.linear, layout.cp):
            raise UserError(reason)
        mesh = Mesh(layout, ranks=here.ranks, rank=here.rank, device=here.device)
        return cls(config, adapter, mesh, BACKENDS[config.backend](config, adapter, mesh), choice.why)

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @typed
    def forward_backward(
        self,
        samples: Sequence[Sample],
        objective: Objective | Callable[..., Tensor],
        normalise: str = "token",
        denominator: float | Mapping[str, float] | None = None,
        teacher: "Engine | None" = None,
    ) -> dict[str, float]:
        """Add the exact gradient of sum(weight * token loss) to the accumulators; returns the metrics of this call.

        samples: the same on every rank, in the same order. objective: an Objective, or a callable fn(out, fields) -> [T].
        normalise, denominator: see objective/weights.py. k calls with parts of a batch add up to one call with all of it.
        teacher: a second engine of the same vocabulary on the same ranks, for losses that read teacher_kl ("distill_full").
        Raises UserError naming the sample and the rule; then nothing was added. After a call that stops half-way (an image file
        that is cut off, no memory) only clear_gradients() or load() goes on; under pp > 1 only after files that cannot be read:
        after any other failure both refuse, and the run starts anew.
        """
        started = self._start()
        with telling(self.mesh):
            self._check_whole()
            objective = self._check(samples, objective, teacher)
            weights = token_weights(
                samples, objective, normalise, denominator=denominator, by_adapter=self.config.lora is not None
            )
            batch = self._admit(samples, objective.stream_fields(samples), weights, objective.moe_over)
            plan = self.planner.plan(batch)
            mark, room = self._mark(batch), self.reductions.room(batch, plan)
        traffic = self.reductions.traffic(plan, self._agree(batch, plan, mark, settings_of(objective), room))
        steps = self.builder.steps(batch, plan, self._keep(objective))  # pack, shard: one micro-step at a time
        steps = marked(steps, plan, traffic)
        steps = steps if teacher is None else with_teacher(steps, teacher, samples, plan)
        shares = self._shares(samples, weights["moe_aux"]) if objective.shares_routes else None
        program = Train(objective, Stats(self.mesh.device), objective.stream_fields(samples), shares)
        self.torn = True
        self.backend.run(steps, program)
        self.torn = False
        self.alone = objective.moe_over == "batch"
        expected = self.planner.expect(batch, plan)  # while the device still works: nothing before reduce waits for it
        return program.stats.reduce(self.mesh.all) | self._measured(expected, traffic, started)

    @typed
    def forward(
        self, samples: Sequence[Sample], outputs: Sequence[str] = ("logprob",), topk: int | None = None
    ) -> list[Outputs]:
        """Outputs per token of each sample, in the caller's order, equal on every rank; each [L] on the CPU.

        outputs: of "logprob" (of target_ids, at the sample's temperature), "entropy" (nats), "value", "routed_experts" [L,
        layers, k], and "teacher_ids", "teacher_logprob" [L, topk]: this model's `topk` likeliest next tokens, as "distill_topk"
        reads them. Tokens outside the mask have a placeholder target: what the head says of them is 0.
        """
        with telling(self.mesh):
            self._check_outputs(outputs, topk)
            batch = self._admit(samples, (), {})
            plan = self.planner.plan(batch)
            mark = self._mark(batch)
        self._agree(batch, plan, mark, repr((tuple(outputs), topk)))
        buffer = TokenBuffer(batch.lengths, self.mesh.device)
        self.backend.run(
            self.builder.steps(batch, plan, Keep(routes=ROUTES in outputs)), Forward(tuple(outputs), buffer, topk)
        )
        return buffer.collect(self.mesh.all)

    @typed
    def check(self, samples: Sequence[Sample]) -> None:
        """Refuse at start what a call would refuse later: ids outside the vocabulary, a sample that fits no row. Not collective.

        Samples are looked at one by one, so this takes a whole data set. Raises UserError naming the sample.
        """
        check_samples(samples, vocab_size=self.adapter.vocab_size)
        lengths = [len(sample) for sample in samples]
        check_fit(lengths, self.planner.limits(lengths))

    def gradients(self) -> dict[str, Tensor]:
        """{Hugging Face parameter name: full gradient on the CPU}, before clipping. Collective; changes nothing.

        Tied weights once, frozen ones absent, unused ones zero; fp32 (fp64 in fp64).
        """
        self._check_whole()
        return self.backend.gradients()

    def state_dict(self) -> dict[str, Tensor]:
        """{Hugging Face parameter name: full master weight on the CPU}. Collective."""
        return self.backend.weights()

    def clear_gradients(self) -> None:
        """Drop what forward_backward accumulated since the last step."""
        self.backend.clear_gradients()
        self.torn = False

    @typed
    def optim_step(self, settings: AdamW | SGD, adapter: str | None = None) -> dict[str, float]:
        """Clip by the global norm, step once, clear. Returns grad/norm (before clipping), grad/clip, step and time.

        With gradients of zero this is still a step: weight decay applies and moments decay. Raises UserError if nothing was
        accumulated or the norm is not finite, RankError if ranks pass different settings; weights are unchanged then.
        """
        started = self._start()
        with telling(self.mesh):
            self._check_whole()
        said = self.mesh.gather_objects((settings, adapter))
        hear(said)
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise RankError(
                    f"rank {rank} steps with {theirs}, rank 0 with {said[0]}. Every rank must pass the same settings"
                )
        report = self.backend.step(settings, adapter)
        self.step += 1
        return report | {"step": float(self.step), "lr": settings.lr, "time/optim_step_s": perf_counter() - started}

    @typed
    def save(self, path: str | Path) -> None:
        """Write weights, optimizer state, random state and the step to folder `path`; all or nothing.

        Raises CheckpointError on every rank if any rank could not write (a full disk, say); `path` then holds what it held.
        """
        with telling(self.mesh):
            if self.torn or self.backend.has_gradients():
                raise UserError(
                    "save between forward_backward and optim_step would lose the gradients. Step or clear_gradients() first"
                )

        def write(folder: Path) -> None:
            self.backend.save(folder)
            rng.save(folder / f"rng-{self.mesh.rank}.pt")
            if self.mesh.rank == 0:
                (folder / "step").write_text(str(self.step))

        publish(Path(path), self.mesh, write)

    @typed
    def load(self, path: str | Path, optimizer: bool = True) -> None:
        """Restore what `save` wrote, under any dp x cp, bit for bit. optimizer=False loads the weights only.

        Raises CheckpointError on every rank for a missing, corrupt or foreign checkpoint, before anything changed.
        """
        path = Path(path)
        verify(path, self.mesh)
        self.backend.load(path, optimizer)
        self.torn = False
        if optimizer:
            self.step = int((path / "step").read_text())
            rng.load(path, self.mesh.rank)

    @typed
    def export(self, path: str | Path, merge: str | None = None) -> None:
        """Write a Hugging Face folder (safetensors and config) that plain `transformers` loads.

        With LoRA: the adapter in peft's format (a folder each where there are several); merge=name instead writes the whole
        model with that adapter added into its weights.
        """
        publish(Path(path), self.mesh, lambda folder: self.backend.export(folder, merge))

    def _check_whole(self) -> None:
        if self.torn:
            raise UserError(
                "a forward_backward before stopped half-way: what it added is a part of its gradient. Call "
                "engine.clear_gradients() and pass the samples of this step again"
            )

    def _check(
        self, samples: Sequence[Sample], objective: Objective | Callable[..., Tensor], teacher: "Engine | None"
    ) -> Objective:
        objective = objective if isinstance(objective, Objective) else Objective(objective)
        if not samples:
            raise UserError("the batch has no samples. Pass at least one")
        if objective.needs_value and not self.config.value_head:
            raise UserError(
                f"objective {objective.name!r} trains values: build the engine with EngineConfig(value_head=True)"
            )
        if (objective.moe_aux or objective.moe_z) and self.experts is None:
            raise UserError(f"moe_aux and moe_z need a mixture-of-experts model; {self.config.model} has no experts")
        if objective.mtp and not self.config.mtp_steps:
            raise UserError(
                f"mtp={objective.mtp} trains a multi-token-prediction head: set EngineConfig(mtp_steps=1) or more"
            )
        if objective.needs_teacher != (teacher is not None):
            says = "needs teacher=, a second engine" if teacher is None else "reads no teacher, but teacher= was given"
            raise UserError(
                f"objective {objective.name!r} {says}. A teacher goes with 'distill_full', or with a callable that "
                "uses 'teacher_kl'"
            )
        if teacher is not None:
            check_teacher(self, teacher)
        self._check_alone(samples, objective)
        objective.check(samples)
        return objective

    def _check_outputs(self, outputs: Sequence[str], topk: int | None) -> None:
        unknown = [name for name in outputs if name not in OUTPUTS]
        if unknown:
            raise UserError(f"outputs={unknown} are unknown. Use some of {OUTPUTS}")
        if "value" in outputs and not self.config.value_head:
            raise UserError("outputs=('value',) needs EngineConfig(value_head=True)")
        if ROUTES in outputs and self.experts is None:
            raise UserError(
                f"outputs=({ROUTES!r},) needs a mixture-of-experts model; {self.config.model} has no experts"
            )
        asked = [name for name in outputs if name in TEACHER]
        if bool(asked) != (topk is not None):
            raise UserError(
                f"topk={topk!r} goes with the outputs {TEACHER}, and outputs={tuple(outputs)}. Give both or none"
            )
        if topk is not None and not (type(topk) is int and 1 <= topk <= self.adapter.vocab_size):
            raise UserError(
                f"topk={topk!r} must be a whole number from 1 to the vocabulary's {self.adapter.vocab_size} of {self.config.model}"
            )

    def _check_alone(self, samples: Sequence[Sample], objective: Objective) -> None:
        """moe_over="batch": one call is the whole batch of an optimizer step, and brings the routes it counts."""
        if (objective.moe_over == "batch" or self.alone) and self.backend.has_gradients():
            raise UserError(
                "moe_over='batch' counts the tokens of one call, which must be the only one before optim_step; gradients of an "
                "earlier call are waiting. Pass all samples in one call after optim_step or clear_gradients(), or use "
                "moe_over='sample'"
            )
        without = [number for number, sample in enumerate(samples) if ROUTES not in sample.fields]
        if objective.shares_routes and without:
            raise UserError(
                f"moe_over='batch' with moe_aux needs recorded routes, and sample {without[0]} has no field {ROUTES!r}. Record "
                f"them with engine.forward(samples, outputs=({ROUTES!r},)), or use moe_over='sample'"
            )
        adapters = sorted({str(sample.adapter) for sample in samples})
        if objective.moe_over == "batch" and len(adapters) > 1:
            raise UserError(
                f"moe_over='batch' over the adapters {adapters} would mix their routes. Call once an adapter, with a step "
                "after each, or use moe_over='sample'"
            )

    def _shares(self, samples: Sequence[Sample], weights: Sequence[Tensor]) -> Tensor:
        """[layers, E]: what share of the tokens of all samples that weigh was sent to each expert."""
        assert self.experts is not None, "_check refuses dense models"
        weighing = [sample for sample, weight in zip(samples, weights, strict=True) if bool(weight.any())]
        routes = [sample.fields[ROUTES] for sample in weighing or samples]
        return route_shares(routes, self.experts.experts).to(self.mesh.device)

    def _keep(self, objective: Objective) -> Keep:
        selective = self.config.recompute == "selective"
        return Keep(
            attention=selective and keeps_of(self.config) is None,  # compiled layers keep it themselves
            tower=selective and self.tower_again,
            router_logits=bool(objective.moe_aux or objective.moe_z),
        )

    def _admit(
        self,
        samples: Sequence[Sample],
        fields: Sequence[str],
        weights: Mapping[str, Sequence[Tensor]],
        moe_over: str = "sample",
    ) -> Batch:
        """The checked batch as per-token tensors, weights included."""
        streams = {WEIGHT + term: values for term, values in weights.items()}
        spread = over_batch if moe_over == "batch" else over_samples
        for term in ("moe_aux", "moe_z"):  # these weigh a sample, or the batch, as a whole
            if term in weights:
                streams[WEIGHT + term] = spread(weights[term])
        if "mtp" in weights:  # the weight of the token predicted, as a mean over steps
            steps = self.config.mtp_steps
            streams[WEIGHT + "mtp"] = [shifted(values, steps) / steps for values in weights["mtp"]]
        routes = [sample.fields.get(ROUTES) for sample in samples]
        check_routes(routes, self.experts, self.config.model)
        replay = [ROUTES] if any(ROUTES in sample.fields for sample in samples) else []
        names = tuple(dict.fromkeys([*fields, "temperature", *replay]))
        return make_batch(
            samples, self.adapter, weights=streams, fields=names, dtype=self.dtype, routing=self.backend.routing
        )

    def _mark(self, batch: Batch) -> int:
        """The batch's fingerprint; one rank has nobody to differ from."""
        return fingerprint(batch) if self.mesh.ranks > 1 else 0

    def _agree(self, batch: Batch, plan: Plan, mark: int, settings: str, room: Room | None = None) -> list[Room | None]:
        """Every rank must hold the same batch, plan and settings; a difference is an error that names the rank, not a hang.
        Returns each rank's `room`: they all decide from the same."""
        mine = (mark, len(plan.micro_steps), sum(batch.lengths), hash(plan))
        said = self.mesh.gather_objects((mine, settings, room))
        hear(said)
        for rank, (theirs, asked, _) in enumerate(said):
            if theirs != said[0][0]:
                raise RankError(
                    f"rank {rank} has (batch checksum, micro-steps, tokens, plan) = {theirs}, rank 0 has {said[0][0]}. Every rank must "
                    "pass the same samples in the same order to the same call"
                )
            if asked != said[0][1]:
                raise RankError(
                    f"rank {rank} asks for {asked}, rank 0 for {said[0][1]}. Every rank must pass the same settings"
                )
        return [each for _, _, each in said]

    def _start(self) -> float:
        reset_peak()
        return perf_counter()

    def _measured(self, expected: Expected, traffic: Traffic, started: float) -> dict[str, float]:
        """Speed and memory of this rank: the only numbers that depend on the layout."""
        seconds = perf_counter() - started
        report = {"time/forward_backward_s": seconds, "mem/peak_gib": peak_gib()}
        return report | traffic.report() | self.planner.observe(expected, seconds)


def hear(said: Sequence[object]) -> None:
    """Raises where a rank told its failure in the place of what it had to pass (checkpoint.telling)."""
    for rank, each in enumerate(said):
        if isinstance(each, str):
            raise UserError(f"rank {rank} refuses this call: {each}")


def settings_of(objective: Objective) -> str:
    """What every rank must ask for alike; of a callable its name only."""
    return repr(
        {each.name: getattr(objective, each.name) for each in dataclass_fields(objective) if each.name != "loss"}
    )
