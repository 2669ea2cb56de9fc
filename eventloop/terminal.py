"""``printable`` and ``cell``: show text of files and users on a terminal, without control characters and markup."""

from __future__ import annotations

from rich.text import Text


def printable(text: str, keep: str = "") -> str:
    """Return a text with its control characters escaped, except those to ``keep``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else ascii(each)[1:-1] for each in text)


def cell(text: str, style: str = "", keep: str = "") -> Text:
    """Return a :func:`printable` text for rich, which does not read it as markup."""
    return Text(printable(text, keep), style=style)
