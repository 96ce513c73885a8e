"""`longspan train RECIPE [--dotted.overrides]`: from a recipe file to a run folder.

A recipe is a Python file with a function `config()` that returns a frozen dataclass (a `Job`): settings by field, any
of them set on the command line by its dotted path (`--grpo.steps 10`). `FILE.py:NAME` names another function. Ranks
are started here, as many as the layout has, unless torchrun or Slurm started them already; every rank reads the
recipe file itself, so nothing has to be pickled.

The run folder: config.json, versions.json, metrics.jsonl (the record), rows.jsonl (what each step trained on),
rollouts.jsonl, checkpoints/, report.html, certificate.json (with --certify). Starting the same command again resumes.
SIGTERM saves first, then the exit status is 143.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch.distributed as dist
import tyro
from transformers.utils.logging import disable_progress_bar

import longspan
from longspan.engine import Engine, EngineConfig
from longspan.errors import LongspanError, UserError
from longspan.launch import World, is_rank, launch, world
from longspan.observe import budget_lines, check_makeable, check_writable, provenance, read_jsonl, write_report
from longspan.rl.config import RunConfig
from longspan.rl.run import Run

__all__ = ["Job", "load_job", "main", "train"]

STOPPED = 143  # exit status after SIGTERM, as a shell reports it
Certificate = Callable[[EngineConfig], dict[str, Any]]  # collective: parity of a config's model and layout
WEEK_S = 7 * 24 * 3600.0  # a run has no time limit of its own


class Job(Protocol):
    """What a recipe's function returns: a frozen dataclass with these members."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def engine(self) -> EngineConfig:
        """`{run}` in `engine.model` stands for the run folder, for a model that `prepare` writes there."""
        ...

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in order; `train` runs them."""
        ...

    def prepare(self) -> None:
        """Make files that the ranks need (a model folder). Runs once, before any rank builds its engine."""
        ...

    def train(self, engine: Engine, run: Run) -> None:
        """Run the stages. Collective."""
        ...


def main(arguments: Sequence[str], certificate: Certificate | None = None) -> int:
    """Entry of `longspan train`; returns the exit status. certificate: parity's, given by the command line (rl and
    parity stand side by side and import nothing of each other)."""
    parser = argparse.ArgumentParser(
        prog="longspan train",
        description=f"{__doc__}\n`longspan train RECIPE --help` lists the recipe's settings.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="FILE.py or FILE.py:FUNCTION")
    parser.add_argument(
        "--certify", action="store_true", help="write certificate.json: parity of this model and layout"
    )
    parser.add_argument("--json", metavar="FILE", help="write the last numbers of every stage to FILE")
    options, overrides = parser.parse_known_args(arguments)
    if options.recipe is None:
        parser.print_help()
        return 0 if {"-h", "--help"} & set(overrides) else 2
    try:
        if options.certify and certificate is None:
            raise UserError("--certify needs the parity checks: run it through `longspan train`")
        if options.json:
            check_writable("--json", Path(options.json))
        results = train(options.recipe, overrides, certificate=certificate if options.certify else None)
    except LongspanError as error:
        print(f"longspan train: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    if options.json and world_rank() == 0:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if results["stopped"]:
        return STOPPED
    return 0 if results.get("certified", True) else 1


def train(recipe: str, overrides: Sequence[str] = (), *, certificate: Certificate | None = None) -> dict[str, Any]:
    """Run a recipe. Returns {"stopped": bool, "folder": path, "<stage>": its last line of metrics, ...}."""
    if is_rank():
        return run_rank(recipe, list(overrides), certificate)
    disable_progress_bar()
    job = load_job(recipe, overrides)
    prepare(job)
    with _interrupt_stops_ranks():
        return launch(run_rank, recipe, list(overrides), certificate, ranks=job.engine.layout.ranks, timeout_s=WEEK_S)[
            0
        ]


@contextmanager
def _interrupt_stops_ranks() -> Iterator[None]:
    """The first Ctrl-C is a SIGTERM, which `launch` hands to the ranks: they save and end. The second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGINT, previous)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def load_job(recipe: str, overrides: Sequence[str] = ()) -> Job:
    """Call the recipe's function and apply the overrides. Raises UserError for a file or function that is not there."""
    path, _, name = recipe.partition(":")
    name = name or "config"
    module = _load(Path(path))
    if name not in vars(module):
        raise UserError(f"recipe {path} has no function {name}(). A recipe returns its job from config()")
    job = vars(module)[name]()
    prog = f"longspan train {recipe}"
    return tyro.cli(type(job), default=job, args=list(overrides), use_underscores=True, prog=prog)


