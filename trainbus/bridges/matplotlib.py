"""matplotlib: the figures that ``run.report`` takes."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np


def draw(figure: Any) -> np.ndarray[Any, Any] | None:
    """Return the pixels (height × width × RGBA) of a figure, or of the figure of axes or a grid; None for another object."""
    library: Any = sys.modules.get("matplotlib.figure")  # a figure's library is imported
    found = figure
    while library is not None and not isinstance(found, library.Figure):
        inner = getattr(found, "figure", None)  # of axes, of a part of a figure, of a grid of seaborn
        if inner is None or inner is found:
            break
        found = inner
    if library is None or not isinstance(found, library.Figure):
        return None
    shown = found.canvas  # perhaps of a window or a notebook
    try:
        canvas = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(found)
        canvas.draw()
        return np.array(canvas.buffer_rgba())
    finally:
        found.set_canvas(shown)
