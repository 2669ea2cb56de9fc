"""The page of other systems' hooks: what each is here, and how its options are translated."""

from __future__ import annotations

from trainbus.compat import TABLE
from trainbus.config import Migration, OptionChange

INTRODUCTION = """\
# Every hook of MMEngine, iMIX and Pointrix

Find the hook that stands for yours, and its options. Lists of hooks are accepted as they are, and translated by this table. An option
without a counterpart is accepted if it asks for what trainbus does anyway; otherwise the error has the way out.

| there | here | options |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    return INTRODUCTION + "\n".join(map(row, TABLE)) + "\n"


def row(entry: Migration) -> str:
    """Return the line of one hook."""
    names = {theirs: _ours(change) for theirs, change in entry.options.items()}
    changed = [
        f"`{theirs}` → `{ours}`{_also(entry.options[theirs])}" for theirs, ours in names.items() if ours not in ("", theirs)
    ]
    gone = [f"`{theirs}`" for theirs, ours in names.items() if not ours]
    parts = (
        "the same" if any(theirs == ours for theirs, ours in names.items()) else "",
        ", ".join(changed),
        f"no {', '.join(gone)}" if gone else "",
        f"`{_written(entry.preset)}`" if entry.preset else "",
        entry.note,
    )
    there = ", ".join(f"`{name}`" for name in (entry.name, *entry.aliases))
    here = ", ".join(f"`{name}`" for name in entry.ours) or "-"
    return f"| {entry.system} {there} | {here} | {'; '.join(filter(None, parts))} |"


def _ours(change: str | OptionChange) -> str:
    return change if isinstance(change, str) else change.ours


def _also(change: str | OptionChange) -> str:
    return f" with `{_written(change.also)}`" if isinstance(change, OptionChange) and change.also else ""


def _written(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
