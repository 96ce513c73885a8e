"""Faults in sums, ranks and steps: what is reduced where, what survives between calls, what the optimizer does."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import FSDPModule

from longspan.layout import CPGroup
from longspan.parity.mutation import Fault

BACKEND = "longspan.engine.fsdp.backend"
PROGRAM = "longspan.engine.program"


def averaged(original):
    """FSDP's own average over ranks is left on."""

    def shard_policy(policy, mesh, **kwargs):
        original(policy, mesh, **kwargs)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(mesh.data_ranks))

    return shard_policy


def times_cp(original):
    """The loss that is differentiated is multiplied by the CP size."""

    def compute(self, hidden, head, value, step):
        return original(self, hidden, head, value, step) * step.context.info.size

    return compute


def times_micro_step(original):
    """Each micro-step after the first counts half."""

    def run(self, steps, program):
        for number, step in enumerate(steps):
            before = {name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}
            original(self, [replace(step, reduces=True)], program)
            if number:
                for name, p in self.named_parameters():
                    if p.grad is not None and before[name] is not None:
                        p.grad = (p.grad + before[name]) / 2

    return run


def clears_first(original):
    def forward_backward(self, *args, **kwargs):
        self.clear_gradients()
        return original(self, *args, **kwargs)

    return forward_backward


def local_metrics(original):
    return lambda self, group=None: original(self, None)


def local_norm(original):
    return lambda parameters, group: original(parameters, CPGroup.alone())


def local_segments(original):
    return lambda ids, num, mask, group=None: original(ids, num, mask, None)


def coupled_decay(original):
    """Weight decay added to the gradient (Adam with L2) instead of decoupled, under AdamW's name."""
    coupled = type("AdamW", (torch.optim.Adam,), {})
    return lambda settings, parameters: coupled(parameters, **settings.options())


def stale_moments(original):
    """Moments are forgotten between steps."""

    def step(self, settings, adapter):
        self.optimizers.clear()
        return original(self, settings, adapter)

    return step


def clip_after(original):
    """Clipping that never scales anything."""
    return lambda norm, clip_norm: None


def plan_order(original):
    """Outputs in the order of the plan (longest first) instead of the caller's."""

    def collect(self, group):
        outputs = original(self, group)
        order = sorted(range(len(outputs)), key=lambda number: -self.lengths[number])
        return [outputs[number] for number in order]

    return collect


def skips_inert(original):
    """A rank with nothing to do leaves the micro-step out: the others wait for it."""
    return lambda self, steps, program: original(self, [step for step in steps if step.shard.samples], program)


def rank_drift(original):
    """One rank's weights move a little after each step."""

    def step(self, settings, adapter):
        report = original(self, settings, adapter)
        if self.mesh.data_rank == 1:
            with torch.no_grad():
                for _, parameter in self.named_parameters():
                    parameter.to_local().mul_(1 + 1e-7)
        return report

    return step


def rank_report(original):
    """One rank reports other numbers than the rest."""

    def optim_step(self, *args, **kwargs):
        report = original(self, *args, **kwargs)
        report["grad/norm"] *= 1 + 1e-12 * self.rank
        return report

    return optim_step


FAULTS = (
    Fault(
        "cp-factor",
        "A10 gradients averaged over ranks: the CP factor applied twice",
        ((f"{BACKEND}:shard_policy", averaged),),
        layout="cp2-ring",
    ),
    Fault(
        "cp-factor-loss",
        "A10 the loss multiplied by the CP size",
        ((f"{PROGRAM}:Train.compute", times_cp),),
        layout="cp2-ring",
    ),
    Fault(
        "micro-step-factor",
        "A10 later micro-steps count half",
        ((f"{BACKEND}:FSDPBackend.run", times_micro_step),),
        layout="dp2",
    ),
    Fault(
        "lost-call",
        "A2 each forward_backward clears the calls before it",
        (("longspan.engine.engine:Engine.forward_backward", clears_first),),
        layout="dp2",
        check="calls",
    ),
    Fault(
        "metrics-local",
        "E8 metrics of one rank instead of all",
        (("longspan.objective.stats:Stats.reduce", local_metrics),),
        layout="cp2-ring",
    ),
    Fault(
        "norm-local",
        "the gradient norm counts one rank's shards",
        ((f"{BACKEND}:gradient_norm", local_norm),),
        layout="dp2",
        check="weights",
    ),
    Fault(
        "gspo-local",
        "GSPO's sequence mean over one shard",
        ((f"{PROGRAM}:Segments", local_segments),),
        layout="cp2-ring",
        case="gspo",
    ),
    Fault(
        "weight-decay",
        "weight decay coupled into the gradient",
        ((f"{BACKEND}:make_optimizer", coupled_decay),),
        layout="dp2",
        check="weights",
    ),
    Fault(
        "moments",
        "Adam's moments are lost between steps",
        ((f"{BACKEND}:FSDPBackend.step", stale_moments),),
        layout="dp2",
        check="weights",
    ),
    Fault(
        "no-clip", "clip_norm is ignored", ((f"{BACKEND}:clip_coefficient", clip_after),), layout="dp2", check="weights"
    ),
    Fault(
        "output-order",
        "C7 outputs come back in the plan's order",
        (("longspan.engine.outputs:TokenBuffer.collect", plan_order),),
        layout="dp2",
        check="logprob",
    ),
    Fault(
        "inert-skipped",
        "C1 a rank without samples skips its micro-step",
        ((f"{BACKEND}:FSDPBackend.run", skips_inert),),
        layout="dp2",
        hangs=True,
        check="calls",
    ),
    Fault(
        "rank-drift",
        "J3 one rank's weights drift after a step",
        ((f"{BACKEND}:FSDPBackend.step", rank_drift),),
        layout="dp2",
        check="weights",
    ),
    Fault(
        "rank-report",
        "ranks disagree in the last bits of a number",
        (("longspan.engine.engine:Engine.optim_step", rank_report),),
        layout="dp2",
        check="weights",
    ),
)
