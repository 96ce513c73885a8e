"""Which groups may travel over symmetric memory, by what each rank says of its GPU: gloo ranks whose CUDA is made up.

A GPU is known by its uuid: ranks that see one GPU each all call it number 0.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from longspan.launch import launch
from longspan.layout import CPGroup
from longspan.mixers.symmetric import symmetric_refusal

UNREACHED = "the GPUs cannot reach each other's memory"


def refusal(gpus: list[tuple[int, str]], reachable: bool) -> str | None:
    """gpus: number and uuid of each rank's."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpus[rank][1]))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reachable)
        group = CPGroup(dist.group.WORLD, rank, len(gpus), tuple(range(len(gpus))))
        return symmetric_refusal(group, torch.device("cuda", gpus[rank][0]))


@pytest.mark.parametrize(
    ("gpus", "reachable", "said"),
    [
        ([(0, "a"), (1, "b"), (2, "c")], True, None),
        ([(0, "a"), (1, "b")], False, UNREACHED),
        ([(0, "a"), (0, "b")], True, UNREACHED),  # one GPU visible to each
        ([(0, "a"), (0, "a"), (0, "b")], True, UNREACHED),
        ([(0, "a"), (0, "a")], False, None),  # launch(device="shared")
        ([(0, "a"), (1, "b"), (0, "a")], True, None),
        ([(0, "a"), (1, "b"), (0, "a")], False, UNREACHED),
    ],
)
def test_groups_that_may(gpus: list[tuple[int, str]], reachable: bool, said: str | None) -> None:
    found = launch(refusal, gpus, reachable, ranks=len(gpus), timeout_s=60, device="cpu")
    assert found == [said] * len(gpus)
