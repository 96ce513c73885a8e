"""A rank's own rows of what all ranks hold keep no other rows alive: their storage is their own size, forward and backward.

Control: rows as a view of the whole, which have the same numbers.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longspan.engine.megatron import collectives
from longspan.launch import launch
from longspan.layout import CPGroup

ROWS, WIDTH = 3, 4  # of a rank


def rows(made: Tensor, rank: int, whole: Tensor) -> tuple[bool, int]:
    """Whether these are the rank's rows, and the bytes they keep, in rows."""
    same = torch.equal(made, whole[ROWS * rank : ROWS * (rank + 1)]) and made.is_contiguous()
    return same, made.untyped_storage().nbytes() // (8 * WIDTH)


def kept() -> list[tuple[bool, int]]:
    """Of keep_own's result and of gather_whole's gradient, without and with the fault."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group = CPGroup(dist.group.WORLD, rank, size, tuple(range(size)))
    whole = torch.randn(ROWS * size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own, found = whole[ROWS * rank : ROWS * (rank + 1)].clone().requires_grad_(), []

    def as_view(x: Tensor, group: CPGroup) -> Tensor:
        return x.chunk(group.size)[group.rank].contiguous()

    for cut in (collectives._own_rows, as_view):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "_own_rows", cut)
            found.append(rows(collectives.keep_own(whole.clone(), group), rank, whole))
            (gradient,) = torch.autograd.grad(collectives.gather_whole(own, group), own, whole.clone())
            found.append(rows(gradient, rank, whole))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_own_rows_keep_nothing_else_alive(ranks: int) -> None:
    for found in launch(kept, ranks=ranks, timeout_s=60):
        assert found == [(True, ROWS)] * 2 + [(True, ROWS * ranks)] * 2
