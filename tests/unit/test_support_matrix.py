"""The README's support matrix is the rendering of what was measured; no cell is a miss."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longspan.errors import UserError
from longspan.models import FAMILIES, TINY, tiny

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "support.json"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("support", ROOT / "benchmarks" / "support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


support = load_script()


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))["families"]


def test_the_readme_shows_what_was_measured(families: dict[str, Any]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition(support.BEGIN)[2].partition(support.END)[0]
    want = support.render(families)
    assert shown.strip() == want.strip(), (
        "run: python benchmarks/support.py --table benchmarks/results/support.json --readme README.md"
    )


def test_nothing_that_ran_missed(families: dict[str, Any]) -> None:
    assert set(TINY) == set(support.ROWS) == set(support.ORDER) and set(families) <= set(TINY)
    for model, cells in families.items():
        assert set(cells) <= set(support.columns(model)), model
        for layout, cell in cells.items():
            assert cell.get("passed") or "refused" in cell, f"{model} {layout}: {cell}"
    refused = {
        (model, layout) for model, cells in families.items() for layout, cell in cells.items() if "refused" in cell
    }
    unexpected = {(m, c) for m, c in refused if c != "cp3-ulysses" and not c.startswith(support.MEGATRON)}
    assert not unexpected, "every other layout runs: four query heads cannot be dealt to three ranks"


def test_every_architecture_that_loads_has_a_row() -> None:
    assert {tiny(name).architectures[0] for name in TINY} == set(FAMILIES)


def test_a_miss_a_refusal_and_a_gap_are_told_apart() -> None:
    good = dict.fromkeys(support.CHECKS, 2e-15) | {"passed": True}
    cells = {
        "cp2-ulysses": good,
        "cp2-ring": good | {"gradient": 0.5, "passed": False},
        "cp2-gather": {"refused": "no such mixer (model tiny:qwen3). Use ring."},
        "cp3-ring": {"error": "rank 1 died"},
    }
    lines = support.render(
        {"qwen3": cells, "llama": {"cp2-gather": {"refused": "no such mixer (model tiny:llama). Use ring."}}}
    ).splitlines()
    assert lines[6].startswith("| `llama` |") and "refused (1)" in lines[6]
    assert lines[7] == "| `qwen3` | 2e-15 | **5e-01** | refused (1) |  | **error** |  |  |  |  |"
    assert lines[-1] == "1. no such mixer (model tiny:...). Use ring."


def test_the_table_goes_between_the_markers_only(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{support.BEGIN}\nold\n{support.END}\nbelow\n")
    support.put(readme, "new\n")
    assert readme.read_text() == f"above\n{support.BEGIN}\nnew\n{support.END}\nbelow\n"
    readme.write_text("no markers")
    with pytest.raises(UserError, match="lacks"):
        support.put(readme, "new\n")
