"""Turns "auto" in a layout into a choice, from what the model can do. Pure: the same on every rank.

mixer: ulysses where the heads allow (least traffic), else gather for windowed or recurrent models, else ring.
index: zigzag for the ring on attention-only models (equal causal work), else contiguous (token order, no padding).
"""

import dataclasses
from typing import Literal

from longspan.errors import UserError
from longspan.layout.mesh import Layout, ulysses_parts

__all__ = ["resolve"]


def resolve(layout: Layout, *, heads: int, kv_heads: int, recurrent: bool, windowed: bool, model: str = "") -> Layout:
    """The same layout without "auto"; refuses what this model cannot do."""
    if heads % kv_heads:
        raise UserError(f"{heads} query heads are no multiple of {kv_heads} KV heads: not a GQA model")
    mixer = _mixer(layout, heads, recurrent=recurrent, windowed=windowed)
    if mixer == "ulysses" and (reason := ulysses_refusal(layout.cp, heads, model=model)):
        raise UserError(reason)
    if recurrent and layout.index == "zigzag":
        raise UserError(
            "index='zigzag' breaks the token order that this model's recurrent layers need. "
            "Use index='contiguous' (any mixer)."
        )
    balanced = mixer in ("ring", "hybrid") and not recurrent
    index = layout.index if layout.index != "auto" else ("zigzag" if balanced else "contiguous")
    linear = layout.linear if layout.linear != "auto" else "state"
    ulysses = _ulysses(layout, heads) if mixer == "hybrid" else None
    return dataclasses.replace(layout, mixer=mixer, index=index, linear=linear, ulysses=ulysses)


def ulysses_refusal(size: int, heads: int, *, model: str = "") -> str | None:
    """Why `heads` query heads cannot be dealt to `size` ranks; None when they can. KV heads never stand in the way."""
    if heads % size == 0:
        return None
    sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    of_model = f" (model {model})" if model else ""
    return (
        f"ulysses={size} needs query heads divisible by {size}, got {heads}{of_model}. "
        f"Use ulysses in ({sizes}) or mixer='ring'."
    )


def _mixer(
    layout: Layout, heads: int, *, recurrent: bool, windowed: bool
) -> Literal["ulysses", "ring", "gather", "hybrid"]:
    if layout.mixer != "auto":
        return layout.mixer
    if heads % layout.cp == 0:
        return "ulysses"
    return "gather" if windowed or recurrent else "ring"


def _ulysses(layout: Layout, heads: int) -> int:
    """The largest part that divides cp, leaves a ring and divides the query heads."""
    parts = ulysses_parts(layout.cp)
    fitting = [u for u in parts if heads % u == 0]
    if layout.ulysses is not None and layout.ulysses not in fitting:
        raise UserError(ulysses_refusal(layout.ulysses, heads) or f"ulysses={layout.ulysses} does not fit {layout}")
    if not fitting:
        raise UserError(
            f"mixer='hybrid': no part of cp={layout.cp} in {parts} divides {heads} heads. Use mixer='ring'."
        )
    return layout.ulysses or fitting[-1]
