"""Mixers inside layers: selective recomputation, and norms between a projection and the exchange."""

import dataclasses

import torch
from mixer_cases import FORMS, Case, info_of, meshes, mixer_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.launch import launch, world
from longspan.layout import CPGroup, SeqInfo, make_seqinfo
from longspan.mixers import AttentionCache
from longspan.mixers.collectives import reduce_scatter
from longspan.mixers.kernels import Block
from longspan.mixers.kernels.reference import Reference

# ---- recomputation ----


class Counting:
    """The reference kernel, counting its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = [0, 0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, **how: object) -> tuple[Tensor, Tensor]:
        self.calls[0] += 1
        return Reference().forward(q, k, v, block, **how)  # pyright: ignore[reportArgumentType]  passed on

    def backward(self, *tensors: object, **how: object) -> tuple[Tensor, Tensor, Tensor]:
        self.calls[1] += 1
        return Reference().backward(*tensors, **how)  # pyright: ignore[reportArgumentType]  passed on


def forms() -> list[tuple[str, str, int]]:
    """On three ranks where four heads need not be dealt out, and on four."""
    threes = [(mixer, index, 3) for mixer, index in FORMS if mixer in ("ring", "gather")]
    return [*threes, *((mixer, index, 4) for mixer, index in FORMS)]


def recompute() -> list[str]:
    """Two layers with q and k norms, plain and under selective recomputation: what differs."""
    here = world()
    found, wrong = meshes(here.rank, here.ranks, here.device), []
    for mixer_name, index, size in forms():
        case = Case(mixer_name, index, size, (3, 41, 2, 1, 9))
        info = info_of(case, found["hybrid" if mixer_name == "hybrid" else "plain"])
        if info is None:
            continue
        results = []
        for cache in (None, AttentionCache()):
            kernel = Counting()
            results.append((two_layers(case, info, kernel, cache), kernel.calls))
        (plain, plain_calls), (again, again_calls) = results
        if plain_calls != again_calls:
            wrong.append(f"{case}: kernel calls {plain_calls}, with recomputation {again_calls}")
        if not all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)):
            wrong.append(f"{case}: gradients differ")
    return wrong


def two_layers(case: Case, info: SeqInfo, kernel: Counting, cache: AttentionCache | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixer = mixer_of(case)
    prepared = mixer.prepare(info, torch.device("cpu"))
    x = torch.randn(sum(case.padded), 32, generator=generator, dtype=torch.float64)[info.index].requires_grad_()
    weights = [torch.randn(32, 64, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]

    def layer(x: Tensor, weight: Tensor, number: int) -> Tensor:
        q, k, v = (x @ weight).unflatten(1, (8, 8)).split([4, 2, 2], 1)
        q, k = (torch.nn.functional.rms_norm(y, (8,)) for y in (q, k))
        saved = cache.slot(number) if cache else None
        return x + mixer.attend(q, k, v, prepared, scale=0.35, kernel=kernel, saved=saved).flatten(1)

    y: Tensor = x
    for number, weight in enumerate(weights):
        y = checkpoint(layer, y, weight, number, use_reentrant=False) if cache else layer(y, weight, number)  # pyright: ignore[reportAssignmentType]  its stub returns Any
    return list(torch.autograd.grad(y.square().sum(), [x, *weights]))


def test_selective_recomputation_attends_once_under_every_mixer() -> None:
    """The kernel runs as often as without recomputation, and the gradients are the same bits."""
    assert launch(recompute, ranks=4, timeout_s=50) == [[]] * 4


# ---- norms before the exchange ----


def key_norms() -> dict[str, float]:
    """H8: gradients of q and k norms and projections, summed over ranks, against one rank; T_local odd and even."""
    here = world()
    found, errors = meshes(here.rank, here.ranks, here.device), {}
    for mixer_name, index, size in forms():
        for lengths in ((3, 41, 2, 1, 9), (8, 16, 4)):
            case = Case(mixer_name, index, size, lengths)
            info = info_of(case, found["hybrid" if mixer_name == "hybrid" else "plain"])
            if info is None:
                continue
            grads = two_layers(case, info, Counting(), None)
            alone = make_seqinfo("identity", case.cu_seqlens, CPGroup.alone(here.rank))
            truth = two_layers(dataclasses.replace(case, size=1, lengths=case.padded), alone, Counting(), None)
            pairs = [(grads[0], truth[0][info.index])]
            for grad, expected in zip(grads[1:], truth[1:], strict=True):
                parts = torch.stack([grad] * info.size) / 1  # the same part for every rank: their sum is the gradient
                pairs.append((reduce_scatter(parts, info.group)[0], expected))
            errors[f"{mixer_name} {index} {size} {lengths}"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return errors


def test_h8_gradients_through_norms_before_the_exchange() -> None:
    for errors in launch(key_norms, ranks=4, timeout_s=50):
        assert max(errors.values()) < 1e-12, errors
