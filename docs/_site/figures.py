"""The page of benchmarks: tables and charts from ``benchmarks/results/*.json``."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canvas import Canvas, on_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CHARTS = (
    ("dispatch", "Ten no-op hooks", "Publish to ten no-op hooks"),
    ("training", "Everything on", "Everything on, added per iteration"),
    ("checkpoint", "Training stands still: 200 ", "A checkpoint of 800 MB: how long training stands still"),
    ("ema", "One update", "One EMA update, 10 M parameters"),
    ("logging", "Six floats", "Six scalars logged, on the training thread"),
)
"""File, beginning of the comparison's title, and title of the chart."""
UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def page() -> str:
    """Return the page."""
    table = importlib.import_module("benchmarks.readme").table()
    table = re.sub(r"(?<=[≤\d]) (?=[\d\N{MULTIPLICATION SIGN}µmn])", "\N{NO-BREAK SPACE}", table)
    text = (Path(__file__).parent / "benchmarks.md").read_text(encoding="utf-8")
    charts = "\n".join(f"### {title}\n\n{chart(name, start, title)}\n" for name, start, title in CHARTS)
    return (
        text.replace("{{ table }}", table)
        .replace("{{ charts }}", charts)
        .replace("{{ crash }}", crash())
        .replace("{{ elastic }}", elastic())
    )


def crash() -> str:
    """Return what the last round of killed trainings has found."""
    result = json.loads((RESULTS / "crash.json").read_text(encoding="utf-8"))
    return (
        f"{result['kills']:,} kills, {result['steps compared']:,} steps compared, {result['files verified']:,} files verified"
    )


def elastic() -> str:
    """Return what the last training on machines that come and go has met."""
    result = json.loads((RESULTS / "elastic.json").read_text(encoding="utf-8"))
    kinds = Counter(one["kind"] for one in result["strikes"])
    worst = max(one["seconds"] for one in result["strikes"])
    return (
        f"{kinds['kill']} died, {kinds['leave']} left and {kinds['join']} joined, and the store was away {len(result['outages'])} "
        f"times; training went on at most {worst:.0f} s after the new processes had started"
    )


def chart(name: str, start: str, title: str) -> str:
    """Return a bar chart of one comparison as SVG on a logarithmic scale, the fastest first: for wide and for narrow screens."""
    comparisons = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["comparisons"]
    found = next(one for one in comparisons if re.match(re.escape(start), one["title"]))
    rows = sorted((row for row in found["contenders"] if row["median_seconds"] > 0), key=lambda row: row["median_seconds"])
    wide, narrow = (_bars(rows, found["floor"], title, narrow=narrow) for narrow in (False, True))
    return (on_page(wide.svg(), title) + on_page(narrow.svg(), title, "-narrow")).replace("\n", "")


def _bars(rows: Sequence[Mapping[str, Any]], floor: str, title: str, *, narrow: bool) -> Canvas:
    """Draw the bars, with their names beside them, or above them where the screen is narrow."""
    width, left, length, step = (380, 8, 270, 46) if narrow else (760, 230, 400, 26)
    canvas = Canvas(width, step * len(rows) + (50 if narrow else 34), title)
    low = math.log10(rows[0]["median_seconds"]) - 0.3
    scale = length / (math.log10(rows[-1]["median_seconds"]) - low)
    for number, row in enumerate(rows):
        y = 8 + step * number
        name = row["name"]
        kind = "green" if name == floor else "blue" if name.startswith("trainbus") else "edge"
        bold = name.startswith("trainbus")
        if narrow:
            canvas.text(left, y + 12, name, bold=bold, size=13)
            y += 18
        else:
            canvas.text(left - 10, y + 15, name, anchor="end", bold=bold)
        bar = scale * (math.log10(row["median_seconds"]) - low)
        canvas.rect(left, y, bar, 20, 3, f"{kind}-fill" if kind != "edge" else "ground", kind)
        canvas.text(left + 8 + bar, y + 15, amount(row["median_seconds"]), kind="dim")
    legend = ["median, logarithmic scale;", "green is the least that the work takes"]
    for number, line in enumerate(legend if narrow else [" ".join(legend)]):
        canvas.text(left, step * len(rows) + 26 + 18 * number, line, kind="dim")
    return canvas


def amount(seconds: float) -> str:
    """Return a time with its unit, in three digits."""
    unit, size = next(one for one in UNITS if seconds >= one[1])
    return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:,.0f} {unit}"
