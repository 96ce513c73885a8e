"""Linears cut over tensor-parallel ranks: what ranks sum is rounded once. The oracle is one matmul in fp64."""

import pytest
import torch
from megatron_cases import replaced

from longspan import launch
from longspan.engine.megatron.linears import column, row
from longspan.launch import world
from longspan.layout import CPGroup

TOKENS, INPUTS, OUTPUTS = 48, 64, 32
LINEARS = "longspan.engine.megatron.linears:"


def rounds_each_part(real):
    """The fault: what megatron-core does, a sum of parts in bf16."""
    return lambda a, b: real(a, b).to(a.dtype).float()


def shard(whole, rank, dim):
    return whole.chunk(2, dim)[rank].clone()


def compare(dtype, rows):
    """Largest distance from fp64 (or from the matmul in fp64 rounded once to bf16, in roundings) of each result."""
    torch.manual_seed(0)
    draw = [torch.randn(*shape, dtype=torch.float64) for shape in ((TOKENS, 1, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,))]
    x, weight, bias = (value.to(dtype).double() for value in draw)
    upstream = torch.randn(TOKENS, 1, OUTPUTS, dtype=torch.float64).to(dtype).double()
    rank = world().rank
    group = CPGroup(torch.distributed.new_group([0, 1]), rank, 2, (0, 1))

    def own(value):
        return shard(value, rank, 0) if rows else value.clone()

    found = {}
    leaf = [v.to(dtype).requires_grad_() for v in (own(x), shard(weight, rank, 0), shard(bias, rank, 0))]
    out = column(*leaf, group, rows=rows)
    out.backward(shard(upstream, rank, 2).to(dtype))
    flat = upstream[:, 0]
    found["column"] = out, shard((x @ weight.T) + bias, rank, 2)
    found["column dx"] = leaf[0].grad, own((flat @ weight)[:, None])
    found["column dweight"] = leaf[1].grad, shard(flat.T @ x[:, 0], rank, 0)
    found["column dbias"] = leaf[2].grad, shard(flat.sum(0), rank, 0)
    extra = torch.randn(TOKENS, 1, OUTPUTS, dtype=torch.float64).to(dtype).requires_grad_()
    leaf = [v.to(dtype).requires_grad_() for v in (shard(x, rank, 2), shard(weight, rank, 1))]
    out = row(*leaf, extra, group, rows=rows)
    out.backward(own(upstream).to(dtype))
    found["row"] = out, own(x @ weight.T + 2 * extra.detach().double())
    found["row dx"] = leaf[0].grad, shard((flat @ weight)[:, None], rank, 2)
    found["row dweight"] = leaf[1].grad, shard(flat.T @ x[:, 0], rank, 1)
    found["row dextra"] = extra.grad, upstream
    return {name: distance(got.detach(), want) for name, (got, want) in found.items()}


def distance(got, want):
    """fp64: relative to the largest. bf16: share of elements that are not the exact value rounded once."""
    if got.dtype == torch.float64:
        return float((got - want).abs().max() / want.abs().max())
    return float((got != want.to(got.dtype)).double().mean())


def body():
    found = {(dtype, rows): compare(dtype, rows) for dtype in (torch.float64, torch.bfloat16) for rows in (False, True)}
    with replaced(LINEARS + "_wide", rounds_each_part):
        return found, compare(torch.bfloat16, True)


@pytest.fixture(scope="module")
def results():
    return launch(body, ranks=2, timeout_s=60)


def test_cut_linears_equal_one_matmul(results):
    for found, _ in results:
        for rows in (False, True):
            assert max(found[torch.float64, rows].values()) < 1e-14, found[torch.float64, rows]


def test_a_sum_over_ranks_is_rounded_once(results):
    """In bf16 nearly every element is the exact value rounded once; an fp32 sum moves few across a rounding edge."""
    for found, fault in results:
        for rows in (False, True):
            shares = found[torch.bfloat16, rows]
            assert max(shares["row"], shares["column dx"]) < 0.01, shares
        assert min(fault["row"], fault["column dx"]) > 0.1, fault
