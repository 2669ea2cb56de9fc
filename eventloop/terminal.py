"""Show text of files and users on a terminal, without control characters and markup; and tables that fit their width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

_WIDTH = 80


def printable(text: str, keep: str = "") -> str:
    """Return a text with its control characters escaped, except those to ``keep``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def cell(text: str, style: str = "", keep: str = "") -> Text:
    """Return a :func:`printable` text for rich, which does not read it as markup."""
    return Text(printable(text, keep), style=style)


class Figures(msgspec.Struct, frozen=True):
    """A table to print, plain or with rich: one row is a name and its figures, right-aligned.

    A name that does not fit beside its figures stands on a line of its own.
    """

    title: str
    names: Sequence[str]
    """The heads of all columns."""
    rows: Sequence[Sequence[str]]
    """As many texts as there are heads; missing ones at the end are empty."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield cell(self.title, "bold")
        rows = [[*map(printable, row), *[""] * (len(self.names) - len(row))] for row in (self.names, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
        room = min(options.max_width, _WIDTH) - sum(widths) - len(widths)
        first = max((len(name) for name, *_ in rows if len(name) <= room), default=0)
        for number, (name, *figures) in enumerate(rows):
            beside = name if len(name) <= room else ""
            if not beside:
                yield Text(name)
            cells = " ".join(figure.rjust(width) for figure, width in zip(figures, widths, strict=True))
            yield Text(f"{beside:{first}} {cells}".rstrip(), style="bold" if number == 0 else "")


def plain(renderable: RenderableType) -> str:
    """Return what rich prints, in 80 columns and without colours."""
    console = Console(width=_WIDTH, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()
