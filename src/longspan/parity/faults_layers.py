"""Faults in layers of their own kind: experts with their routers, and recurrent layers."""

from dataclasses import replace

import torch

from longspan.objective import over_samples
from longspan.parity.mutation import Fault

ROUTERS = "longspan.models.moe"
EXPERTS = "longspan.models.experts"
LINEAR = "longspan.mixers.linear"
STATE = "longspan.mixers.deltanet_state"


def own_counts(original):
    """A rank's own tokens stand for the row's."""
    return lambda x, group: x


def pads_counted(original):
    return lambda routes, segment, real, samples, experts: original(
        routes, segment, torch.ones_like(real), samples, experts
    )


def terms_detached(original):
    def terms(state, **settings):
        found = original(state, **settings)
        return replace(found, aux=found.aux.detach(), z=found.z.detach())

    return terms


def part_counted(original):
    """The batch's shares count half of its samples."""
    return lambda self, samples, weights: original(self, samples[::2], weights[::2])


def rows_rolled(original):
    """What comes back from the experts' ranks lies one row off."""

    def over_ranks(module, pairs, counts, group):
        return original(module, pairs, counts, group).roll(1 if group.size > 1 else 0, 0)

    return over_ranks


def travelling_gradient_lost(original):
    def backward(ctx, *grads):
        grad, *rest = original.__func__(ctx, *grads)
        return torch.zeros_like(grad), *rest

    return staticmethod(backward)


def one_document(original):
    """Recurrent layers take the row for one document; softmax layers keep its boundaries."""
    return lambda info, *rest: original(replace(info, cu_seqlens=info.cu_seqlens[[0, -1]]), *rest)


def nothing_enters(original):
    """The exchange runs, what it brings is taken for zero."""

    def exchange(*given):
        found = original(*given)
        return None if found is None else torch.zeros_like(found)

    return exchange


def halo_of_zeros(original):
    return lambda x, width, group, *, crossed, tail=0: original(x, width, group, crossed=False, tail=tail)


MOE = {"model": "tiny:qwen3_moe", "layout": "cp2-ep2-ring"}
RECURRENT = {"model": "tiny:qwen3_5", "layout": "cp2-ring"}
FAULTS = (
    Fault(
        "aux-shard",
        "I1 routers count a shard's tokens",
        ((f"{ROUTERS}:all_gather", own_counts),),
        case="moe_aux",
        **MOE,
    ),
    Fault(
        "aux-detached",
        "I3 the auxiliary gradient does not reach the router",
        (("longspan.engine.program:router_terms", terms_detached),),
        case="moe_aux",
        **MOE,
    ),
    Fault("aux-pads", "I5 routers count pads", ((f"{ROUTERS}:_counts", pads_counted),), case="moe_aux", **MOE),
    Fault(
        "batch-part",
        "moe_over='batch' counts a part of the batch",
        (("longspan.engine.engine:Engine._shares", part_counted),),
        case="moe_batch",
        **MOE,
    ),
    Fault(
        "batch-by-sample",
        "moe_over='batch' weighs each sample as if it were alone",
        (("longspan.engine.engine:over_batch", lambda original: over_samples),),
        case="moe_batch",
        **MOE,
    ),
    Fault("expert-rows", "experts' rows come home one off", ((f"{EXPERTS}:_over_ranks", rows_rolled),), **MOE),
    Fault(
        "expert-gradient",
        "gradients of rows that travelled to experts are lost",
        ((f"{EXPERTS}:_Exchange.backward", travelling_gradient_lost),),
        **MOE,
    ),
    Fault(
        "recurrent-boundary",
        "D8 recurrent state runs across documents",
        ((f"{LINEAR}:cut_pieces", one_document),),
        **RECURRENT,
    ),
    Fault(
        "halo",
        "B10 the convolution sees zeros left of its shard",
        ((f"{LINEAR}:with_halo", halo_of_zeros),),
        **RECURRENT,
    ),
    Fault(
        "state",
        "D12 recurrent layers run on their shard alone",
        ((f"{STATE}:_exchange_forward", nothing_enters),),
        **RECURRENT,
    ),
    Fault(
        "state-gradient",
        "the gradient of a passed state is lost",
        ((f"{STATE}:_exchange_backward", nothing_enters),),
        **RECURRENT,
    ),
)
