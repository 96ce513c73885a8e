"""Short names of layouts: axes with their size, then words, joined by "-": "dp2-cp4-hybrid", "tp2-sp", "cp3-ring".

"ep2" alone means dp2-ep2. "u2" is the ulysses part of a hybrid. Words left out stay "auto". Inverse: `Layout.name`.
"""

import re
from typing import Any

from longspan.errors import UserError
from longspan.layout.mesh import INDICES, LINEARS, MIXERS, Layout
from longspan.typed import typed

__all__ = ["parse_layout", "parse_layouts"]

AXIS = re.compile(r"(dp|cp|tp|pp|vpp|ep|etp|u)(\d+)")
WORDS = {
    **{word: ("mixer", word) for word in MIXERS},
    **{word: ("index", word) for word in INDICES if word != "auto"},
    **{word: ("linear", word) for word in LINEARS if word != "auto"},
    "sp": ("sequence_parallel", True),
}


@typed
def parse_layout(name: str) -> Layout:
    """The layout of a short name."""
    settings: dict[str, Any] = {}  # Any: the fields of Layout are of several types, it checks them itself
    for word in name.split("-"):
        key, value = _setting(word, name)
        if key in settings:
            raise UserError(f"layout {name!r} sets {key} twice, the second time by {word!r}")
        settings[key] = value
    if "ep" in settings and not settings.keys() & {"dp", "cp", "tp"}:
        settings["dp"] = settings["ep"] * settings.get("etp", 1)
    return Layout(**settings)


def parse_layouts(names: str) -> dict[str, Layout]:
    """Name -> layout, in the order given; a name given twice counts once."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UserError(f"--layouts {names!r} names no layout. Write for example --layouts cp2-ring,dp2.")
    return {name: parse_layout(name) for name in wanted}


def _setting(word: str, name: str) -> tuple[str, Any]:
    if match := AXIS.fullmatch(word):
        return "ulysses" if match[1] == "u" else match[1], int(match[2])
    if word not in WORDS:
        raise UserError(
            f"layout {name!r}: unknown part {word!r}. Write axes (dp, cp, tp, pp, vpp, ep, etp) with a size and words "
            f"({', '.join(WORDS)}), joined by '-', such as 'dp2-cp2-ring'."
        )
    return WORDS[word]
