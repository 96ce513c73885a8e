"""mixer="auto": the cheapest mixer that the model can run at this CP size, by the cost model, and why.

Pure: the same on every rank. Windowed models do not take the ring, whose blocks the model's windows would cut to nothing;
a mixer named in the layout is never replaced, only refused (layout/resolve.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from longspan.data.cost import CostModel
from longspan.layout import Layout
from longspan.layout.mesh import ulysses_parts
from longspan.layout.resolve import ulysses_refusal

__all__ = ["MixerChoice", "choose_mixer", "mixer_layouts"]

ROW = 8192  # tokens a rank, where no budget says how long rows are


@dataclass(frozen=True, slots=True)
class MixerChoice:
    """A layout without mixer="auto"; `why` is a sentence for the user, empty where nothing was chosen."""

    layout: Layout
    why: str = ""


def choose_mixer(
    layout: Layout,
    cost_of: Callable[[Layout], CostModel],
    *,
    size: int,
    heads: int,
    recurrent: bool,
    windowed: bool,
    tokens: int | None = None,
) -> MixerChoice:
    """size: CP size to decide at. cost_of: the cost model of a layout. tokens: of a rank, to decide at."""
    if layout.mixer != "auto" or size == 1:
        return MixerChoice(layout)
    found, refused = mixer_layouts(layout, size=size, heads=heads, recurrent=recurrent, windowed=windowed)
    length = (tokens or ROW) * size
    times = [cost_of(each)(length, size) for each in found]
    best = min(range(len(found)), key=lambda number: (times[number], number))
    others = [
        f"{found[number].mixer} {times[number] / times[best]:.2f} times"
        for number in sorted(range(len(found)), key=lambda number: times[number])
        if number != best
    ]
    others += [f"{name} cannot run ({reason})" for name, reason in refused.items()]
    why = f"mixer {found[best].mixer}: the cheapest at cp={size} for a row of {length:,} tokens, {times[best]:.3g} s"
    return MixerChoice(found[best], why + "".join(f"; {other}" for other in others))


def mixer_layouts(
    layout: Layout, *, size: int, heads: int, recurrent: bool, windowed: bool
) -> tuple[list[Layout], dict[str, str]]:
    """The layouts of every mixer that can run, those with least to keep in mind first, and why the others cannot."""
    refused: dict[str, str] = {}
    parts = [part for part in ulysses_parts(size) if heads % part == 0]
    if reason := ulysses_refusal(size, heads):
        refused["ulysses"] = reason.split(".")[0]
    if windowed:
        refused["ring"] = refused["hybrid"] = "the model has windowed layers"
    elif not parts:
        refused["hybrid"] = f"no part of cp={size} divides {heads} heads"
    elif layout.cp != size:
        refused["hybrid"] = "its parts are those of a fixed cp"
    balanced = "contiguous" if recurrent or windowed else "zigzag"
    indices = {"ulysses": "contiguous", "ring": balanced, "gather": balanced, "hybrid": balanced}
    found = [
        replace(
            layout,
            mixer=mixer,
            index=index if layout.index == "auto" else layout.index,
            ulysses=(layout.ulysses or parts[-1]) if mixer == "hybrid" else None,
        )
        for mixer, index in indices.items()
        if mixer not in refused
    ]
    return found, refused
