"""``build_report``: fill the template of the page, with scripts, styles and data inlined."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, FileSystemBytecodeCache, FunctionLoader, StrictUndefined
from markupsafe import Markup

from trainbus.eventloop.plain import as_json
from trainbus.observe import assets
from trainbus.observe.record import Checkpoint, FailedCheckpoint, Resume, SkippedCheckpoint, Test, Validation
from trainbus.observe.report import facts
from trainbus.observe.report.bars import cost_bars
from trainbus.observe.report.charts import drawn, scalar_charts, step_charts
from trainbus.observe.report.media import shown
from trainbus.observe.report.overview import FEW, Rules, overview, summary
from trainbus.observe.report.reported_run import ReportedRun
from trainbus.observe.report.sentences import Best, count, verdict
from trainbus.observe.verdict import duration, size

MOST_BYTES: Final = 1_000_000

# Points of a curve, rows of a table and number of scalars: as much as fits.
_FITS: Final = (
    *((2_000, 200, 1_000), (1_000, 100, 1_000), (500, 50, 1_000), (250, 25, 1_000), (120, 15, 1_000), (60, 10, 1_000)),
    *((60, 10, 400), (60, 10, 150), (60, 5, 50), (30, 5, 20), (30, 5, 10), (30, 5, 5)),
)
_LEAST_BYTES: Final = 6  # of a value in the data of a page; larger pages are not rendered

_NO_OTHER: Final = "base-uri 'none'; form-action 'none'"


def build_report(runs: Sequence[ReportedRun], best: Best, rules: Rules = lambda names: {}) -> bytes:
    """Return one page of HTML about one run, or several to compare, of at most 1 MB. It needs no network and no other file.

    Without ``rules``, a comparison has the last value of each metric, and ranks no run.
    """
    names = run_names(runs)
    seen = overview(runs, rules)
    many = len(runs) > FEW
    known = {
        "overview": seen,
        "many": many,
        "summary": summary(runs, names, seen),
        "runs": runs,
        "names": names,
        "verdicts": [verdict(run, best) for run in runs],
        "bars": cost_bars([] if many else [run.costs for run in runs]),
        "environments": [] if many else [facts.environment_rows(run) for run in runs],
        "configurations": [] if many else [facts.configuration_rows(run) for run in runs],
        "media": [] if many else [shown(run, len(runs)) for run in runs],
        "written": datetime.now().astimezone(),
    }
    scalars, steps = scalar_charts(runs, names), [] if many else step_charts(runs, names)
    page = b""
    for points, rows, most in _FITS:
        kept = scalars[:most]
        values = sum(min(points, len(one.curve.values)) for chart in kept for one in chart.series)
        if values * _LEAST_BYTES > MOST_BYTES and (points, rows, most) != _FITS[-1]:
            continue
        data = drawn([*kept, *steps], runs, points) | {"colours": seen.colours, "runs": names}
        thinned = any(len(one.curve.values) > points for chart in kept for one in chart.series)
        page = _render(
            data, **known, scalars=kept, steps=steps, left_out=len(scalars) - len(kept), rows=rows, points=points * thinned
        )
        if len(page) <= MOST_BYTES:
            break
    return page


def run_names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of runs; equal names get their folder appended."""
    names = [run.story.manifest.name or run.path.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.path})" for name, run in zip(names, runs, strict=True)]


def _render(data: Any, **known: Any) -> bytes:
    script, style = Markup(_script()), Markup(_style())  # noqa: S704  # our own files
    page: str = _template().render(
        **known,
        data=_safe(data),
        script=script,
        style=style,
        policy=f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; {_NO_OTHER}",
        licence=_text("uplot.LICENSE", assets),
        several=len(known["runs"]) > 1,
    )
    return page.encode("utf-8", "replace")  # a name may hold bytes that are not UTF-8


def _safe(data: Any) -> Markup:
    """Return JSON in which no text can end the script element."""
    text = as_json(data).decode()
    for each in "<>&":
        text = text.replace(each, f"\\u{ord(each):04x}")
    return Markup(text)  # noqa: S704


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _script() -> str:
    return "\n".join((_text("uplot.js", assets), _text("curves.js", assets), _text("page.js")))


@cache
def _style() -> str:
    return "\n".join((_text("colours.css", assets), _text("uplot.css", assets), _text("page.css")))


@cache
def _template() -> Any:
    loader = FunctionLoader(_text)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters |= {"count": count, "duration": duration, "size": size, "percent": "{:.1%}".format, "when": _when}
    kinds = (Checkpoint, FailedCheckpoint, Resume, SkippedCheckpoint, Test, Validation)
    environment.globals |= {kind.__name__: kind for kind in kinds} | {"differences": facts.differences}
    # Compiling takes half of the time of a report: what was compiled is kept in a folder of temporary files, this user's alone.
    with suppress(OSError, RuntimeError):
        environment.bytecode_cache = FileSystemBytecodeCache()
        return environment.get_template("page.html")
    environment.bytecode_cache = None
    return environment.get_template("page.html")


def _text(name: str, package: Any = __package__) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}" if seconds else ""
