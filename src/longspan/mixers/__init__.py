"""3. Mixers: what lets tokens meet across ranks. `MIXERS` names them; `make_mixer` makes the one of a layout."""

from collections.abc import Callable

from longspan.layout.mesh import Layout
from longspan.mixers.attention import AttentionCache, Mixer, Prepared, Saved
from longspan.mixers.gather import Gather
from longspan.mixers.hybrid import Hybrid
from longspan.mixers.local import Local, packed_attention
from longspan.mixers.ring import Ring
from longspan.mixers.ulysses import Ulysses

__all__ = [
    "MIXERS",
    "AttentionCache",
    "Gather",
    "Hybrid",
    "Local",
    "Mixer",
    "Prepared",
    "Ring",
    "Saved",
    "Ulysses",
    "make_mixer",
    "packed_attention",
]

MIXERS: dict[str, Callable[[Layout], Mixer]] = {
    "ulysses": lambda layout: Ulysses(),
    "ring": lambda layout: Ring(),
    "gather": lambda layout: Gather(),
    "hybrid": lambda layout: Hybrid(ulysses=layout.ulysses or 1),
}


def make_mixer(layout: Layout) -> Mixer:
    """The mixer of a resolved layout (`longspan.layout.resolve`); for rows of one rank each attends alone."""
    assert layout.mixer in MIXERS, f"resolve the layout first: mixer={layout.mixer!r}"
    return MIXERS[layout.mixer](layout)
