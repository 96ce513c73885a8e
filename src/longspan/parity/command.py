"""`longspan parity`: prove on your own model that a layout changes no number.

Compares the engine under each layout with an oracle: plain Hugging Face, one process, one unpacked sample at a time.
Exit status 0 when every cell holds, 1 on a miss (a planted fault makes it miss), 2 for a request that cannot be run, 3 when nothing
missed but a layout's ranks died or ran past --timeout-s: of its numbers nothing is known.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from longspan.data.jsonl import read_jsonl
from longspan.errors import LongspanError, RankLost, UserError
from longspan.launch import check_timeout
from longspan.layout import parse_layouts
from longspan.models.loading import read_config
from longspan.observe import check_writable
from longspan.parity.certificate import certificates
from longspan.parity.compare import Request, compare
from longspan.parity.faults import FAULTS
from longspan.parity.report import render, summary, write_json

DEFAULT_LAYOUTS = "cp2-ulysses,cp2-ring,cp2-gather,cp4-hybrid,cp3-ring,dp2,dp2-cp2"

CERTIFICATE = "certificate.json"
MISSED, REFUSED, LOST = 1, 2, 3  # exit statuses


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare."""

    model: str = "tiny:qwen3_vl"
    """"tiny:<family>", a local Hugging Face folder, or a hub id."""
    layouts: str = DEFAULT_LAYOUTS
    """Comma-separated names: axis and size joined by "-", then the mixer; no mixer is auto."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """float64 holds to 1e-8, float32 to 1e-5, bfloat16 to 1.2 times the unsharded engine's distance from fp32."""
    backend: Literal["fsdp", "megatron"] = "fsdp"
    """What owns parameters and optimizer."""
    samples: str | None = None
    """JSONL file of samples; by default ragged ones with holes, and images on the shard edges for a VLM."""
    lengths: str | None = None
    """Comma-separated text lengths of the default samples, for example 13,1,40."""
    seed: int = 0
    """Seed of a tiny model's weights."""
    teacher: str | None = None
    """A second model of the same vocabulary, for the cases of full distillation; a tiny model has one with another seed."""
    steps: int = 3
    """Optimizer steps compared."""
    recompute: Literal["none", "selective", "full"] = "selective"
    """Activation checkpointing of the engine."""
    dynamic_cp: bool = False
    """Let the engine choose the context-parallel size per row."""
    plant: str | None = None
    """Plant this fault in every rank; "list" prints the faults."""
    device: Literal["auto", "cpu", "cuda", "shared"] = "auto"
    """Where ranks run; "shared": on GPUs of this machine that are fewer than the ranks, with their kernels."""
    timeout_s: float = 600.0
    """Seconds for one launch of ranks."""
    certificate: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a certificate a layout: hashes, versions, worst figures; certificate.json for a model of your own."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write worst_logprob, worst_gradient, worst_calls, passed, lost and every cell to this file."""


def main(arguments: Sequence[str]) -> int:
    """Exit status of the command."""
    options = tyro.cli(Options, args=list(arguments), prog="longspan parity", description=__doc__)
    if options.plant == "list":
        for name, fault in FAULTS.items():
            print(f"{name:24} {fault.what}")
        return 0
    try:
        for name, path in (("--json", options.json), ("--certificate", options.certificate)):
            if path is not None:
                check_writable(name, Path(path))
        request = request_of(options)
        for name in (options.model, options.teacher or options.model):
            read_config(name)  # what is no model is refused before the oracle looks for weights
        if options.model.startswith("tiny:"):
            torch.set_num_threads(1)  # the oracle's tensors are tiny: threads only get into each other's way
        found = compare(request)
    except LongspanError as error:
        print(f"longspan parity: {error}", file=sys.stderr)
        return LOST if isinstance(error, RankLost) else REFUSED if isinstance(error, UserError) else MISSED
    title = f"{options.model}, {options.dtype}, {options.backend} against the oracle"
    render(found.cells, title, plant=options.plant, lost=found.lost)
    result = summary(found.cells) | {"passed": found.passed, "lost": dict(found.lost)}
    if options.json is not None:
        write_json(options.json, {"model": options.model, "dtype": options.dtype, "backend": options.backend} | result)
    if options.certificate is not None or not options.model.startswith("tiny:"):
        write_json(options.certificate or CERTIFICATE, certificates(found))
    missed = not found.lost or any(not cell.passed for cell in found.cells)
    return 0 if found.passed else MISSED if missed else LOST


def request_of(options: Options) -> Request:
    """Checked options. Raises UserError for anything that cannot be run."""
    if options.plant is not None and options.plant not in FAULTS:
        raise UserError(f"--plant {options.plant!r} is no fault we know. Use one of {', '.join(FAULTS)}, or 'list'.")
    if options.samples is not None and options.lengths is not None:
        raise UserError("--samples and --lengths both say which samples run. Give one of them.")
    if options.device == "shared" and options.backend == "megatron":
        raise UserError("--device shared runs --backend fsdp: Megatron-Core wants NCCL, and NCCL a GPU for each rank.")
    if options.steps < 0:
        raise UserError(f"--steps {options.steps} must be 0 or more.")
    if not 0 <= options.seed < 2**63 - 1:
        raise UserError(f"--seed {options.seed} must be 0 or more and below 2**63 - 1: a teacher takes the next one.")
    check_timeout(options.timeout_s)
    return Request(
        model=options.model,
        layouts=parse_layouts(options.layouts),
        dtype=options.dtype,
        backend=options.backend,
        seed=options.seed,
        samples=None if options.samples is None else read_jsonl(options.samples),
        lengths=None if options.lengths is None else parse_lengths(options.lengths),
        teacher=options.teacher,
        steps=options.steps,
        recompute=options.recompute,
        dynamic_cp=options.dynamic_cp,
        plant=options.plant,
        timeout_s=options.timeout_s,
        device=options.device,
    )


def parse_lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--lengths {text!r} must be positive whole numbers joined by commas, for example 13,1,40.")
    return [int(part) for part in parts]
