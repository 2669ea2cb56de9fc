"""Helpers to write the tables of other systems' hooks, and to show them in the README."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from eventloop.config import Migration, OptionChange


def same(options: str) -> dict[str, str | OptionChange]:
    """Return the entries of options with the same names in trainbus; ``options`` are separated by spaces."""
    return {option: option for option in options.split()}


def markdown(entries: Iterable[Migration]) -> str:
    """Return the README's table in Markdown."""
    return "\n".join(("| there | here | options |", "|---|---|---|", *_rows(entries)))


def _rows(entries: Iterable[Migration]) -> Iterator[str]:
    for entry in entries:
        names = {theirs: entry.renamed(theirs) for theirs in entry.options}
        changed = {theirs: ours for theirs, ours in names.items() if ours not in ("", theirs)}
        renamed = [f"`{theirs}` → `{ours}`{_also(entry.options[theirs])}" for theirs, ours in changed.items()]
        gone = ", ".join(f"`{theirs}`" for theirs, ours in names.items() if not ours)
        parts = (
            "the same" if any(theirs == ours for theirs, ours in names.items()) else "",
            ", ".join(renamed),
            f"no {gone}" if gone else "",
            f"`{_written(entry.preset)}`" if entry.preset else "",
            entry.note,
        )
        here = ", ".join(f"`{name}`" for name in entry.ours) or "-"
        there = ", ".join(f"`{name}`" for name in (entry.name, *entry.aliases))
        yield f"| {entry.system} {there} | {here} | {'; '.join(part for part in parts if part)} |"


def _also(change: str | OptionChange) -> str:
    return f" with `{_written(change.also)}`" if isinstance(change, OptionChange) and change.also else ""


def _written(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
