"""Faults in how tokens meet: attention across ranks, vision features, the LM head."""

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from longspan.parity.mutation import Fault

ATTENTION = "longspan.mixers.attention"  # what ring and gather attend by
RING = "longspan.mixers.ring"
GATHER = "longspan.mixers.gather"
OVERLAP = "longspan.mixers.gather_overlap"  # gather over symmetric memory: faults of gather are planted in both
ULYSSES = "longspan.mixers.ulysses"


def one_document(info):
    """The same row with every boundary forgotten."""
    return replace(info, cu_seqlens=info.cu_seqlens[[0, -1]])


def boundaries_dropped(original):
    return lambda self, info, device: original(self, one_document(info), device)


def first_boundary_dropped(original):
    """Only the boundary behind the first document is forgotten."""

    def prepare(self, info, device):
        cu = info.cu_seqlens
        return original(self, replace(info, cu_seqlens=torch.cat([cu[:1], cu[2:]])) if len(cu) > 3 else info, device)

    return prepare


def lse_bf16(original):
    def add(self, rows, out, lse, *, fresh):
        original(self, rows, out, lse.bfloat16().to(lse.dtype), fresh=fresh)

    return add


def out_bf16(original):
    def add(self, rows, out, lse, *, fresh):
        original(self, rows, out.bfloat16().to(out.dtype), lse, fresh=fresh)

    return add


def merged_without_lse(original):
    """Partial outputs averaged with equal weight."""

    def add(self, rows, out, lse, *, fresh):
        original(self, rows, out, torch.zeros_like(lse), fresh=fresh)

    return add


def last_hop_skipped(original):
    return lambda info, window: max(original(info, window) - 1, 0)


class Still:
    """Tensors that did not travel."""

    def __init__(self, tensors):
        self.tensors = tensors

    def wait(self):
        return self.tensors


def stays_away(original):
    """Key gradients are added where they were made instead of where the keys live."""

    def rotate(self, tensors, group, *, hops=1):
        return original(self, tensors, group, hops=hops) if hops > 0 else Still(tensors)

    return rotate


def own_part_only(original):
    """A reduce-scatter that keeps the rank's own contribution and drops the others'."""
    return lambda x, group: x.chunk(group.size)[group.rank].contiguous() if group.size > 1 else x


def nothing_goes_home(original):
    """As above, where gradients go home hop by hop: none does."""
    return lambda info, window: 0


def first_copy_only(original):
    """Gradients of KV head copies: the first one instead of the sum."""

    def collect(grad, slots, kv_heads):
        if slots == tuple(range(kv_heads)):
            return grad
        return torch.stack([grad[:, slots.index(head)] for head in range(kv_heads)], 1)

    return collect


def rotated_heads(original):
    """Heads come back in the wrong rank order."""
    return lambda x, size: original(x, size).roll(1, 0)


def no_window(original):
    def core(prepared, q, k, v, *, work, sink=None, saved=None):
        return original(prepared, q, k, v, work=replace(work, window=None), sink=sink, saved=saved)

    return core


def no_sink(original):
    return lambda prepared, q, k, v, *, work, sink=None, saved=None: original(
        prepared, q, k, v, work=work, sink=None, saved=saved
    )


def one_slot(original):
    """Every layer recomputes with the first layer's attention."""
    return lambda self, layer: original(self, 0)


def scale_squared(original):
    def core(prepared, q, k, v, *, work, sink=None, saved=None):
        return original(prepared, q, k, v, work=replace(work, scale=work.scale**2), sink=sink, saved=saved)

    return core


def no_deepstack(original):
    def tower(*args):
        out = original(*args)
        out.deepstack_features = [torch.zeros_like(features) for features in out.deepstack_features]
        return out

    return tower


def detached(original):
    return lambda features, media: original(features.detach(), media)


def temperature_on_logprobs(original):
    def head(hidden, weight, targets, *, temperature=None, **kwargs):
        made = original(hidden, weight, targets, temperature=None, **kwargs)
        return made if temperature is None else replace(made, logprob=made.logprob / temperature.to(made.logprob.dtype))

    return head


def logits_bf16(original):
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, **kwargs):
        return original(hidden.bfloat16().to(hidden.dtype), weight, targets, **kwargs)

    return head


def entropy_without_gradient(original):
    def head(*args, **kwargs):
        made = original(*args, **kwargs)
        return made if made.entropy is None else replace(made, entropy=made.entropy.detach())

    return head


def temperature_on_logprobs_once(original):
    """The same inside the head that forms the loss."""

    def head(hidden, weight, targets, *, loss, temperature=None, **kwargs):
        def late(out, where):
            return loss(replace(out, logprob=out.logprob / temperature[where].to(out.logprob.dtype)), where)

        return original(hidden, weight, targets, loss=loss if temperature is None else late, **kwargs)

    return head


def entropy_without_gradient_once(original):
    def head(hidden, weight, targets, *, loss, **kwargs):
        def detached_loss(out, where):
            return loss(out if out.entropy is None else replace(out, entropy=out.entropy.detach()), where)

        return original(hidden, weight, targets, loss=detached_loss, **kwargs)

    return head


HEAD = "longspan.engine.program:head_outputs"
HEAD_LOSS = "longspan.engine.program:head_loss"  # token-wise losses go through it
VL = "tiny:qwen3_vl"


def teacher_rolled(original):
    """The teacher's states of the token before."""

    @contextmanager
    def opened(self, step):
        with original(self, step) as (hidden, head):
            yield hidden.roll(1, 0), head

    return opened


