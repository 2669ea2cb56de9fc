"""An extension of griffe: Sphinx's roles and simple tables, which our docstrings have for ``help()``, as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(class|meth|func|mod|attr|data|exc):`(~?)([^`]+)`")
_TABLE = re.compile(r"^(=+(?: +=+)+)\n(.*?)\n\1\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)


class Docstrings(griffe.Extension):
    """Rewrites each docstring when it has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """Return a docstring as Markdown."""
    return _TABLE.sub(_table, _ROLE.sub(lambda found: f"`{found[3].rpartition('.')[2] if found[2] else found[3]}`", text))


def _table(found: re.Match[str]) -> str:
    starts = [0, *(one.end() for one in re.finditer(r"=+ +", found[1]))]
    rows = [found[2], *found[3].splitlines()]
    cells = [[row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(["", lines[0], "|" + "---|" * len(starts), *lines[1:], ""])
