"""`make mutants`: every planted fault alone, in the smallest setting where it can show, and which check catches it.

One launch for all faults of one model and layout; a fault that hangs or breaks its ranks gets a launch of its own.
Exit status 0 when every fault is caught and the engine without a fault passes the same checks.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.table import Table

from longspan.errors import LongspanError, RankLost
from longspan.launch import launch, world
from longspan.layout import parse_layout
from longspan.parity.cases import default_cases
from longspan.parity.cells import Cell
from longspan.parity.checks import ALL_CHECKS, Plan, Truth, check_layout
from longspan.parity.compare import Request, brief, is_moe, prepare, rank_cell
from longspan.parity.faults import FAULTS, planted, resolve
from longspan.parity.mutation import Fault
from longspan.parity.reference import Reference
from longspan.parity.report import write_json

CASES = (
    "ppo",
    "gspo",
    "distill_topk",
    "distill_full",
    "distill_reverse",
    "entropy",
    "together",
    "moe_aux",
    "moe_batch",
)  # one of each kind of term and reduction
HANG_S = 40.0  # a launch whose ranks wait for each other is stopped after this
GROUP_S = 600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checks said of one fault."""

    fault: str
    cells: tuple[Cell, ...]

    @property
    def caught_by(self) -> list[str]:
        return sorted({cell.check for cell in self.cells if not cell.passed})


def run(names: Iterable[str] | None = None, *, quick: bool = False, hang_s: float = HANG_S) -> list[Verdict]:
    """Verdicts of the named faults (None: all), each group after one run without a fault, named "none".

    quick: only the check and the case that each fault names.
    """
    wanted = [FAULTS[name] for name in (FAULTS if names is None else names)]
    for fault in wanted:
        for target, _ in fault.changes:
            resolve(target)  # here, where a missing one cannot be taken for a fault that was caught
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in wanted:
        groups.setdefault((fault.model, fault.layout), []).append(fault)
    verdicts = []
    for (model, layout), faults in groups.items():
        verdicts += _group(model, layout, faults, quick=quick, hang_s=hang_s)
    return verdicts


def _group(model: str, layout_name: str, faults: Sequence[Fault], *, quick: bool, hang_s: float) -> list[Verdict]:
    layout = parse_layout(layout_name)
    checks = {fault.check for fault in faults} if quick else set(ALL_CHECKS)
    names = {fault.case for fault in faults} if quick else set(CASES)
    reference = Reference(model, dtype=torch.float64, value_head=True)
    cases = [case for case in default_cases(value_head=True, moe=is_moe(reference), teacher=True) if case.name in names]
    request = Request(
        model=model,
        layouts={layout_name: layout},
        cases=cases,
        checks=[check for check in ALL_CHECKS if check in checks],
        steps=2,
    )
    plan, truth = prepare(request, reference)
    plan = replace(plan, config=replace(plan.config, layout=layout), probes=plan.probes[:1])
    with TemporaryDirectory(prefix="longspan-mutants-") as folder:
        path = Path(folder) / "truth.pt"
        torch.save(truth, path)
        calm = [fault.name for fault in faults if not fault.hangs]
        alone = [fault.name for fault in faults if fault.hangs]
        try:
            verdicts = _launch([None, *calm], plan, path, quick=quick, timeout_s=GROUP_S)
        except LongspanError:  # one of them breaks its ranks: find out which
            verdicts = _launch([None], plan, path, quick=quick, timeout_s=GROUP_S)
            alone = [*calm, *alone]
        for name in alone:
            try:
                verdicts += _launch([name], plan, path, quick=quick, timeout_s=hang_s)
            except LongspanError as error:
                if isinstance(error, RankLost) and not FAULTS[name].hangs:
                    raise  # killed or too slow: that shows nothing of the fault
                verdicts.append(Verdict(name, (Cell(layout_name, "run", "", float("inf"), 0.0, brief(error)),)))
    return verdicts


def _launch(names: list[str | None], plan: Plan, path: Path, *, quick: bool, timeout_s: float) -> list[Verdict]:
    layout = plan.config.layout
    results = launch(_in_rank, names, plan, path, quick, ranks=layout.ranks, timeout_s=timeout_s)
    verdicts = []
    for number, name in enumerate(names):
        cells, _ = results[0][number]
        ranks = rank_cell(layout.name, [result[number][1] for result in results])
        verdicts.append(Verdict(name or "none", (*cells, ranks)))
    return verdicts


def _in_rank(names: list[str | None], plan: Plan, path: Path, quick: bool) -> list[tuple[list[Cell], str]]:
    compares = world().rank == 0
    truth = torch.load(path, weights_only=False) if compares else Truth.empty()
    out = []
    for name in names:
        own = plan
        if quick and name is not None:
            fault = FAULTS[name]
            own = replace(plan, checks=[fault.check], cases=[case for case in plan.cases if case.name == fault.case])
        with planted(name):
            findings = check_layout(plan.config.layout.name, own, truth, compares=compares)
        out.append((findings.cells, findings.digest.hexdigest()))
    return out


@dataclass(frozen=True, slots=True)
class Options:
    """Which faults."""

    only: str | None = None
    """Comma-separated names; all by default."""
    quick: bool = False
    """Only the check and the case that each fault names."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the table to this file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 when every fault is caught and nothing is found without one."""
    options = tyro.cli(Options, args=arguments, prog="python -m longspan.parity.mutants", description=__doc__)
    started = time.monotonic()
    torch.set_num_threads(1)  # tiny models: threads only get into each other's way
    verdicts = run(None if options.only is None else options.only.split(","), quick=options.quick)
    table = Table(title="planted faults and the checks that caught them")
    for column in ("fault", "caught by", "what"):
        table.add_column(column)
    clean = all(not verdict.caught_by for verdict in verdicts if verdict.fault == "none")
    planted_ones = [verdict for verdict in verdicts if verdict.fault != "none"]
    for verdict in planted_ones:
        table.add_row(verdict.fault, ", ".join(verdict.caught_by) or "[red]nothing[/red]", FAULTS[verdict.fault].what)
    console = Console()
    console.print(table)
    for verdict in planted_ones:
        for cell in verdict.cells:
            if cell.check == "run":
                console.print(f"{verdict.fault} stopped its ranks: {cell.where}", markup=False, highlight=False)
    missed = [verdict.fault for verdict in planted_ones if not verdict.caught_by]
    console.print(
        f"{len(planted_ones) - len(missed)} of {len(planted_ones)} faults caught, "
        f"{'no' if clean else 'SOME'} misses without a fault, {time.monotonic() - started:.0f} s"
    )
    if options.json is not None:
        write_json(options.json, {"passed": clean and not missed, "faults": {v.fault: v.caught_by for v in verdicts}})
    return 0 if clean and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