def teacher_untempered(original):
    def chunk(self, part, ours):
        t, rows = original(self, part, ours)
        return t, replace(rows, temperature=torch.ones_like(rows.temperature))

    return chunk


def other_direction(original):
    return property(lambda self: "forward" if original.fget(self) == "reverse" else "reverse")


FAULTS = (
    Fault(
        "boundary",
        "D1 the ring forgets document boundaries",
        ((f"{RING}:Ring.prepare", boundaries_dropped),),
        layout="cp2-ring-contiguous",
    ),
    Fault(
        "boundary-gather",
        "D1 gather forgets document boundaries",
        ((f"{GATHER}:Gather.prepare", boundaries_dropped), (f"{OVERLAP}:OverlappedGather.prepare", boundaries_dropped)),
        layout="cp2-gather",
    ),
    Fault(
        "boundary-ulysses",
        "D1 ulysses forgets document boundaries",
        ((f"{ULYSSES}:Ulysses.prepare", boundaries_dropped),),
        layout="cp2-ulysses",
    ),
    Fault(
        "boundary-local",
        "D7 packed documents attend to each other without CP",
        (("longspan.mixers.local:Local.prepare", boundaries_dropped),),
        layout="dp2",
    ),
    Fault(
        "boundary-first",
        "D7 one boundary of a packed row is forgotten",
        (
            (f"{GATHER}:Gather.prepare", first_boundary_dropped),
            (f"{OVERLAP}:OverlappedGather.prepare", first_boundary_dropped),
        ),
        layout="cp2-gather",
    ),
    Fault(
        "lse-bf16",
        "F13 the log-sum-exp of a ring step in bf16",
        (("longspan.mixers.merge:PartialSoftmax.add", lse_bf16),),
        layout="cp2-ring",
    ),
    Fault(
        "out-bf16",
        "F13 partial outputs of a ring step in bf16",
        (("longspan.mixers.merge:PartialSoftmax.add", out_bf16),),
        layout="cp2-ring",
    ),
    Fault(
        "merge-equal",
        "partial attention outputs averaged without their log-sum-exp",
        (("longspan.mixers.merge:PartialSoftmax.add", merged_without_lse),),
        layout="cp2-ring",
    ),
    Fault("ring-short", "the ring stops one hop early", ((f"{RING}:reach", last_hop_skipped),), layout="cp3-ring"),
    Fault(
        "ring-home",
        "key gradients are not sent home after the ring",
        (("longspan.mixers.transport:Collective.rotate", stays_away),),
        layout="cp3-ring",
    ),
    Fault(
        "gather-sum",
        "gather's backward keeps only its own key gradients",
        ((f"{GATHER}:reduce_scatter", own_part_only), (f"{OVERLAP}:reach", nothing_goes_home)),
        layout="cp2-gather",
    ),
    Fault(
        "kv-copies",
        "H1 gradients of repeated KV heads are not summed",
        ((f"{ULYSSES}:collect", first_copy_only),),
        layout="cp4-ulysses",
    ),
    Fault(
        "head-order",
        "ulysses deals heads to the wrong ranks",
        ((f"{ULYSSES}:_split_heads", rotated_heads),),
        layout="cp2-ulysses",
    ),
    Fault(
        "window",
        "D5 CP drops the sliding window",
        ((f"{ATTENTION}:core_attention", no_window),),
        model="tiny:mistral",
        layout="cp2-gather",
    ),
    Fault("scale", "attention scaled twice", ((f"{ATTENTION}:core_attention", scale_squared),), layout="cp2-ring"),
    Fault(
        "recompute-slot",
        "recomputation takes another layer's attention",
        (("longspan.mixers.attention:AttentionCache.slot", one_slot),),
        layout="cp2-ring",
    ),
    Fault(
        "vision-gradient",
        "G12 a rank keeps only its own part of the vision gradient",
        (("longspan.models.vision:reduce_scatter", own_part_only),),
        model=VL,
        layout="cp2-ulysses",
    ),
    Fault(
        "vision-detached",
        "the vision tower gets no gradient",
        (("longspan.models.qwen3_vl:place_rows", detached),),
        model=VL,
        layout="dp2",
    ),
    Fault(
        "deepstack",
        "DeepStack features are dropped",
        (("longspan.models.qwen3_vl:run_tower", no_deepstack),),
        model=VL,
        layout="dp2",
    ),
    Fault(
        "temperature-late",
        "F5 temperature divides log-probs instead of logits",
        ((HEAD, temperature_on_logprobs), (HEAD_LOSS, temperature_on_logprobs_once)),
        layout="dp2",
    ),
    Fault(
        "head-bf16",
        "the LM head reads bf16 hidden states",
        ((HEAD, logits_bf16), (HEAD_LOSS, logits_bf16)),
        layout="dp2",
    ),
    Fault(
        "entropy-gradient",
        "the entropy bonus is measured but has no gradient",
        ((HEAD, entropy_without_gradient), (HEAD_LOSS, entropy_without_gradient_once)),
        layout="dp2",
    ),
    Fault(
        "teacher-shift",
        "the teacher's states lie one token off the student's",
        (("longspan.engine.fsdp.backend:FSDPBackend.opened", teacher_rolled),),
        case="distill_full",
    ),
    Fault(
        "teacher-untempered",
        "the teacher's logits are not tempered",
        (("longspan.objective.teacher:TeacherSide.chunk", teacher_untempered),),
        case="distill_full",
    ),
    Fault(
        "teacher-direction",
        "the KL from the teacher runs the other way",
        (("longspan.objective.objective:Objective.teacher_direction", other_direction),),
        case="distill_reverse",
    ),
)
