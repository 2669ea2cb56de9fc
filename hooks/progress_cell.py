"""``ProgressCell``: the progress of a run as an output of a notebook's cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

from trainbus.eventloop.notebook import Output, shown, table, text

_POINTS: Final = 400  # of the curve; beyond it, every second one goes
_ROWS: Final = 20
_WIDTH, _HEIGHT = 480, 110


class ProgressCell:
    """A bar with a line of figures, a row for each validation, and the curve of the first loss."""

    def __init__(self) -> None:
        self._output = Output()
        self._points: list[tuple[int, float]] = []
        self._every, self._seen = 1, 0
        self._rows: list[tuple[str, Mapping[str, float]]] = []
        self._line: tuple[str, int, int | None] = ("", 0, None)

    def point(self, iteration: int, loss: float) -> None:
        """Add a point of the curve."""
        self._seen += 1
        if isfinite(loss) and self._seen % self._every == 0:
            if self._points and self._points[-1][0] == iteration:
                del self._points[-1]  # the end of an epoch repeats its last iteration
            self._points.append((iteration, loss))
        if len(self._points) > _POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def validated(self, at: str, metrics: Mapping[str, float]) -> None:
        """Add a row."""
        self._rows.append((at, metrics))

    def draw(self, line: str, done: int, total: int | None) -> None:
        """Show all of it, with a line of figures beside the bar, if that is due."""
        self._line = line, done, total
        if self._output.due():
            self._output.show(self._html(), line)

    def end(self) -> None:
        """Show what stays: the validations, or else the last line, and the curve."""
        self._output.show(self._html(bar=False), self._line[0])

    def _html(self, *, bar: bool = True) -> str:
        line, done, total = self._line
        value = "" if total is None else f' value="{done}" max="{total}"'
        shows = f'<progress{value} style="width:16em;vertical-align:middle" aria-label="progress"></progress> ' if bar else ""
        if bar or not self._rows:
            shows += f"<code style='background:none'>{text(line)}</code>"
        return f"<div>{shows}{self._table()}{_curve(self._points)}</div>"

    def _table(self) -> str:
        if not self._rows:
            return ""
        names = list(dict.fromkeys(name for _, metrics in self._rows for name in metrics))
        rows = [(at, *(shown(metrics.get(name, "")) for name in names)) for at, metrics in self._rows[-_ROWS:]]
        left_out = f"the last {_ROWS} of {len(self._rows)} validations" if len(self._rows) > _ROWS else ""
        return table(left_out, ("after", *names), rows)


def _curve(points: Sequence[tuple[int, float]]) -> str:
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    across, up = _WIDTH / (last - first or 1), (_HEIGHT - 10) / (high - low or 1)
    line = " ".join(f"{(at - first) * across:.1f},{5 + (high - loss) * up:.1f}" for at, loss in points)
    label = f"loss from iteration {first} to {last}: first {points[0][1]:.4g}, last {points[-1][1]:.4g}"
    return (
        f'<div style="margin-top:.3em"><svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;max-width:{_WIDTH}px;height:auto;border:1px solid rgba(128,128,128,.35)">'
        f'<polyline points="{line}" fill="none" stroke="#3b82f6" stroke-width="1.5"/></svg>'
        f'<div style="opacity:.75;font-size:smaller">{label}; between {low:.4g} and {high:.4g}</div></div>'
    )
