"""Metrics do not depend on the cut (E8, no means of means), and per-sample reductions on one rank."""

import math
from itertools import pairwise

import pytest
import torch

from longspan.objective import Fields, Objective, Segments, Stats, TokenOut, evaluate

T = 60


def outputs(seed=0):
    rng = torch.Generator().manual_seed(seed)
    logprob = -torch.randn(T, generator=rng, dtype=torch.float64).abs()
    entropy = torch.rand(T, generator=rng, dtype=torch.float64)
    fields = {"old_logprob": logprob + torch.randn(T, generator=rng, dtype=torch.float64) * 0.3}
    fields["advantage"] = torch.randn(T, generator=rng, dtype=torch.float64)
    fields["ref_logprob"] = logprob + 0.1
    weight = torch.where(torch.arange(T) % 3 == 0, 0.0, torch.rand(T, generator=rng, dtype=torch.float64))
    return logprob, entropy, fields, weight


def report(cuts, order=None):
    """The metrics when the tokens are cut at `cuts` into micro-steps."""
    logprob, entropy, fields, weight = outputs()
    stats, objective = Stats(), Objective("ppo", kl=0.1, entropy=0.01)
    edges = [0, *cuts, T]
    for a, b in pairwise(edges):
        part = slice(a, b) if order is None else order[a:b]
        out = TokenOut(logprob[part], entropy[part])
        weights = {term.name: weight[part] for term in objective.terms}
        evaluate(objective, out, fields=Fields(fields).take(part), weights=weights, stats=stats)
    return stats.reduce()


def test_E8_metrics_do_not_depend_on_the_cut():
    whole = report([])
    shuffled = torch.randperm(T, generator=torch.Generator().manual_seed(1))
    for cuts, order in (([30], None), ([1, 2, 50], None), ([7], shuffled), ([0, 60], None)):
        other = report(cuts, order)
        assert other.keys() == whole.keys()
        for name, value in whole.items():
            assert other[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name
    names = {"loss/ppo", "loss/kl", "loss/entropy", "loss/total", "tok/trained", "logprob/mean", "kl/old_mean"}
    assert names | {"ratio/clip_share", "entropy/mean", "logprob/gap_p99.9"} <= whole.keys()


def test_metrics_by_hand():
    logprob, entropy, fields, weight = outputs()
    whole, trained = report([]), weight != 0
    ratio = torch.exp(logprob - fields["old_logprob"])
    clipped = ((fields["advantage"] > 0) & (ratio > 1.2)) | ((fields["advantage"] < 0) & (ratio < 0.8))
    d = 0.1
    k3 = math.exp(d) - 1 - d
    assert whole["tok/trained"] == int(trained.sum()) == 40
    assert whole["logprob/mean"] == pytest.approx(((weight * logprob).sum() / weight.sum()).item(), rel=1e-12)
    assert whole["ratio/clip_share"] == pytest.approx(((weight * clipped).sum() / weight.sum()).item(), rel=1e-12)
    gap = fields["old_logprob"] - logprob
    assert whole["kl/old_mean"] == pytest.approx(((weight * gap).sum() / weight.sum()).item(), rel=1e-12)
    assert whole["loss/kl"] == pytest.approx((weight.sum() * k3).item(), rel=1e-9)  # without the coefficient
    total = whole["loss/ppo"] + 0.1 * whole["loss/kl"] + 0.01 * whole["loss/entropy"]
    assert whole["loss/total"] == pytest.approx(total, rel=1e-12)
    assert whole["loss/entropy"] == pytest.approx(-(weight * entropy).sum().item(), rel=1e-12)
    assert whole["logprob/gap_max"] == gap[trained].abs().max().item()


def test_control_mean_of_means_is_another_number():
    _, _, _, weight = outputs()
    logprob = outputs()[0]
    parts = [slice(0, 5), slice(5, T)]
    naive = sum((weight[p] * logprob[p]).sum() / weight[p].sum() for p in parts) / 2
    assert abs(naive.item() - report([5])["logprob/mean"]) > 1e-3


def test_quantiles():
    """Exact to a bin (3.7 %), equal for every cut, 0 where all is 0, above the last bin held at its edge."""
    values = torch.logspace(-6, 2, 20001, dtype=torch.float64)
    values = values[torch.randperm(20001, generator=torch.Generator().manual_seed(0))]
    found = []
    for parts in (1, 2, 7):
        stats = Stats()
        for part in values.tensor_split(parts):
            stats.histogram("x", -part, torch.ones_like(part))
        found.append(stats.reduce())
    assert found[0] == found[1] == found[2]
    for name, share in {"x_p50": 0.5, "x_p99": 0.99, "x_p99.9": 0.999}.items():
        assert found[0][name] == pytest.approx(torch.quantile(values, share).item(), rel=0.037)
    masked = Stats()
    masked.histogram("x", values, values < 1)
    assert masked.reduce()["x_p50"] == pytest.approx(torch.quantile(values[values < 1], 0.5).item(), rel=0.037)
    assert masked.reduce()["x_p50"] != pytest.approx(found[0]["x_p50"], rel=0.037)
    edge = Stats()
    edge.histogram("zero", torch.zeros(5), torch.ones(5))
    edge.histogram("none", torch.ones(5), torch.zeros(5))
    edge.histogram("large", torch.full((5,), 1e9), torch.ones(5))
    edge.max("none", torch.ones(5), torch.zeros(5))
    got = edge.reduce()
    assert got["zero_p99"] == 0 and got["none_p99"] == 0 and got["none"] == 0
    assert got["large_p50"] == pytest.approx(1e3)


def test_empty_stats():
    assert Stats().reduce() == {}
    stats = Stats()
    stats.mean("x", torch.full((3,), math.nan), torch.zeros(3))
    assert stats.reduce() == {"x": 0.0}


# Segments on one rank ---------------------------------------------------------------------------------------


def test_segments_sum_mean_expand():
    ids = torch.tensor([2, 0, 0, 2, 1, 0])  # any order: a zigzag shard holds two chunks of each sample
    mask = torch.tensor([1, 1, 0, 1, 0, 1])
    x = torch.tensor([1.0, 2.0, math.nan, 4.0, math.inf, 6.0], dtype=torch.float64, requires_grad=True)
    segments = Segments(ids, 4, mask)
    assert segments.sum(x).tolist() == [8, 0, 5, 0]
    assert segments.mean(x).tolist() == [4, 0, 2.5, 0]
    assert segments.count().tolist() == [2, 0, 2, 0]
    assert segments.expand(segments.mean(x)).tolist() == [2.5, 4, 4, 2.5, 0, 4]
    g = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    assert torch.autograd.grad((segments.mean(x) * g).sum(), x)[0].tolist() == [50, 0.5, 0, 50, 0, 0.5]
    y = torch.arange(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad((segments.expand(y) * torch.arange(6)).sum(), y)[0].tolist() == [8, 4, 3, 0]


def test_segments_gradcheck():
    ids = torch.tensor([0, 1, 0, 2, 1])
    segments = Segments(ids, 3, torch.tensor([True, True, True, False, True]))
    x = torch.randn(5, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda x: segments.expand(segments.mean(x) * segments.sum(x)), x)
