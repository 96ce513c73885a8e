"""Starting ranks: the only reader of RANK, WORLD_SIZE, LOCAL_RANK and the rest of the environment.

`launch(fn, ranks=2)` runs `fn` in that many processes of this machine and returns what each returned. torchrun and Slurm start
ranks themselves; then `world()` joins them. Either way `world()` says who this process is; a process that nobody launched is a world
of one. The first failure ends the run: the others are stopped, the failing rank is named and its traceback shown. A rank that died is
named before the ranks whose connections its death broke: they often speak first.
Backends: gloo on CPU; on CUDA `cpu:gloo,cuda:nccl`, so that small host-side checks need no device synchronisation. Ranks that share
a GPU (device="shared") have gloo on CUDA too: NCCL takes one rank a GPU. Slow, and every number of the layout is its own.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from longspan.errors import LongspanError, RankError, RankLost, UserError
from longspan.typed import typed

__all__ = ["World", "check_timeout", "host_threads", "is_rank", "launch", "world"]

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
GPU_THREADS = 8  # at most, beside a GPU: a container may be granted less time than the cores it sees
MOST_S = 2e6  # 23 days; the system call that waits for ranks takes 24
SHARED = "shared"  # device of ranks that share GPUs
GRACE_S = 3.0  # how long the other ranks may take to end by themselves after the first failure
PRELOAD = [  # imported once in a clean server process and then forked: 10 s saved a rank
    "longspan.engine",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed: when, with which error where it is one of ours, what it left, and whether its process died."""

    at: float
    error: LongspanError | None
    said: str  # begins on the line that names the rank
    died: bool = False

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The smallest is the cause: our own error comes before a death, and both before the broken pipes they leave."""
        return self.error is None, not self.died, self.at


@dataclass(frozen=True, slots=True)
class World:
    """Who this process is: its rank, the number of ranks, its place on this machine, and its device."""

    rank: int
    ranks: int
    local_rank: int
    device: torch.device


def world() -> World:
    """Join the process group that torchrun or `launch` started (a group of one where nobody did) and describe this process."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    name = os.environ.get("LONGSPAN_DEVICE", "auto")
    device = _device(name, local_rank)
    if not dist.is_initialized():
        if is_rank():
            dist.init_process_group(_backend(name, device), timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(_backend(name, device), store=dist.HashStore(), rank=0, world_size=1)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device)


