"""Mends a race in the TileLang kernel that fla-core 0.6.0 runs for dq, dk, dw and the decay's gradient on Hopper.

Every thread of the kernel adds <h, dh> of a chunk to one number in shared memory: read, add, write, without a barrier
between. A warp that reads late adds twice, and the gradients of the decay of all 64 tokens of that chunk are wrong
(fla issue 889: on an H200 they differ from run to run and miss the reference by more than 2 %; its fix, pull request
890, is not in 0.6.0). fla takes this kernel wherever TileLang is installed, and Triton 3.4 to 3.7.0 has no other that
is right. `mended` gives the sum one writer: it compiles fla's own source with that line guarded. A source without the
line is left as it is.
"""

import linecache
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["mended", "one_writer"]

RACE = "s_dg_last_acc[0] = s_dg_last_acc[0] + f_hdh_scalar[0]"
GUARD = "for _i in T.Parallel(1):"  # TileLang's "one thread only"


def one_writer(source: str) -> str:
    """The kernel's source with the sum under a guard; unchanged where it has one, or where there is no such sum."""
    lines = source.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.strip() == RACE and (number == 0 or lines[number - 1].strip() != GUARD):
            indent = line[: len(line) - len(line.lstrip())]
            lines[number] = f"{indent}{GUARD}\n{indent}    {RACE}\n"
    return "".join(lines)


def mended(module: ModuleType) -> ModuleType:
    """fla's module of the kernel, with one writer; TileLang reads a kernel's source through inspect, so it is listed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    text = one_writer(source)
    if text == source:
        return module
    name = f"<{module.__name__} with one writer>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found = ModuleType(f"{module.__name__}_with_one_writer")
    found.__file__ = name
    sys.modules[found.__name__] = found
    exec(compile(text, name, "exec"), found.__dict__)
    return found
