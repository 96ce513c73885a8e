"""Curves of a run as inline PNG pictures. Uses matplotlib's object interface: no global figure state, no display."""

import base64
import io
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["curves", "data_uri"]

Curve = Mapping[str, Sequence[tuple[float, float]]]  # label -> (x, y) points


def curves(panels: Mapping[str, Curve], *, columns: int = 3, x_label: str = "step") -> bytes:
    """One panel a title, each with its curves; returns PNG bytes."""
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for position, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, position + 1)
        for label, points in lines.items():
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, label=label, linewidth=1.2, marker="o" if len(points) < 20 else None, markersize=3)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(x_label, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend(fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return buffer.getvalue()


def data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