def run_rank(recipe: str, overrides: list[str], certificate: Certificate | None) -> dict[str, Any]:
    """One rank's part of the run."""
    here = world()
    disable_progress_bar()  # transformers draws one a rank and model, over our own
    job = load_job(recipe, overrides)
    prepare_once(job, here)
    folder = Path(job.run.folder)
    engine_config = replace(job.engine, model=job.engine.model.replace("{run}", str(folder)))
    description = describe(job)
    results: dict[str, Any] = {"folder": str(folder)}
    if certificate is not None:  # before step 1, and before the run's own engine takes its memory
        proof = certificate(engine_config)
        results["certified"] = proof["passed"]
        if here.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "certificate.json").write_text(json.dumps(proof, indent=1) + "\n", encoding="utf-8")
            print(f"certificate: parity {'holds' if proof['passed'] else 'MISSED, see certificate.json'}", flush=True)
    engine = Engine.build(engine_config)
    if here.rank == 0:
        for line in start_lines(engine):
            print(line, flush=True)
    run = Run(job.run, engine, job.stages)
    run.begin(description)
    if here.rank == 0:  # after a resume was accepted: a refused one leaves the run's own settings
        start_folder(folder, recipe, description)
    job.train(engine, run)
    run.finish()
    results["stopped"] = run.stopped
    if here.rank == 0:
        print(f"report: {write_report(folder)}", flush=True)
        results |= {row["stage"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    return results


def prepare(job: Job) -> None:
    """Make what the recipe needs, where the run could keep it."""
    check_makeable("run.folder", Path(job.run.folder))
    job.prepare()


def prepare_once(job: Job, here: World) -> None:
    """Rank 0 prepares; nothing is left to do where `train` did it, under torchrun this is the only call. Collective:
    a failure is raised by every rank."""
    failures: list[str | None] = [None] * here.ranks
    mine = None
    try:
        if here.rank == 0:
            prepare(job)
    except LongspanError as error:
        mine = str(error)
    dist.all_gather_object(failures, mine)
    if failures[0] is not None:
        raise UserError(failures[0])


def start_lines(engine: Engine) -> list[str]:
    """What the run really uses: model, layout, and the token budget in every unit."""
    layout = engine.mesh.layout
    total = sum(parameter.numel() for parameter in engine.adapter.model.parameters())
    lines = [
        f"model {engine.config.model}: {total / 1e6:.2f} M parameters, {engine.config.dtype}; layout {layout.name}"
    ]
    budget = engine.planner.limits([1]).budget
    lines += [engine.planner.why] if engine.planner.why else []  # mixer="auto"
    return lines + budget_lines(budget, dp=layout.dp, cp=layout.cp, mixer=layout.mixer)


def describe(job: Job) -> dict[str, Any]:
    """The settings as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(job), default=str))  # type: ignore[call-overload]  # a Job is a dataclass


def start_folder(folder: Path, recipe: str, description: dict[str, Any]) -> None:
    """config.json and versions.json. On resume under other settings the differences are printed, then recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    document = {"recipe": recipe, "config": description}
    if path.exists():
        before = flatten(json.loads(path.read_text(encoding="utf-8")))
        after = flatten(document)
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                print(f"resuming with {name} = {after.get(name)!r}, was {before.get(name)!r}", flush=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    versions = provenance(Path(longspan.__file__).parent)
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """{"dotted.path": leaf}."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf
        for key, inner in value.items()
        for path, leaf in flatten(inner, f"{name}.{key}" if name else key).items()
    }


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(
            f"recipe {path} does not exist (working directory {Path.cwd()}). Give a file, as recipes/digits_vl.py"
        )
    spec = importlib.util.spec_from_file_location(f"longspan_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module
