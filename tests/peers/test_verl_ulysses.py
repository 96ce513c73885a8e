"""verl's Ulysses functions (verl/utils/ulysses.py of verl 0.9.1) beside our mixers, in fp64.

`make env` puts the package's files under <venv>/peers, outside the import path; the one file is loaded by its path,
since the package itself imports ray. Attention between its two exchanges is the plain formula.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ours import MIXERS, SCALE, RowOfTokens, distance, formula, group, ours
from torch import Tensor

from longspan.launch import launch
from longspan.mixers import naive

FILE = Path(sys.prefix) / "peers" / "verl" / "utils" / "ulysses.py"
LIMIT = 1e-12
pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason=f"no {FILE}: pip install --no-deps --target {FILE.parents[2]} verl==0.9.1"
)


def verl() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verl_ulysses", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl_attention(row: RowOfTokens, lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Places of this rank's real tokens and their out, dq, dk, dv. lengths: the boundaries that attention is told."""
    peer = verl()
    of = group()
    peer.set_ulysses_sequence_parallel_group(of.group)
    total = sum(row.lengths)
    ids, _, pad = peer.ulysses_pad(torch.arange(total)[None], torch.arange(total)[None], sp_size=of.size, pad_value=-1)
    places = peer.slice_input_tensor(ids[0], 0, padding=False)
    real = places >= 0
    local = [torch.where(real[:, None, None], x[places.clamp(min=0)], 0.0)[None] for x in row.tensors]
    leaves = [x.requires_grad_() for x in local[:3]]  # [1, T/N, H, D]
    q, k, v = (peer.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2)[0] for x in leaves)  # [T, H/N, D]
    bounds = [*lengths, *([pad] if pad else [])]
    out = naive.attention(
        q,
        k,
        v,
        position=torch.cat([torch.arange(n) for n in bounds]),
        segment=torch.arange(len(bounds)).repeat_interleave(torch.tensor(bounds)),
        scale=SCALE,
    )
    out = peer.gather_heads_scatter_seq(out[None], head_dim=2, seq_dim=1)
    found = [out.detach(), *torch.autograd.grad(out, leaves, local[3])]
    return places[real], [x[0][real] for x in found]


def compared(lengths: tuple[int, ...]) -> dict[str, list[float]]:
    row, of = RowOfTokens(lengths), group()
    want = formula(row)
    places, told = verl_attention(row, lengths)
    _, untold = verl_attention(row, (sum(lengths),))
    found = {"verl": distance(told, want, places), "verl without boundaries": distance(untold, want, places)}
    for mixer, index in MIXERS:
        own_places, own = ours(row, mixer, index, of)
        found[f"{mixer} {index}"] = distance(own, want, own_places)
    return found


@pytest.mark.parametrize("lengths", [(16,), (13,), (7, 9), (3, 1, 9)])
def test_attention_is_the_same_where_it_is_told_the_boundaries(lengths):
    """Even and ragged rows, one document and several. A kernel that gets no boundaries mixes the documents."""
    for found in launch(compared, lengths, ranks=2, timeout_s=60, device="cpu"):
        untold = found.pop("verl without boundaries")
        assert all(max(errors) < LIMIT for errors in found.values()), found
        assert (max(untold) > 0.1) == (len(lengths) > 1)


def gathered() -> tuple[float, float]:
    """Factor on the gradient of a sum over all tokens, by rank-local sums (which collectives add) and replicated ones."""
    peer, of = verl(), group()
    peer.set_ulysses_sequence_parallel_group(of.group)
    factors = []
    for only_own in (True, False):
        x = torch.arange(6.0, dtype=torch.float64)[of.rank * 3 : of.rank * 3 + 3].requires_grad_()
        whole = peer.gather_outputs_and_unpad(x, gather_dim=0)
        own = whole[of.rank * 3 : of.rank * 3 + 3] if only_own else whole
        (gradient,) = torch.autograd.grad((own**2).sum(), x)
        factors.append(float((gradient / (2 * x)).nanmean()))
    return factors[0], factors[1]


def test_gradients_through_verls_gather_carry_the_group_size():
    """Right only where ranks are averaged and every rank's loss is the whole one; where losses are summed it is 2 times."""
    assert launch(gathered, ranks=2, timeout_s=60, device="cpu") == [(2.0, 2.0), (2.0, 2.0)]


def sliced() -> list[int]:
    """The slice of a group given as an argument, without the module's global one."""
    peer, of = verl(), group()
    return peer.slice_input_tensor(torch.arange(6), 0, group=of.group).tolist()


def test_verls_slice_ignores_the_group_it_is_given():
    """Rank 1 gets rank 0's tokens: the rank comes from the module's global. Ours has no globals (law 6)."""
    assert launch(sliced, ranks=2, timeout_s=60, device="cpu") == [[0, 1, 2], [0, 1, 2]]
