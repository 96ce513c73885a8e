"""Routers of mixture-of-experts layers: recorded and replayed routes, and the auxiliary losses, at any layout.

Hooks on HF's router instances read and may replace (logits, scores, experts); `MoEState` holds one micro-step's. It
reaches a router through the layer's forward keyword `longspan=Context`, so recomputation and several engines in a
process are safe. Layers count over routers only, in model order. Routes are a stream like any other: [layers, k, T]
(a sample's field is [L, layers, k]).

Losses per layer and per sample, over real tokens (never pads), summed over layers: with n tokens, E experts, k experts
a token, c_e tokens sent to expert e and p_te the router's softmax,
    aux = E / (k n^2) * sum_e c_e sum_t p_te    (Switch Transformer eq. 4; 1 a layer when balanced)
    z   = 1 / n * sum_t logsumexp(logits_t)^2   (ST-MoE eq. 5)
Over a whole batch, n and c_e are those of all its samples that weigh: `route_shares` takes them from recorded routes.
Both come as per-token parts [T_local]: given the counts they are sums over tokens, so ranks add up and nothing divides
later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longspan.errors import UserError
from longspan.layout.comm import all_gather
from longspan.layout.seqinfo import SeqInfo
from longspan.layout.travel import sent
from longspan.mixers.precision import accumulator
from longspan.models.adapter import Context

__all__ = [
    "MoEShape",
    "MoEState",
    "RouterTerms",
    "check_routes",
    "moe_shape",
    "route_shares",
    "router_terms",
    "tap_routers",
]

Scores = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (router, logits [T, E], experts [T, k]) -> scores [T, k]


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Sizes of a model's routers."""

    layers: int
    experts: int
    top_k: int


class MoEState:
    """What the routers of one micro-step keep or are told. The engine makes one and puts it into `Context.moe`.

    Not a dataclass: FSDP2 (torch 2.13) rebuilds the dataclasses among a layer's inputs that hold tensors with gradients, and
    the layers after the first would then record into copies.
    """

    __slots__ = ("keep_logits", "keep_routes", "logits", "replay", "routes")

    def __init__(self, replay: Tensor | None = None, keep_logits: bool = False, keep_routes: bool = False) -> None:
        self.replay = replay  # [layers, k, T_local] int64: experts to use instead of the router's own
        self.keep_logits = keep_logits  # for the auxiliary losses
        self.keep_routes = keep_routes  # for outputs
        self.logits: dict[int, Tensor] = {}  # layer -> [T_local, E], with graph
        self.routes: dict[int, Tensor] = {}  # layer -> [T_local, k] int64

    def recorded(self) -> Tensor:
        """[layers, k, T_local] int64: the experts used."""
        return torch.stack([self.routes[layer].T for layer in sorted(self.routes)])


@dataclass(frozen=True, slots=True)
class RouterTerms:
    """Per-token parts of the auxiliary losses, summed over layers; the sum over a sample's tokens is its loss."""

    aux: Tensor  # [T_local] f32 (f64 for f64), 0 on pads
    z: Tensor  # [T_local] f32 (f64 for f64), 0 on pads


