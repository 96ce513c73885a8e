"""Peak extra memory of the LM head on CPU, forward and backward, T=4096, V=32k: below two chunks of logits.

Each way runs in a process of its own. Two measures: `tracked` adds up every tensor storage that an operation makes and
frees it with its last reference (exact, sees no scratch inside an operation); `rss` is the kernel's peak of resident
memory, reset just before the call, over what was resident then (sees everything). Inputs are not counted. Outputs -
log-probs, entropies, gradients of hidden and weight - are memory that any head returns: counted apart and taken off.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/head_memory.py [--json benchmarks/results/head_memory_cpu.json]
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.objective import head_loss, head_outputs
from longspan.objective.chunks import chunk_rows
from longspan.observe.provenance import provenance

TOKENS, VOCAB, WIDTH = 4096, 32768, 64
MIB = 2**20
CASES = (("two_pass", "float32"), ("one_pass", "float32"), ("two_pass", "bfloat16"), ("plain", "float32"))


class Tracked(TorchDispatchMode):
    """Bytes of the storages alive that were made under this mode (`inputs` apart), and their peak."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or size == 0:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH) / WIDTH**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,)), torch.rand(TOKENS)


def run(way: str, hidden: Tensor, weight: Tensor, targets: Tensor, *, token_weight: Tensor) -> tuple[Tensor, ...]:
    """One forward and backward; everything it returns is output, not extra memory."""
    if way == "one_pass":
        made = head_loss(
            hidden, weight, targets, lambda out, where: token_weight[where] * (out.logprob + out.entropy), entropy=True
        )
        grads = torch.autograd.grad(made.total, (hidden, weight))
        return made.logprob, made.entropy, *grads
    if way == "two_pass":
        out = head_outputs(hidden, weight, targets, entropy=True)
        logprob, entropy = out.logprob, out.entropy
    else:
        log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
        logprob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    grads = torch.autograd.grad((token_weight * (logprob + entropy)).sum(), (hidden, weight))
    return logprob.detach(), entropy.detach(), *grads


def resident(key: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak since reset)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Gives freed memory back to the system and forgets the peak so far."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(way: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Both measures of one way, one after the other."""
    hidden, weight, targets, token_weight = case(dtype)
    # a first, small call brings libraries and threads in, so that their memory is not counted
    run(way, hidden[:8].detach().requires_grad_(), weight, targets[:8], token_weight=token_weight[:8])
    found = {}
    reset_peak()
    before = resident("VmRSS")
    outputs = run(way, hidden, weight, targets, token_weight=token_weight)
    found["rss"] = _split(resident("VmHWM") - before, outputs)
    with Tracked(hidden, weight, targets, token_weight) as tracked:
        outputs = run(way, hidden, weight, targets, token_weight=token_weight)
    return found | {"tracked": _split(tracked.peak, outputs)}


def _split(total: int, outputs: tuple[Tensor, ...]) -> dict[str, float]:
    returned = sum(x.untyped_storage().nbytes() for x in outputs)
    return {"peak_mib": total / MIB, "outputs_mib": returned / MIB, "extra_mib": (total - returned) / MIB}


def child(way: str, dtype: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, __file__, "--child", way, dtype]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def report() -> dict:
    rows = chunk_rows(TOKENS, VOCAB, itemsize=4, device="cpu", chunk="auto")
    chunk_mib = rows * VOCAB * 4 / MIB
    results = []
    for way, dtype in CASES:
        for how, found in child(way, dtype).items():
            chunks = found["extra_mib"] / chunk_mib
            results.append({"way": way, "dtype": dtype, "measure": how, "chunks": chunks} | found)
            print(
                f"{dtype:9} {way:9} {how:8} extra {found['extra_mib']:8.1f} MiB = {chunks:5.2f} chunks "
                f"(outputs {found['outputs_mib']:.1f} MiB apart)",
                flush=True,
            )
    held = all(r["chunks"] < 2 for r in results if r["way"] != "plain")
    print(f"chunk: {rows} rows of {VOCAB} logits = {chunk_mib:.1f} MiB; below two chunks: {held}")
    return {
        "tokens": TOKENS,
        "vocab": VOCAB,
        "width": WIDTH,
        "chunk_rows": rows,
        "chunk_mib": chunk_mib,
        "below_two_chunks": held,
        "results": results,
        "provenance": provenance(Path(__file__).parent),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "head_memory_cpu.json")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "DTYPE"))
    arguments = parser.parse_args()
    if arguments.child:
        way, dtype = arguments.child
        print(json.dumps(measure(way, {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype])))
        return 0
    found = report()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["below_two_chunks"] else 1


if __name__ == "__main__":
    sys.exit(main())
