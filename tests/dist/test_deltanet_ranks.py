"""Gated DeltaNet cut over ranks against the plain recurrence on each document alone, fp64: outputs and the gradient
of every input
and weight, at cp 1 to 4, tokens kept (`state`) and heads shared out (`heads`). Planted faults must be seen. One
launch for all.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from longspan.launch import launch
from longspan.layout import CPGroup
from longspan.layout.seqinfo import SeqInfo, make_seqinfo
from longspan.mixers.conv import causal_convolution, with_halo
from longspan.mixers.deltanet_naive import packed_convolution, packed_recurrence
from longspan.mixers.deltanet_pieces import cut_pieces
from longspan.mixers.deltanet_torch import TorchDeltaKernel
from longspan.mixers.linear import DeltaShape, DeltaWeights, LinearPrepared, gated_delta, prepare_linear

RANKS = 4
CPU = torch.device("cpu")
RAGGED = (1, 2, 3, 1, 40, 17)
ROWS = (RAGGED, (1,), (2,), (3, 1), (50,), (64,), (1, 1, 1, 1, 1), (5, 30, 5), (2, 60, 2), (16, 16, 16, 16))
SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
FEW = DeltaShape(key_heads=1, value_heads=3, key_dim=4, value_dim=8)


@dataclass(frozen=True)
class Case:
    size: int
    lengths: tuple[int, ...]
    how: str = "state"
    shape: DeltaShape = SHAPE
    longest: int | None = None  # tokens of a piece, where a rank's runs are cut further
    fault: str = ""


@dataclass(frozen=True)
class Row:
    """A packed row with its padding, what a layer gets for it, and what the definition makes of it."""

    cu: tuple[int, ...]
    inputs: tuple[Tensor, ...]  # mixed, b, a: cut over ranks
    weights: tuple[Tensor, ...]  # conv, A_log, dt_bias
    gradient: Tensor
    out: Tensor
    gradients: tuple[Tensor, ...]


@functools.cache
def make_row(
    lengths: tuple[int, ...], size: int, shape: DeltaShape, *, changed: int | None = None, taps: int = 4
) -> Row:
    """changed: a token whose inputs are drawn anew. taps: of the convolution that are not zero; 1 needs no halo."""
    tail = -sum(lengths) % size
    cu = (0, *itertools.accumulate((*lengths, tail) if tail else lengths))
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, heads = cu[-1], shape.value_heads
    inputs = [draw(tokens, sum(shape.channels)), draw(tokens, heads), draw(tokens, heads)]
    weights = [draw(sum(shape.channels), 4), draw(heads) - 1.0, draw(heads) - 1.0]  # decays of about 0.5 to 0.98
    weights[0][:, : 4 - taps] = 0.0
    gradient = draw(tokens, heads, shape.value_dim)
    if changed is not None:
        inputs = [torch.where(torch.arange(tokens)[:, None] == changed, draw(x.shape), x) for x in inputs]
    leaves = [x.clone().requires_grad_() for x in (*inputs, *weights)]
    mixed, b, a, conv, log_decay, bias = leaves
    q, k, v = functional.silu(packed_convolution(mixed, conv, cu)).split(shape.channels, 1)
    out, _ = packed_recurrence(
        q.reshape(tokens, shape.key_heads, -1),
        k.reshape(tokens, shape.key_heads, -1),
        v.reshape(tokens, heads, -1),
        -log_decay.exp() * functional.softplus(a + bias),
        b.sigmoid(),
        cu,
    )
    gradients = torch.autograd.grad(out, leaves, gradient)
    return Row(cu, tuple(inputs), tuple(weights), gradient, out.detach(), gradients)


def prepare(case: Case, info: SeqInfo) -> LinearPrepared:
    if case.fault == "boundary dropped":
        info = make_seqinfo("contiguous", info.cu_seqlens[[0, -1]], info.group)
    prepared = prepare_linear(info, CPU, how=case.how, dtype=torch.float64)
    if case.longest is not None:
        pieces = cut_pieces(info, case.longest)
        prepared = dataclasses.replace(prepared, pieces=pieces, kernel=TorchDeltaKernel(pieces, CPU))
    if case.fault == "state not passed":
        pieces = prepared.pieces
        alone = dataclasses.replace(
            pieces,
            carried=(False,) * len(pieces.carried),
            crossed=(False,) * len(pieces.crossed),
            through=(False,) * len(pieces.through),
        )
        prepared = dataclasses.replace(prepared, pieces=alone)
    return prepared


def run_case(case: Case, row: Row, group: CPGroup) -> tuple[Tensor, list[Tensor]]:
    """This rank's outputs and gradients; those of weights are summed over the ranks."""
    info = make_seqinfo("contiguous", torch.tensor(row.cu), group)
    prepared = prepare(case, info)
    leaves = [x[info.index].requires_grad_() for x in row.inputs]
    leaves += [x.clone().requires_grad_() for x in row.weights]
    mixed, b, a, *weights = leaves
    out = gated_delta(mixed, b, a, DeltaWeights(*weights), shape=case.shape, prepared=prepared, layer=0)
    gradients = list(torch.autograd.grad(out, leaves, row.gradient[info.index]))
    if group.size > 1:
        for gradient in gradients[3:]:
            dist.all_reduce(gradient, group=group.group)
    return out.detach(), gradients


def rank_groups() -> dict[int, CPGroup]:
    rank = dist.get_rank()
    groups = {1: CPGroup.alone(rank)}
    for size in range(2, RANKS + 1):
        made = dist.new_group(list(range(size)))
        groups[size] = CPGroup(made, rank if rank < size else -1, size, tuple(range(size)))
    return groups


