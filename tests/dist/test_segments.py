"""Per-sample reductions, GSPO and metrics over ranks equal one process: 3 ranks, samples cut across them, one rank
inert."""

import pytest
import torch
import torch.distributed as dist

from longspan.launch import launch
from longspan.layout import CPGroup
from longspan.objective import Fields, Objective, Segments, Stats, TokenOut, evaluate

RANKS, T = 3, 31
LENGTHS = (1, 9, 14, 7)  # the last sample has no trained token


def everything():
    """All tokens of the row on one process."""
    rng = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(T, generator=rng, dtype=torch.float64)

    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    fields = {"advantage": normal(), "old_logprob": normal() * 0.1, "return": normal()}
    mask = (torch.rand(T, generator=rng) < 0.7) & (ids != 3)
    x = normal()
    fields["old_logprob"] = fields["old_logprob"] + x
    fields["old_logprob"][~mask] = 1e30
    weight = torch.where(mask, torch.rand(T, generator=rng, dtype=torch.float64), 0.0)
    return ids, fields, mask, x, weight


def cuts():
    """Two cuts into 3 shards: interleaved like zigzag, and one whose last rank holds only the untrained sample."""
    tokens = torch.arange(T)
    yield "striped", [tokens[r::RANKS] for r in range(RANKS)]
    yield "inert", [tokens[:11], tokens[11:24], tokens[24:]]


def own_loss(out, fields):
    """The sample's mean log-prob, differentiated through the collective."""
    return torch.exp(out.segments.expand(out.segments.mean(out.logprob))) * fields.advantage


def results(part, group, num):
    """What one rank finds for its tokens: reductions, gradients, the three objectives, metrics."""
    ids, fields, mask, x, weight = everything()
    found = {}
    own = x[part].clone().requires_grad_()
    segments = Segments(ids[part], num, mask[part], group)
    mean, total = segments.mean(own), segments.sum(own)
    found["mean"], found["sum"], found["count"] = mean.detach(), total.detach(), segments.count()
    spread = segments.expand(mean * total).square() * (1 + part)  # reads the result on every rank
    found["gradient"] = torch.autograd.grad(spread.sum(), own)[0]
    stats = Stats()
    for name, objective in {"gspo": Objective("gspo", clip=0.005), "own": Objective(own_loss, name="own")}.items():
        own = x[part].clone().requires_grad_()
        out = TokenOut(own, segments=segments)
        given = Fields({key: value[part] for key, value in fields.items()})
        loss = evaluate(objective, out, fields=given, weights={name: weight[part]}, stats=stats)
        found[name] = torch.autograd.grad(loss, own)[0]
    found["report"] = stats.reduce(group)
    return found


def on_rank():
    rank = dist.get_rank()
    group = CPGroup(dist.group.WORLD, rank, RANKS, tuple(range(RANKS)))
    found = {name: results(parts[rank], group, len(LENGTHS)) for name, parts in cuts()}
    again = {name: results(parts[rank], group, len(LENGTHS)) for name, parts in cuts()}
    return found, again


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, ranks=RANKS, timeout_s=55)


@pytest.fixture(scope="module")
def whole():
    return results(torch.arange(T), None, len(LENGTHS))


@pytest.mark.parametrize("cut", ["striped", "inert"])
def test_segments_over_ranks_equal_one_process(ranks, whole, cut):
    parts = dict(cuts())[cut]
    for rank, (found, _) in enumerate(ranks):
        for name in ("mean", "sum", "count"):
            assert torch.allclose(found[cut][name], whole[name], rtol=1e-14, atol=1e-14)
        for name in ("gradient", "gspo", "own"):
            want = whole[name][parts[rank]]
            assert torch.allclose(found[cut][name], want, rtol=1e-12, atol=1e-14), name
    assert whole["gradient"].any() and whole["gspo"].any() and whole["own"].any()
    assert whole["report"]["ratio/clip_share"] > 0
    # control: a rank that reduced its own tokens alone would find another mean, another gradient
    ids, _, mask, x, _ = everything()
    alone = Segments(ids[parts[0]], len(LENGTHS), mask[parts[0]])
    assert not torch.allclose(alone.mean(x[parts[0]]), whole["mean"])
    lonely = results(parts[0], None, len(LENGTHS))
    assert not torch.allclose(lonely["own"], whole["own"][parts[0]], rtol=1e-6)


@pytest.mark.parametrize("cut", ["striped", "inert"])
def test_E8_metrics_over_ranks_equal_one_process(ranks, whole, cut):
    for found, _ in ranks:
        assert found[cut]["report"] == ranks[0][0][cut]["report"]
        assert found[cut]["report"].keys() == whole["report"].keys()
        for name, value in whole["report"].items():
            assert found[cut]["report"][name] == pytest.approx(value, rel=1e-12, abs=1e-14), name
    lonely = results(dict(cuts())[cut][0], None, len(LENGTHS))["report"]
    assert lonely["logprob/mean"] != pytest.approx(whole["report"]["logprob/mean"], rel=1e-6)


def test_reductions_are_deterministic(ranks):
    for found, again in ranks:
        for cut in found:
            assert all(torch.equal(found[cut][name], again[cut][name]) for name in found[cut] if name != "report")
            assert found[cut]["report"] == again[cut]["report"]