def is_rank() -> bool:
    """Whether torchrun, Slurm (with RANK and WORLD_SIZE exported) or `launch` started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_timeout(timeout_s: float) -> None:
    """Raises UserError for seconds that no run can be given."""
    if not 0 < timeout_s <= MOST_S:
        raise UserError(f"timeout_s={timeout_s:g} must be above 0 and at most {MOST_S:,.0f} s (23 days)")


@typed
def launch(
    fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = 600.0, device: str = "auto"
) -> list[Any]:
    """Run `fn(*args)` on `ranks` processes of this machine and return their results, rank 0 first.

    fn: any callable, closures included (it travels by cloudpickle); what it returns must pickle.
    timeout_s: seconds for the whole run; after it every rank is stopped and the ones still running are named with their stacks.
    device: "auto" (CUDA where every rank has a GPU, else CPU), "cpu", "cuda" or "shared": more ranks than GPUs, to check a layout of
        backend="fsdp".
    Raises UserError for a bad number of ranks or seconds; the rank's own error where it is one of ours; RankError for any other failure.
    """
    if ranks < 1:
        raise UserError(f"ranks={ranks} must be at least 1")
    check_timeout(timeout_s)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= ranks else "cpu"
    _check_device(device)
    context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")  # CUDA cannot be forked
    context.set_forkserver_preload(PRELOAD)
    folder = Path(tempfile.mkdtemp(prefix="longspan-launch-"))
    payload = cloudpickle.dumps((fn, args))
    workers, pipes = [], []
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_worker, args=(rank, ranks, str(folder), device, payload, sender))
            worker.start()
            sender.close()
            workers.append(worker)
            pipes.append(receiver)
        with _forward_sigterm(workers):
            return _collect(workers, pipes, folder, timeout_s)
    finally:
        _stop(workers)
        shutil.rmtree(folder, ignore_errors=True)


def _worker(rank: int, ranks: int, folder: str, device_name: str, payload: bytes, pipe: Any) -> None:
    """Body of one rank: joins the group, runs the function, sends ("ok", result) or ("error", time, exception, traceback)."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LONGSPAN_DEVICE=device_name)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with open(Path(folder) / f"stack-{rank}", "w") as stack:
        faulthandler.enable(file=stack)  # a crash of native code leaves its stack
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        try:
            device = _device(device_name, rank)
            torch.set_num_threads(_threads(device, ranks))
            store = dist.FileStore(str(Path(folder) / "store"), ranks)
            dist.init_process_group(
                _backend(device_name, device), store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT
            )
            store.set(f"joined-{rank}", "")
            fn, args = pickle.loads(payload)
            message = ("ok", cloudpickle.dumps(fn(*args)))
        except BaseException as error:  # reported to the parent, which raises it: nothing is swallowed
            message = ("error", time.time(), _portable(error), traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            pipe.send(message)
        pipe.close()
        if message[0] == "ok" and dist.is_initialized():
            store.wait([f"joined-{other}" for other in range(ranks)])  # one that still connects would lose its peer
            dist.destroy_process_group()


def host_threads() -> int:
    """Threads that work of this rank beside torch's may take, such as decoding images: its share of this machine's cores, by
    LOCAL_WORLD_SIZE as torchrun exports it (without it: one rank a machine)."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not (told.isdecimal() and int(told)):
        raise UserError(f"LOCAL_WORLD_SIZE={told!r} must be the number of ranks on this machine, 1 or more")
    return _share(int(told))


def _threads(device: torch.device, ranks: int) -> int:
    """OpenMP threads of a rank. Pools that share cores spin: a tiny step took 3 s instead of 0.13, cutting a row 390 ms instead of 2."""
    return 1 if device.type == "cpu" else _share(ranks)


def _share(ranks: int) -> int:
    return max(1, min(GPU_THREADS, len(os.sched_getaffinity(0)) // ranks))


def _portable(error: BaseException) -> LongspanError | None:
    """Our own errors travel as they are; any other is described by its traceback."""
    return error if isinstance(error, LongspanError) else None


def _collect(workers: list[Any], pipes: list[Any], folder: Path, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(pipes):
        pending = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in results and rank not in failures}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if failures:
                break
            raise RankLost(_describe_hang(sorted(pending.values()), workers, folder, timeout_s))
        for pipe in ready:
            rank = pending[pipe]
            try:
                message = pipe.recv()
            except EOFError:
                failures[rank] = _death(workers[rank], folder, rank)
                continue
            if message[0] == "ok":
                results[rank] = pickle.loads(message[1])
            else:
                _, at, error, trace = message
                failures[rank] = Failure(at, error, f"\n{trace}")
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        _raise_first(failures)
    return [results[rank] for rank in range(len(pipes))]


def _death(worker: Any, folder: Path, rank: int) -> Failure:
    """Of a rank whose pipe closed before it had said anything."""
    at = time.time()
    worker.join(GRACE_S)
    code = worker.exitcode
    by = f" ({signal.strsignal(-code)})" if code is not None and code < 0 else ""
    return Failure(at, None, f" the process died with exit code {code}{by}\n{_stack(folder, rank)}", died=True)


def _raise_first(failures: dict[int, Failure]) -> None:
    rank, first = min(failures.items(), key=lambda item: item[1].order)
    if first.error is not None:
        first.error.add_note(f"raised first by rank {rank} of the ranks that failed: {sorted(failures)}{first.said}")
        raise first.error
    kind = RankLost if first.died else RankError
    raise kind(f"rank {rank} failed first (failed: {sorted(failures)}):{first.said}")


def _describe_hang(ranks: list[int], workers: list[Any], folder: Path, timeout_s: float) -> str:
    for rank in ranks:
        if workers[rank].is_alive():
            os.kill(workers[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    stacks = [f"rank {rank}:\n{_stack(folder, rank)}" for rank in ranks]
    return (
        f"ranks {ranks} did not finish within {timeout_s:g} s. Raise timeout_s or look where they wait:\n"
        + "\n".join(stacks)
    )


def _stack(folder: Path, rank: int) -> str:
    """What faulthandler wrote for a rank; nothing if it died before it could."""
    file = folder / f"stack-{rank}"
    return file.read_text()[:4000] if file.exists() else ""


def _stop(workers: list[Any]) -> None:
    for worker in workers:
        worker.join(0.5 if worker.is_alive() else None)
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join()


@contextlib.contextmanager
def _forward_sigterm(workers: list[Any]) -> Iterator[None]:
    """While ranks run, a SIGTERM to this process goes to them: they save and end in their own time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(*_: Any) -> None:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_device(name: str) -> None:
    """Raises UserError for a device that is not one, or not here."""
    if name not in ("cpu", "cuda", SHARED):
        raise UserError(f"device={name!r} is no device of ours. Use 'auto', 'cpu', 'cuda' or {SHARED!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"device={name!r} is not available here. Use 'cpu', or 'cuda' on a machine with a GPU for each rank "
            f"({SHARED!r}: with a GPU)"
        )


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(name)
    if name == "cpu":
        return torch.device("cpu")
    if name == SHARED:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", local_rank % torch.cuda.device_count() if name == SHARED else local_rank)
    torch.cuda.set_device(device)
    return device


def _backend(name: str, device: torch.device) -> str:
    on_gpu = "cpu:gloo,cuda:gloo" if name == SHARED else "cpu:gloo,cuda:nccl"
    return "gloo" if device.type == "cpu" else on_gpu
