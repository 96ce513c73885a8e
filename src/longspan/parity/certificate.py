"""A certificate: what a short parity check of one model under one layout found, with everything needed to repeat it.

`certify(config)` runs inside the ranks of a run (`longspan train --certify`), before step 1: rank 0 is the oracle,
all ranks run the engine on a few short samples. `from_cells` makes the same record of a `longspan parity` run. It is
taken in full width: LoRA, frozen parts and offloading are left out, and a bf16 run is certified in fp32, since bf16
has no tolerance of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from longspan.engine import EngineConfig
from longspan.launch import world
from longspan.layout import parse_layout
from longspan.observe import provenance
from longspan.parity.cases import Case
from longspan.parity.cells import Cell
from longspan.parity.checks import BOTH_ORDERS, Plan, Truth, check_layout
from longspan.parity.compare import ORACLE_DTYPE, Comparison, Request, model_hash, prepare, rank_cell
from longspan.parity.reference import Reference

LENGTHS = (13, 1, 40, 7, 29)  # images of the default samples lie across the cuts of cp 2, 3 and 4
CASES = (Case("ppo with KL and entropy", "ppo", {"clip": 0.2, "kl": 0.1, "entropy": 0.01}, "sample"),)
CHECKS = ("start", "logprob", "gradient", "calls", "leak")
FULL = "float32"  # what a bf16 run is certified in


def certify(config: EngineConfig) -> dict[str, object]:
    """Parity of a run's model under its layout. Collective; the same record on every rank. "seconds" is what it took."""
    started = perf_counter()
    here = world()
    dtype = FULL if config.dtype == "bfloat16" else config.dtype
    full = replace(
        config, dtype=dtype, lora=None, freeze=(), offload=(), value_head=config.backend == "fsdp", compile=False
    )
    message: list[Plan | None] = [None]
    truth = Truth.empty()
    if here.rank == 0:
        plan, truth = _prepare(full, here.device.type)
        message = [plan]
    dist.broadcast_object_list(message, src=0)
    plan = message[0]
    assert plan is not None
    name = config.layout.name
    findings = check_layout(name, plan, truth, compares=here.rank == 0)
    digests: list[str] = [""] * here.ranks
    dist.all_gather_object(digests, findings.digest.hexdigest())
    cells = [*findings.cells, rank_cell(name, digests)]
    record = [None]
    if here.rank == 0:
        found = from_cells(full, cells, findings.parts, model_hash(truth.start))
        record = [found | {"seconds": round(perf_counter() - started, 3)}]
    dist.broadcast_object_list(record, src=0)
    assert record[0] is not None
    return record[0]


def _prepare(config: EngineConfig, device: str) -> tuple[Plan, Truth]:
    reference = Reference(
        config.model, dtype=ORACLE_DTYPE[config.dtype], seed=config.seed, value_head=config.value_head, device=device
    )
    request = Request(
        model=config.model,
        layouts={config.layout.name: config.layout},
        dtype=config.dtype,
        backend=config.backend,
        seed=config.seed,
        lengths=LENGTHS,
        cases=CASES,
        checks=CHECKS,
        recompute=config.recompute,
        dynamic_cp=config.dynamic_cp,
    )
    plan, truth = prepare(request, reference)
    own = replace(config, layout=config.layout)
    return replace(plan, config=own, probes=plan.probes[:1], calls=(BOTH_ORDERS,)), truth


def certificates(found: Comparison) -> dict[str, object]:
    """The records of a `longspan parity` run, one a layout."""
    return {
        layout: from_cells(
            replace(found.config, layout=parse_layout(layout)),
            [cell for cell in found.cells if cell.layout == layout],
            found.parts.get(layout, {}),
            found.model_hash,
        )
        for layout in dict.fromkeys(cell.layout for cell in found.cells)
    }


def from_cells(
    config: EngineConfig,
    cells: Sequence[Cell],
    parts: Mapping[str, tuple[float, str]],
    weights: str,
) -> dict[str, object]:
    """The record: what ran, what was found, whether it holds. weights: model_hash of the start."""
    return {
        "model": config.model,
        "model_hash": weights,
        "layout": config.layout.name,
        "backend": config.backend,
        "dtype": config.dtype,
        "passed": bool(cells) and all(cell.passed for cell in cells),
        "worst_logprob": _worst(cells, "logprob"),
        "worst_gradient": {part: {"figure": figure, "where": where} for part, (figure, where) in parts.items()},
        "n_calls": _worst(cells, "calls"),
        "leak_probe": _worst(cells, "leak"),
        "ranks_agree": _worst(cells, "ranks"),
        "metrics": _worst(cells, "metrics"),
        "misses": [cell.as_json() for cell in cells if not cell.passed],
        **provenance(Path(__file__).parent),
    }


def _worst(cells: Sequence[Cell], check: str) -> dict[str, object] | None:
    found = [cell for cell in cells if cell.check == check]
    if not found:
        return None
    cell = max(found, key=lambda cell: cell.figure if cell.figure == cell.figure else float("inf"))
    figure = cell.as_json()["figure"]
    return {"figure": figure, "limit": cell.limit, "where": cell.where, "case": cell.case}