class _Tap:
    """Carries the context from a decoder layer's call to its router's hook; empty between calls."""

    def __init__(self, number: int, scores: Scores) -> None:
        self.number, self.scores = number, scores
        self.context: Context | None = None

    def enter(self, layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.context = kwargs.get("longspan")

    def leave(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        self.context = None

    def route(self, router: nn.Module, args: tuple[object, ...], output: tuple[Tensor, Tensor, Tensor]) -> object:
        state = None if self.context is None else self.context.moe
        if state is None:
            return output
        logits, scores, experts = output
        if state.replay is not None:
            experts = state.replay[self.number].T.contiguous()  # [k, T_local] -> [T_local, k]
            scores = self.scores(router, logits, experts)
        # setdefault: a recomputation runs the router again, and the graph is that of the first forward
        if state.keep_logits:
            state.logits.setdefault(self.number, logits)
        if state.keep_routes or state.keep_logits:
            state.routes.setdefault(self.number, experts)
        return logits, scores, experts


def softmax_then_pick(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Qwen: softmax over all experts in fp32, normalised over the chosen ones."""
    chosen = torch.softmax(logits, -1, dtype=torch.float32).gather(1, experts)
    return (chosen / chosen.sum(-1, keepdim=True)).to(logits.dtype)


def softmax_then_pick_if_asked(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Qwen3-MoE and Qwen3-Next: normalised only where the config says so."""
    if router.norm_topk_prob:
        return softmax_then_pick(router, logits, experts)
    return torch.softmax(logits, -1, dtype=torch.float32).gather(1, experts).to(logits.dtype)


def pick_then_softmax(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """gpt-oss: softmax over the chosen experts' logits."""
    return torch.softmax(logits.gather(1, experts), 1)


ROUTERS: dict[str, Scores] = {
    "Qwen3MoeTopKRouter": softmax_then_pick_if_asked,
    "Qwen3NextTopKRouter": softmax_then_pick_if_asked,
    "Qwen3VLMoeTextTopKRouter": softmax_then_pick,
    "Qwen3_5MoeTopKRouter": softmax_then_pick,
    "GptOssTopKRouter": pick_then_softmax,
}


def tap_routers(layers: Sequence[nn.Module], first: int = 0) -> None:
    """Put the hooks on every known router of a model's layers, numbered from `first`. Once, while building."""
    number = first
    for layer in layers:
        for router in _routers(layer):
            tap = _Tap(number, ROUTERS[type(router).__name__])
            layer.register_forward_pre_hook(tap.enter, with_kwargs=True)
            layer.register_forward_hook(tap.leave, always_call=True)
            router.register_forward_hook(tap.route)
            number += 1


def moe_shape(model: nn.Module) -> MoEShape | None:
    """Sizes of the model's routers; None for a dense model."""
    routers = _routers(model)
    return MoEShape(len(routers), routers[0].num_experts, routers[0].top_k) if routers else None


def check_routes(routes: Sequence[Tensor | None], shape: MoEShape | None, model: str) -> None:
    """Raises UserError naming the sample whose recorded routes [L, layers, k] this model cannot replay."""
    for number, found in enumerate(routes):
        if found is None:
            continue
        if shape is None:
            raise UserError(f"sample {number} has routed_experts, but {model} has no experts. Leave the field out")
        wanted = (shape.layers, shape.top_k)
        if found.is_floating_point() or tuple(found.shape[1:]) != wanted:
            raise UserError(
                f"sample {number}: routed_experts is {found.dtype} of shape {list(found.shape)}; {model} needs integers "
                f"[L, layers, k] = [{len(found)}, {wanted[0]}, {wanted[1]}]. Record them with "
                "engine.forward(samples, outputs=('routed_experts',))"
            )
        if bool(((found < 0) | (found >= shape.experts)).any()):
            raise UserError(
                f"sample {number}: routed_experts lies between {int(found.min())} and {int(found.max())}; {model} has "
                f"experts 0 to {shape.experts - 1}. Record them with this model"
            )


def route_shares(routes: Sequence[Tensor], experts: int) -> Tensor:
    """Recorded routes [L, layers, k] of samples -> [layers, E] f64: c_e / n over all their tokens."""
    whole = torch.cat(list(routes))  # [n, layers, k]
    counts = [torch.bincount(layer.reshape(-1), minlength=experts) for layer in whole.unbind(1)]
    return torch.stack(counts).double() / max(len(whole), 1)


def router_terms(
    state: MoEState, *, info: SeqInfo, lengths: Sequence[int], shares: Tensor | None = None
) -> RouterTerms:
    """The losses' parts on this rank's tokens. Collective over the row's ranks.

    lengths: real tokens of each sample of the row (`Shard.lengths`). shares: [layers, E] of a whole batch's recorded
    routes, c_e / n over all its tokens: then aux uses these instead of each sample's own counts.
    """
    layers = sorted(state.logits)  # of a pipeline stage: its own
    some = state.logits[layers[0]]
    device = some.device
    segment = info.segment
    counts_of = torch.tensor([*lengths, 0])  # one more entry: the tail pad's segment
    real = info.position_in_document < counts_of[segment]
    size = torch.where(real, counts_of[segment], 1)  # [T_local]
    wide = accumulator(some.dtype)
    scale = sent(torch.where(real, 1.0 / size.double(), 0.0).to(wide), device)  # 1 / n, 0 on pads
    segment, real = sent(segment, device), sent(real, device)
    num_experts = some.shape[1]
    if shares is None:
        counts = torch.stack([_counts(state.routes[n], segment, real, len(lengths), num_experts) for n in layers])
        counts = all_gather(counts[None], info.group).sum(0)  # [layers, S + 1, E], whole row
    aux, z = torch.zeros_like(scale), torch.zeros_like(scale)
    for place, layer in enumerate(layers):
        logits = state.logits[layer].to(wide)
        share = shares[layer].expand(len(real), -1) if shares is not None else counts[place][segment] * scale[:, None]
        top_k = state.routes[layer].shape[1]
        aux = aux + num_experts / top_k * (share.to(wide) * logits.softmax(-1)).sum(-1) * scale
        z = z + logits.logsumexp(-1).square() * scale
    return RouterTerms(aux, z)


def _counts(routes: Tensor, segment: Tensor, real: Tensor, samples: int, num_experts: int) -> Tensor:
    """[S + 1, E] int64: real tokens of each segment sent to each expert, on this rank."""
    counts = torch.zeros(samples + 1, num_experts, dtype=torch.int64, device=routes.device)
    rows = segment[:, None].expand_as(routes)
    return counts.index_put_((rows, routes), real[:, None].expand_as(routes).long(), accumulate=True)


def _routers(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.modules() if type(child).__name__ in ROUTERS]
