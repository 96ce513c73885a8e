"""3. Mixers: what lets tokens meet across ranks. `MIXERS` names them; `make_mixer` makes the one of a layout."""

from collections.abc import Callable

from longspan.layout.mesh import Layout
from longspan.mixers.attention import AttentionCache, Mixer, Prepared, Saved
from longspan.mixers.gather import Gather
from longspan.mixers.gather_overlap import OverlappedGather
from longspan.mixers.hybrid import Hybrid
from longspan.mixers.local import Local, packed_attention
from longspan.mixers.ring import Ring
from longspan.mixers.symmetric import make_transport
from longspan.mixers.transport import Collective, Transport
from longspan.mixers.ulysses import Ulysses
from longspan.mixers.ulysses_overlap import OverlappedUlysses, keep_arrivals, keep_output

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
    "make_transport",
    "packed_attention",
]


def _ulysses(transport: Transport, lean: bool) -> Ulysses | OverlappedUlysses:
    if transport.blocking:
        return Ulysses()
    return OverlappedUlysses(transport, keep=keep_output if lean else keep_arrivals)


def _gather(transport: Transport) -> Gather | OverlappedGather:
    return Gather() if transport.blocking else OverlappedGather(transport)


MIXERS: dict[str, Callable[[Layout, Transport, bool], Mixer]] = {
    "ulysses": lambda layout, transport, lean: _ulysses(transport, lean),
    "ring": lambda layout, transport, lean: Ring(transport),
    "gather": lambda layout, transport, lean: _gather(transport),
    "hybrid": lambda layout, transport, lean: Hybrid(layout.ulysses or 1, _ulysses(transport, lean), Ring(transport)),
}


def make_mixer(layout: Layout, transport: Transport | None = None, *, lean: bool = False) -> Mixer:
    """The mixer of a resolved layout (`longspan.layout.resolve`); for rows of one rank each attends alone.

    transport: `make_transport(mesh.all, mesh.device)` where ranks should use what their machine offers. lean: rather another
    travel in backward than two copies of attention's output until then (ulysses over symmetric memory; the others keep one).
    """
    assert layout.mixer in MIXERS, f"resolve the layout first: mixer={layout.mixer!r}"
    return MIXERS[layout.mixer](layout, transport or Collective(), lean)
