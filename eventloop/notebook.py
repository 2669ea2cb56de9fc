"""Show objects and progress in a notebook: tables, cards and outputs that update.

HTML has its styles inline and inherits colours, so that it reads on light and dark pages. Elsewhere objects are plain text.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from html import escape
from typing import Any, Final

from trainbus.eventloop.seams import CLOCK
from trainbus.eventloop.terminal import Figures, printable

_EVERY: Final = 0.2  # seconds
_FIRST: Final = 30  # rows of a long table
_LAST: Final = 10
_CELL: Final = "padding:.15em .8em .15em 0;vertical-align:top;"
_LINE: Final = "border-bottom:1px solid rgba(128,128,128,.35);"
_TABLE: Final = "border-collapse:collapse;margin:.3em 0 .8em;"
_WIDE: Final = "overflow-x:auto;"  # a narrow page scrolls a wide table
_CARD: Final = (
    f"{_WIDE}border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:.5em .9em;margin:.3em 0;max-width:60em;"
)


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, which shows HTML; False in a terminal, IPython's included."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def shorten(error: BaseException, line: str) -> None:
    """Have a notebook show an error by one line, without its traceback; elsewhere nothing changes."""
    if in_notebook():
        vars(error)["_render_traceback_"] = lambda: [f"{type(error).__name__}: {line}"]


def text(value: object) -> str:
    """Return a text as HTML."""
    return escape(printable(str(value), keep="\n"))


def left_out(number: int) -> range:
    """Return the places of the rows that a table of so many rows leaves out: one row says so in place of two or more."""
    middle = range(_FIRST, number - _LAST)
    return middle if len(middle) > 1 else range(0)


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1, whole: str = "print()") -> str:
    """Return a table; the first ``left`` columns are texts, the others figures, which align right.

    A long table has its first and last rows, and says that ``whole`` shows all.
    """

    def cells(row: Sequence[object], tag: str, more: str = "") -> str:
        sides = ("left" if index < left else "right" for index in range(len(names)))
        filled = [*row, *[""] * (len(names) - len(row))]
        return "".join(
            f'<{tag} style="{_CELL}text-align:{side};white-space:nowrap;{more}">{text(one)}</{tag}>'
            for one, side in zip(filled, sides, strict=False)
        )

    head = f"<thead><tr>{cells(names, 'th', f'font-weight:600;{_LINE}')}</tr></thead>"
    lines = [f'<tr style="background:none">{cells(row, "td")}</tr>' for row in rows]
    if middle := left_out(len(lines)):
        told = f"… {len(middle):,} of {len(lines):,} rows are left out; {text(whole)} shows all …"
        cell = f'<td colspan="{len(names)}" style="{_CELL}text-align:left;opacity:.75">{told}</td>'
        lines[middle.start : middle.stop] = [f'<tr style="background:none">{cell}</tr>']
    body = "".join(lines)
    caption = f'<caption style="text-align:left;font-weight:600;color:inherit;caption-side:top">{text(title)}</caption>'
    return f'<div style="{_WIDE}"><table style="{_TABLE}">{caption * bool(title)}{head}<tbody>{body}</tbody></table></div>'


def blocks(*parts: Figures | str) -> str:
    """Return tables, and lines of text between them."""
    made = (table(one.title, one.names, one.rows) if isinstance(one, Figures) else f"<div>{text(one)}</div>" for one in parts)
    return f"<div>{''.join(made)}</div>"


def card(title: str, facts: Mapping[str, object], *inner: str) -> str:
    """Return a box with facts by name; ``inner`` is HTML below them."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL}text-align:left;opacity:.75">{text(name)}</td>'
        f'<td style="{_CELL}text-align:left">{text(value)}</td></tr>'
        for name, value in facts.items()
    )
    facts_table = f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>'
    return f'<div style="{_CARD}"><strong>{text(title)}</strong>{facts_table}{"".join(inner)}</div>'


class Output:
    """An output of the present cell that can be replaced, from any thread."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = -math.inf

    def due(self) -> bool:
        """Return False within a fifth of a second after ``show``.

        Call ``show`` more often only for what stays: servers of notebooks drop what a cell shows beyond 1 MB/s
        (``iopub_data_rate_limit``).
        """
        return CLOCK.value() - self._shown >= _EVERY

    def show(self, html: str, plain: str) -> None:
        """Show HTML in place of what was shown before; ``plain`` is for pages without HTML."""
        display: Any = importlib.import_module("IPython.display").display
        bundle = {"text/html": html, "text/plain": plain}
        # The context of a bus is that of the cell that made it, and would lead there. Without one, it is the present cell.
        if self._handle is None:
            self._handle = Context().run(display, bundle, raw=True, display_id=True)
        else:
            Context().run(self._handle.update, bundle, raw=True)
        self._shown = CLOCK.value()


class Named(dict[str, Any]):
    """Values by name, such as the metrics of a run: a dict that a notebook shows as a table."""

    def _repr_html_(self) -> str | None:
        return table("", ("name", "value"), ((name, shown(value)) for name, value in self.items())) if self else None


def brief(value: object) -> str:
    """Return ``repr(value)``, cut to one line of 60 characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 60 else f"{line[:59]}…"


def shown(value: object) -> str:
    """Return a value for a table: numbers with four digits, tensors of one element as numbers."""
    number = value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else value
    return f"{number:.4g}" if isinstance(number, float) else str(number)
