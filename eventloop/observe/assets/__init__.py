"""Files that the report and the dashboard share: colours, rules of curves, and uPlot 1.6.32, which draws them."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal


def read_asset(name: Literal["colours.css", "curves.js", "uplot.css", "uplot.js", "uplot.LICENSE"]) -> str:
    """Return the text of one of the files."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
