"""``trainbus hooks`` and ``trainbus events``: list registered classes and mount points."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eventloop.bus.hook import mount_points_of
from eventloop.bus.priority import Priority
from eventloop.config import Registered, registered
from eventloop.config.make import Signature, describe
from eventloop.config.names import Imports, find_files_in
from eventloop.events import Event
from eventloop.events.event import mount_points, resolve
from eventloop.events.mount_points import BUILTIN

_TITLES = {"hook": "Hooks", "writer": "Writers (for the loggers' writers)", "average": "Averages (for EMAHook's ema_type)"}
_COUNTED = {"iter": "iterations", "batch": "batches", "publish": "publishes"}

Modules = Annotated[list[str] | None, Parameter(name="--import", metavar="MODULE")]


def list_hooks(*, imports: Modules = None) -> int:
    """List every registered hook: options, types, defaults, mount points.

    Args:
        imports: your module with further hooks.
    """
    import hooks  # noqa: F401 - registers the built-in hooks

    Imports(imports or (), find_files_in(Path.cwd()))
    console = Console()
    for kind, title in _TITLES.items():
        console.rule(f"[bold]{title}", align="left")
        entries = [(entry, Signature(entry.cls)) for entry in registered(kind)]
        width = max((len(name) for _, signature in entries for name in signature.options), default=0)
        for entry, signature in entries:
            console.print(_described(entry, signature, width))
            console.print()
    return 0


def _described(entry: Registered, signature: Signature, width: int) -> RenderableType:
    head = Text(entry.name, style="bold cyan")
    if entry.aliases:
        head.append(f" = {', '.join(entry.aliases)}", style="cyan")
    lines: list[RenderableType] = []
    if summary := inspect.getdoc(entry.cls):
        lines.append(Text(summary.partition("\n\n")[0].replace("\n", " ")))
    if entry.kind == "hook":
        priority = Priority.parse(entry.cls.priority)  # type: ignore[attr-defined]
        where = f"priority {priority} {Priority.label(priority)}, at {', '.join(mount_points_of(entry.cls))}"
        lines.append(Text(where, style="dim"))
    lines.append(_options(entry.kind, signature, width))
    return Group(head, *(Padding(line, (0, 0, 0, 2)) for line in lines))


def _options(kind: str, signature: Signature, width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(ratio=3, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for option in signature.options.values():
        if kind == "average" and option.name == "model":
            continue  # the hook gives it
        default = option.default.__name__ if isinstance(option.default, type) else repr(option.default)
        shown = Text("required", style="red") if option.default is option.empty else Text(default, style="green")
        table.add_row(option.name, Text(describe(option.annotation), style="dim"), shown)
    if signature.rest_of is not None:
        table.add_row(f"those of {signature.rest_of}", "", "")
    return table


def list_events(*, imports: Modules = None) -> int:
    """List the mount points in the order of a run, with the fields of their events.

    Args:
        imports: your module with further events.
    """
    Imports(imports or (), find_files_in(Path.cwd()))
    names = mount_points()
    console = Console()
    console.print(_event_table("Mount points in the order of a run", [name for name in names if name in BUILTIN]))
    if further := [name for name in names if name not in BUILTIN]:
        console.print()
        console.print(_event_table("Declared by hooks and by modules of yours", further))
    return 0


def _event_table(title: str, names: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("mount point", no_wrap=True)
    table.add_column("filters count", no_wrap=True)
    table.add_column("payload (live: not for offloaded handlers)", overflow="fold")
    for name in names:
        event = resolve(name)
        table.add_row(name, _COUNTED.get(event.counts, f"{event.counts}s"), ", ".join(_payload(event)))
    return table


def _payload(event: type[Event]) -> Iterator[str]:
    """Yield an event's own fields, then ``progress`` and ``run``."""
    hints = typing.get_type_hints(event, include_extras=True)
    for name in sorted(event.__struct_fields__, key=["progress", "run"].count):
        marks = getattr(hints[name], "__metadata__", ())
        kind = next((mark.extra["detach"] for mark in marks if mark.extra and "detach" in mark.extra), None)
        yield f"{name}: {kind or describe(hints[name])}"