def work(cases: list[tuple[Case, Row]], pairs: list[tuple[Case, Row, Row]]) -> dict[str, Any]:
    """On each rank: the worst errors of each case (output, gradients); outputs and gradients of both rows of a pair."""
    groups, rank = rank_groups(), dist.get_rank()
    errors = []
    for case, row in cases:
        if rank >= case.size:
            continue
        index = torch.arange(row.cu[-1]).chunk(case.size)[rank]
        out, gradients = run_case(case, row, groups[case.size])
        wanted = [*(x[index] for x in row.gradients[:3]), *row.gradients[3:]]
        output_error = (out - row.out[index]).abs().max().item()
        worst = max((a - b).abs().max().item() for a, b in zip(gradients, wanted, strict=True))
        errors.append((case, output_error, worst))
    probes = [
        [(out, gradients[:3]) for out, gradients in (run_case(case, row, groups[case.size]) for row in (a, b))]
        for case, a, b in pairs
    ]
    halo = None
    if rank < 2:  # the convolution alone, with and without its halo
        row = make_row((9, 40), 2, SHAPE)
        info = make_seqinfo("contiguous", torch.tensor(row.cu), groups[2])
        mixed, conv = row.inputs[0], row.weights[0]
        expected = packed_convolution(mixed, conv, row.cu)[info.index]
        positions, halo = cut_pieces(info).positions, []
        for crossed in (True, False):
            found = causal_convolution(with_halo(mixed[info.index], 4, groups[2], crossed=crossed), conv, positions)
            halo.append((found - expected).abs().max().item())
    return {"errors": errors, "probes": probes, "halo": halo}


def fits(case: Case) -> bool:
    return case.how == "state" or case.shape.value_heads % case.size == 0


EXACT = [
    case
    for size in range(1, RANKS + 1)
    for lengths in ROWS
    for how in ("state", "heads")
    if fits(case := Case(size, lengths, how)) and (how == "state" or lengths in (RAGGED, (3, 1), (1, 1, 1, 1, 1)))
] + [
    Case(3, RAGGED, "heads", FEW),  # more ranks than key heads: the key head is shared
    Case(4, RAGGED, "heads", DeltaShape(1, 4, 8, 4)),
    *(Case(size, lengths, longest=longest) for size in (2, 3, 4) for lengths in (RAGGED, (64,)) for longest in (1, 5)),
]
FAULTY = [Case(2, RAGGED, fault="boundary dropped"), Case(3, RAGGED, "state", fault="state not passed")]
PROBED = 30  # a token of the long document, which spans ranks
PROBES = [Case(4, RAGGED), Case(4, RAGGED, "heads"), Case(4, RAGGED, longest=5)]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    cases = [(case, make_row(case.lengths, case.size, case.shape)) for case in EXACT]
    # where the convolution reads no token to the left, what is missing can only be the state
    cases += [(case, make_row(case.lengths, case.size, case.shape, taps=1)) for case in FAULTY]
    pairs = [
        (case, make_row(case.lengths, 4, SHAPE), make_row(case.lengths, 4, SHAPE, changed=PROBED)) for case in PROBES
    ]
    return launch(work, cases, pairs, ranks=RANKS, timeout_s=55)


def worst(results: list[dict[str, Any]], case: Case) -> tuple[float, float]:
    found = [(out, gradient) for result in results for other, out, gradient in result["errors"] if other == case]
    assert len(found) == case.size
    return max(out for out, _ in found), max(gradient for _, gradient in found)


def test_every_cut_is_exact(results: list[dict[str, Any]]) -> None:
    """B10, D8, D12: chunks of one token, documents over many ranks, several a rank, padded tails."""
    errors = {case: worst(results, case) for case in EXACT}
    output, gradient = (max(e[i] for e in errors.values()) for i in (0, 1))
    print(f"{len(EXACT)} cases: output {output:.1e}, gradient {gradient:.1e}")
    wrong = {case: error for case, error in errors.items() if not max(error) < 1e-11}
    assert not wrong


@pytest.mark.parametrize("case", FAULTY, ids=lambda case: case.fault)
def test_planted_faults_are_seen(results: list[dict[str, Any]], case: Case) -> None:
    output, gradient = worst(results, case)
    assert output > 1e-3 and gradient > 1e-3


def test_a_dropped_halo_is_seen(results: list[dict[str, Any]]) -> None:
    with_it, without = ([result["halo"][i] for result in results[:2]] for i in (0, 1))
    assert max(with_it) < 1e-13
    assert without[1] > 1e-2  # rank 1 is cut inside the second document; rank 0 has nothing to its left


@pytest.mark.parametrize("number", range(len(PROBES)), ids=lambda n: f"{PROBES[n].how}-{PROBES[n].longest}")
def test_another_document_changes_no_bit(results: list[dict[str, Any]], number: int) -> None:
    """Leak probe: one token of the fifth document changed; outputs and input gradients of all others, bit for bit."""
    row = make_row(RAGGED, 4, SHAPE)
    inside = torch.arange(row.cu[-1])
    inside = (inside >= row.cu[4]) & (inside < row.cu[5])
    before, after = (
        [torch.cat(parts) for parts in zip(*([out, *gradients] for out, gradients in runs), strict=True)]
        for runs in zip(*(result["probes"][number] for result in results), strict=True)
    )
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[~inside], b[~inside])
        assert not torch.equal(a[inside], b[inside])
