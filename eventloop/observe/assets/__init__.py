"""Files that the report and the dashboard share: their colours, and uPlot 1.6.32, which draws the curves."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal


def read_asset(name: Literal["colours.css", "uplot.css", "uplot.js", "uplot.LICENSE"]) -> str:
    """Return the text of one of the files."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
