"""The rules of the house that a program can check: who imports whom, how long files and functions are, what __all__
says.

Works on the source text (ast), so that a file that is never imported is held to the same rules.
"""

import ast
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "longspan"
FILES = sorted(SOURCE.rglob("*.py"))
ORDER = ["data", "layout", "mixers", "models", "objective", "engine", "parity|rl", "server", "cli"]
LEAVES = {"errors", "observe", "config", "typed"}
# The public front: `longspan/__init__.py` names things of every folder; launch.py stands beside the layers.
FRONT = {"__init__", "launch"}
OPTIONAL = ("flash_attn", "fla", "megatron", "tensorboard", "wandb")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


def layer_of(top: str) -> int | None:
    """Place of a top-level folder or module in the order; None for leaves and the front."""
    return next((place for place, names in enumerate(ORDER) if top in names.split("|")), None)


def top_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import of a file, function bodies and TYPE_CHECKING blocks included."""
    package = ("longspan", *path.relative_to(SOURCE).parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def show(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE.parent)}:{line}"


def test_imports_go_one_way() -> None:
    wrong = []
    for path in FILES:
        own, here = top_of(path), layer_of(top_of(path))
        for line, name in imported(path):
            parts = name.split(".")
            if parts[0] != "longspan" or len(parts) < 2 or own in FRONT:
                continue
            other = parts[1]
            there = layer_of(other)
            if there is None or other == own:
                continue
            if own in LEAVES or here is None or there > here or (there == here and other != own):
                wrong.append(f"{show(path, line)} ({own}) imports {name} ({other})")
    assert not wrong, "\n".join(wrong)


def test_leaves_import_only_leaves() -> None:
    wrong = [
        f"{show(path, line)} imports {name}"
        for path in FILES
        if top_of(path) in LEAVES
        for line, name in imported(path)
        if name.startswith("longspan.") and name.split(".")[1] not in LEAVES
    ]
    assert not wrong, "\n".join(wrong)


def test_data_knows_no_ranks() -> None:
    wrong = [
        f"{show(path, line)} imports {name}"
        for path in FILES
        if top_of(path) == "data"
        for line, name in imported(path)
        if name.startswith("torch.distributed")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_stand_in_one_file(package: str) -> None:
    """megatron-core is a backend of its own: its folder is the one place."""
    users = {
        "engine/megatron" if package == "megatron" and "engine/megatron" in str(path) else str(path.relative_to(SOURCE))
        for path in FILES
        for _, name in imported(path)
        if name.split(".")[0] == package
    }
    assert len(users) <= 1, f"{package} is imported in {sorted(users)}"


def test_only_launch_reads_the_environment() -> None:
    wrong = []
    for path in FILES:
        if path.name == "launch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                wrong.append(show(path, node.lineno))
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    long = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: lines for name, lines in long.items() if lines > MAX_FILE_LINES}
    assert not long, long


def test_functions_are_short() -> None:
    long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{show(path, node.lineno)} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_files_open_with_what_they_are() -> None:
    wrong = [str(path.relative_to(SOURCE)) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not wrong, wrong


def test_source_is_ascii() -> None:
    wrong = [str(path.relative_to(SOURCE)) for path in FILES if not path.read_text().isascii()]
    assert not wrong, wrong


def test_nothing_is_swallowed() -> None:
    """No `except Exception`, no bare except (launch.py reports BaseException to the parent, which raises it), no star
    import.
    """
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and path.name != "launch.py":
                kinds = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
                if any(
                    kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
                    for kind in kinds
                ):
                    wrong.append(show(path, node.lineno))
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                wrong.append(show(path, node.lineno))
    assert not wrong, "\n".join(wrong)


def test_losses_neither_average_nor_divide_by_ranks() -> None:
    """STYLE 20: no mean(), no world size outside objective/weights.py; segments.py and stats.py own the declared
    reductions. A mean over a given dim (a norm over features) reduces no tokens.
    """
    wrong = []
    for path in FILES:
        if top_of(path) not in ("objective", "engine") or path.name in ("weights.py", "segments.py", "stats.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "get_world_size":
                wrong.append(show(path, node.lineno))
            torch_mean = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "mean"
                and not node.args
                and not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("segments", "stats"))
            )
            if torch_mean:
                wrong.append(show(path, node.lineno))
    assert not wrong, "\n".join(wrong)


def packages() -> list[str]:
    """Packages without an optional dependency."""
    names = []
    for path in FILES:
        if path.name == "__init__.py" and "megatron" not in path.parts:
            names.append(".".join(("longspan", *path.relative_to(SOURCE).parts[:-1])))
    return names


@pytest.mark.parametrize("name", packages())
def test_all_is_true(name: str) -> None:
    """Every package has __all__, without duplicates, and every name in it exists."""
    module = importlib.import_module(name)
    names = module.__all__
    assert len(set(names)) == len(names)
    for entry in names:
        assert getattr(module, entry) is not None
