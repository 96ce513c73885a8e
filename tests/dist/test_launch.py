"""What a launch says of a rank that dies, fails or hangs."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longspan.errors import RankError, RankLost, UserError
from longspan.launch import _threads, launch, world


def _die() -> None:
    if world().rank == 1:
        os._exit(7)
    time.sleep(30)


def _die_before_the_stack_file(folder: str) -> None:
    if world().rank == 1:
        for file in Path(folder).glob("longspan-launch-*/stack-1"):
            file.unlink()
        os._exit(7)
    time.sleep(30)


def _abort_beside_a_collective() -> None:
    dist.barrier()
    if world().rank == 1:
        os.abort()  # what glibc does where it finds the heap corrupt
    dist.all_reduce(torch.ones(1))


def _hang() -> None:
    if world().rank == 1:
        time.sleep(30)


def _divide() -> float:
    return 1 / (world().rank - world().rank)


def _refuse() -> None:
    if world().rank == 1:
        raise UserError("lr=-1 must be positive")
    time.sleep(30)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_seconds_that_no_run_can_have_are_refused(seconds: float) -> None:
    with pytest.raises(UserError, match=r"timeout_s=\S+ must be above 0 and at most 2,000,000 s"):
        launch(_die, ranks=2, timeout_s=seconds, device="cpu")


def test_a_dead_rank_is_named_with_its_exit_code() -> None:
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 failed first .* exit code 7"):
        launch(_die, ranks=2, timeout_s=60, device="cpu")
    assert time.monotonic() - started < 25


def test_a_rank_that_dies_without_its_stack_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RankLost, match=r"rank 1 failed first .* exit code 7"):
        launch(_die_before_the_stack_file, str(tmp_path), ranks=2, timeout_s=60, device="cpu")


def test_a_dead_rank_is_named_before_the_connections_that_its_death_broke() -> None:
    """The other rank's gloo error is there first; it would say nothing of the cause."""
    with pytest.raises(RankLost, match=r"rank 1 failed first .* exit code -6 \(Aborted\)") as found:
        launch(_abort_beside_a_collective, ranks=2, timeout_s=60, device="cpu")
    assert "_abort_beside_a_collective" in str(found.value), "the stack it left"


def test_a_rank_that_hangs_is_named_and_its_stack_shown() -> None:
    with pytest.raises(RankLost, match=r"ranks \[1\] did not finish within 6 s") as found:
        launch(_hang, ranks=2, timeout_s=6, device="cpu")
    assert "_hang" in str(found.value)


def test_an_exception_is_no_lost_rank() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError") as found:
        launch(_divide, ranks=2, timeout_s=60, device="cpu")
    assert not isinstance(found.value, RankLost)


def test_our_own_error_travels_as_it_is() -> None:
    with pytest.raises(UserError, match="lr=-1 must be positive"):
        launch(_refuse, ranks=2, timeout_s=60, device="cpu")


@pytest.mark.parametrize("device", ["cuda", "shared", "tpu"])
def test_a_device_that_is_not_here_is_refused_before_ranks_start(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(multiprocessing, "get_context", None)
    with pytest.raises(UserError, match=f"device='{device}' is no"):
        launch(_divide, ranks=2, timeout_s=60, device=device)


@pytest.mark.parametrize(
    ("device", "ranks", "cores", "threads"),
    [("cpu", 2, 32, 1), ("cuda", 2, 32, 8), ("cuda", 4, 16, 4), ("cuda", 8, 4, 1)],
)
def test_ranks_share_the_cores(
    device: str, ranks: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's default is every core for each rank."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert _threads(torch.device(device), ranks) == threads
