"""Where a run came from: commit, package versions, platform. Written once into the run folder as versions.json."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["provenance"]

PACKAGES = (
    "longspan",
    "torch",
    "transformers",
    "numpy",
    "pillow",
    "safetensors",
    "peft",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "apache-tvm-ffi",
    "fla-core",
    "tilelang",
    "scikit-learn",
)


def provenance(source: Path) -> dict[str, str | bool | dict[str, str]]:
    """Commit (and whether the tree was dirty) of the repository that holds `source`, versions and platform."""
    status = _git(source, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git(source, "rev-parse", "HEAD") or "not a git checkout",
        "dirty": bool(status),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
