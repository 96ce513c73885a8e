"""`python -m longspan.parity.sweep_summary shard*.json`: adds up the records of a sweep's shards and prints them.

Exit status 0 when no shard has a miss, no two shards ran the same seed, at least `--n` examples ran, and everything
in REQUIRED was met.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from longspan.observe import provenance
from longspan.parity.report import write_json
from longspan.parity.sweep_coverage import REQUIRED

__all__ = ["main", "summary"]


@dataclass(frozen=True, slots=True)
class Options:
    """Which records."""

    files: tyro.conf.Positional[tuple[str, ...]]
    """JSON files that `python -m longspan.parity.sweep --json` wrote."""
    n: int = 0
    """Examples that all shards together must have run."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the sum to this file."""


def summary(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of all shards."""
    worst: dict[str, float] = {}
    coverage: Counter[str] = Counter()
    launches: Counter[int] = Counter()
    for shard in shards:
        coverage.update(shard["coverage"])
        launches.update(range(shard["seeds"][0], shard["seeds"][1] + 1))
        for name, figure in shard["worst"].items():
            worst[name] = max(worst.get(name, 0.0), figure)
    misses = [miss for shard in shards for miss in shard["misses"]]
    not_met = [name for name in REQUIRED if not coverage[name]]
    repeated = sorted(number for number, times in launches.items() if times > 1)
    return {
        "examples": sum(shard["examples"] for shard in shards),
        "launches": len(launches),
        "misses": misses,
        "worst": worst,
        "coverage": dict(sorted(coverage.items())),
        "not_met": not_met,
        "repeated_seeds": repeated,
        "passed": not misses and not not_met and not repeated,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sum; 0 when it holds."""
    options = tyro.cli(Options, args=arguments, prog="python -m longspan.parity.sweep_summary", description=__doc__)
    found = summary([json.loads(Path(name).read_text()) for name in options.files])
    for name, times in found["coverage"].items():
        print(f"{times:6}  {name}")
    for miss in found["misses"]:
        print(miss)
    if found["not_met"]:
        print(f"not met: {', '.join(found['not_met'])}")
    if found["repeated_seeds"]:
        print(f"run twice: seeds {found['repeated_seeds']}. Give each shard a --seed 1000 away from the others.")
    figures = ", ".join(f"{name} {figure:.1e}" for name, figure in found["worst"].items())
    print(
        f"{found['examples']} examples in {found['launches']} launches, {len(found['misses'])} misses, worst {figures}"
    )
    if options.json is not None:
        write_json(options.json, found | provenance(Path(__file__).parent))
    if found["examples"] < options.n:
        print(f"{options.n - found['examples']} of {options.n} examples did not run: see the shards' logs.")
    return 0 if found["passed"] and found["examples"] >= options.n else 1


if __name__ == "__main__":
    sys.exit(main())
