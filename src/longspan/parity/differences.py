"""Distances between what the engine said and what the oracle says, each with the place where it is largest."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longspan.data import Sample

QUANTILE_STEP = 10 ** (1 / 64) - 1  # the engine's histograms have 64 bins a decade: a quantile is exact to one bin
GUMBEL = 1.28 / 2 * 2**0.5  # the standard deviation of a ratio of two maxima of n errors, times ln n
NOT_NUMBERS = ("time/", "mem/", "plan/")  # differ between layouts on purpose


def tokens(
    engine: Sequence[Tensor], oracle: Sequence[Tensor], samples: Sequence[Sample], chance: float = 0.0
) -> tuple[float, str]:
    """Largest absolute difference over trained tokens, and "sample s, position t"; wrong shapes are infinitely far.

    chance: standard deviations of a ratio of two such figures that are taken off (cells.py).
    """
    largest, where = 0.0, ""
    for number, (got, want, sample) in enumerate(zip(engine, oracle, samples, strict=True)):
        if got.shape != want.shape:
            return float("inf"), f"sample {number}: shape {list(got.shape)} instead of {list(want.shape)}"
        difference = (got.double() - want.double()).abs().nan_to_num(nan=float("inf")) * (sample.mask > 0)
        difference = difference.nan_to_num(nan=0.0)  # inf * 0 outside the mask
        if float(difference.max()) > largest:
            position = int(difference.argmax())
            largest, where = float(difference.max()), f"sample {number}, position {position}"
    count = sum(sample.num_trained for sample in samples)
    return largest / (1.0 + chance * GUMBEL / math.log(max(count, 2))), where


def token_spread(engine: Sequence[Tensor], oracle: Sequence[Tensor], samples: Sequence[Sample]) -> tuple[float, str]:
    """Root mean square difference of all trained tokens, and how many there are; wrong shapes are infinitely far."""
    if any(got.shape != want.shape for got, want in zip(engine, oracle, strict=True)):
        return tokens(engine, oracle, samples)
    pairs = zip(engine, oracle, samples, strict=True)
    squares = [(got.cpu().double() - want.cpu().double())[sample.mask > 0].square() for got, want, sample in pairs]
    every = torch.cat(squares).nan_to_num(nan=float("inf"))
    return float(every.mean().sqrt()) if len(every) else 0.0, f"root mean square of {len(every)} tokens"


def parameters(
    engine: Mapping[str, Tensor], oracle: Mapping[str, Tensor], zero: float, chance: float = 0.0
) -> tuple[float, str]:
    """Largest relative L2 error over parameters and its name; a name that only one side has is infinitely far.

    A reference below `zero` times the global norm is zero in exact arithmetic: its error is measured against that norm.
    chance: standard deviations of a ratio of two such figures that are taken off, more of small parameters (cells.py).
    """
    if set(engine) != set(oracle):
        return float("inf"), f"only one side has {sorted(set(engine) ^ set(oracle))[:3]}"
    largest, where = 0.0, ""
    for name, error in each_parameter(engine, oracle, zero).items():
        figure = error / (1.0 + chance * oracle[name].numel() ** -0.5)
        if not figure <= largest:  # NaN too
            largest, where = (figure if figure == figure else float("inf")), name
    return largest, where


def each_parameter(engine: Mapping[str, Tensor], oracle: Mapping[str, Tensor], zero: float) -> dict[str, float]:
    """The relative L2 error of every parameter that both sides have."""
    squares = [x.double().square().sum() for x in oracle.values()]
    total = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    found = {}
    for name, want in oracle.items():
        if name in engine:
            error = float((engine[name].double() - want.double()).norm())
            own = float(want.double().norm())
            scale = own if own > zero * total else total
            found[name] = error / scale if scale else error
    return found


def norms(engine: Sequence[float], oracle: Sequence[float]) -> tuple[float, str]:
    """Largest relative difference of two series of norms, and its step."""
    largest, where = 0.0, ""
    for step, (got, want) in enumerate(zip(engine, oracle, strict=True), start=1):
        error = abs(got - want) / want
        if not error <= largest:
            largest, where = (
                (error if error == error else float("inf")),
                f"step {step}: {got:.9g} instead of {want:.9g}",
            )
    return largest, where


def metrics(engine: Mapping[str, float], oracle: Mapping[str, float]) -> tuple[float, str]:
    """Largest difference over metrics (relative above 1) and its name; a metric that only the engine has is
    infinitely far.
    """
    largest, where = 0.0, ""
    for name, got in engine.items():
        if name.startswith(NOT_NUMBERS):
            continue
        if name not in oracle:
            return float("inf"), f"{name} has no definition in the oracle"
        want = oracle[name]
        figure = abs(got - want) / max(1.0, abs(want))
        if name.rpartition("_")[2] in ("p50", "p99", "p99.9"):
            figure = 0.0 if abs(got - want) <= QUANTILE_STEP * want * 1.01 else figure
        if not figure <= largest:
            largest, where = (figure if figure == figure else float("inf")), f"{name}: {got:.6g} instead of {want:.6g}"
    missing = {name for name in oracle if name.startswith(("loss/", "tok/"))} - set(engine)
    return (float("inf"), f"missing {sorted(missing)}") if missing else (largest, where)


def bits(before: Sequence[Tensor], after: Sequence[Tensor], skip: int) -> tuple[float, str]:
    """Largest difference over all samples but `skip`: 0.0 only when every bit is equal."""
    largest, where = 0.0, ""
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        if number == skip or torch.equal(a, b):
            continue
        difference = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"))
        figure = max(float(difference.max()), 5e-324)  # -0.0 against 0.0 and NaN count too
        if figure > largest:
            largest, where = figure, f"sample {number}, position {int(difference.reshape(len(a), -1).amax(1).argmax())}"
    return largest, where
