"""The page of mount points, in the order of a run, with the fields of their events."""

from __future__ import annotations

import re
import typing

from descriptions import as_markdown

from trainbus.eventloop.events.event import mount_points, resolve
from trainbus.eventloop.events.mount_points import BUILTIN

COUNTED = {"iter": "iterations", "batch": "batches", "publish": "publishes", "epoch": "epochs", "update": "updates"}
INTRODUCTION = """\
# Mount points

Every mount point, in the order of a run. `trainbus events` prints the same.

- **Fields** have their types. *Live* ones are references to training state: touching them in an offloaded handler is an error.
  *Scalars* are mappings of names to outputs, whose scalars reach an offloaded handler as numbers.
- **Every event of a run** also has `run` (live) and `progress`.
- **Filters** such as `every=` count what the third column says.

See [events and mount points](../concepts/events.md).
"""
HEAD = ["| mount point | fields | filters count | when |", "|---|---|---|---|"]


def page() -> str:
    """Return the page."""
    names = mount_points()
    single = [name for name in BUILTIN if name in names and not resolve(name).group]
    further = [name for name in names if name not in BUILTIN and resolve(name).__module__.startswith("trainbus.")]
    groups = [name for name in BUILTIN if resolve(name).group]
    lines = [INTRODUCTION, "## In the order of a run", "", *HEAD, *map(row, single), ""]
    lines += ["## Groups", "", "Subscribing to a group hears all of its events.", "", "| group | hears |", "|---|---|"]
    for name in groups:
        cls = resolve(name)
        found = [one for one in single if issubclass(resolve(one), cls)]
        heard = ", ".join(f"`{one}`" for one in found) if len(found) < len(single) / 2 else "every event that has a `run`"
        lines.append(f"| `{name}` | {heard} |")
    lines += ["| `Event` (the class) | everything |", "", "## Published by hooks", "", *HEAD, *map(row, further), ""]
    return "\n".join(lines)


def row(name: str) -> str:
    """Return the line of one mount point."""
    event = resolve(name)
    hints = typing.get_type_hints(event, include_extras=True)
    own = [field for field in event.__struct_fields__ if field not in ("run", "progress")]
    fields = ", ".join(f"`{field}` {kind(hints[field])}" for field in own)
    words = as_markdown(" ".join((event.__doc__ or "").split()))
    return f"| `{name}` | {fields} | {COUNTED.get(event.counts, event.counts + 's')} | {words} |"


def kind(hint: typing.Any) -> str:
    """Return the type of a field, and its mark."""
    marks = getattr(hint, "__metadata__", ())
    marked = next((mark.extra["detach"] for mark in marks if mark.extra and "detach" in mark.extra), None)
    if marked == "scalars":
        return "(scalars)"
    return f"`{spelt(hint)}` (live)" if marked else f"`{spelt(hint)}`"


def spelt(hint: typing.Any) -> str:
    """Return a type as Python spells it, without modules."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"[a-z_]\w*\.(?=\w)", "", text)
