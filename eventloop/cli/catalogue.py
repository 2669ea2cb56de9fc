"""``trainbus hooks`` and ``trainbus events``: what a configuration can name, and when it is called."""

from __future__ import annotations

import argparse
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eventloop.bus.hook import mount_points_of
from eventloop.bus.priority import Priority
from eventloop.cli.arguments import Subparsers
from eventloop.config import Imports, Option, Signature, describe, find_files_in
from eventloop.config.registry import Registered, registered
from eventloop.events import Event
from eventloop.events.event import mount_points, resolve
from eventloop.events.mount_points import BUILTIN

_TITLES = {"hook": "Hooks", "writer": "Writers (for the loggers' writers)", "average": "Averages (for EMAHook's ema_type)"}


def add_parser(commands: Subparsers) -> None:
    """Declare both commands."""
    hooks = commands.add_parser("hooks", help="list every registered hook: options, types, defaults, mount points")
    hooks.set_defaults(call=_hooks)
    events = commands.add_parser("events", help="list the mount points in the order of a run, and what their events hold")
    events.set_defaults(call=_events)
    for parser in (hooks, events):
        parser.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="a module of yours with further ones",
        )


def _hooks(options: argparse.Namespace) -> int:
    import hooks  # noqa: F401 - registers what it has

    Imports(options.imports, find_files_in(Path.cwd()))
    console = Console()
    for kind, title in _TITLES.items():
        entries = registered(kind)
        console.rule(f"[bold]{title}", align="left")
        width = max((len(name) for entry in entries for name in Signature(entry.cls).options), default=0)
        for entry in entries:
            console.print(_described(entry, width))
            console.print()
    return 0


def _described(entry: Registered, width: int) -> RenderableType:
    head = Text(entry.name, style="bold cyan")
    if entry.aliases:
        head.append(f" = {', '.join(entry.aliases)}", style="cyan")
    parts: list[RenderableType] = [head]
    if summary := inspect.getdoc(entry.cls):
        parts.append(Padding(Text(summary.partition("\n\n")[0].replace("\n", " ")), (0, 0, 0, 2)))
    if entry.kind == "hook":
        priority = Priority.parse(entry.cls.priority)  # type: ignore[attr-defined]
        where = f"priority {priority} {Priority.label(priority)}, at {', '.join(mount_points_of(entry.cls))}"
        parts.append(Padding(Text(where, style="dim"), (0, 0, 0, 2)))
    parts.append(Padding(_options(entry, width), (0, 0, 0, 2)))
    return Group(*parts)


def _options(entry: Registered, width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(ratio=3, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    options = Signature(entry.cls)
    for option in _settable(entry.kind, options):
        default = Text("required", style="red") if option.required else Text(_default(option.default), style="green")
        table.add_row(option.name, Text(describe(option.annotation), style="dim"), default)
    if options.rest_of is not None:
        table.add_row(f"those of {options.rest_of}", "", "")
    return table


def _settable(kind: str, options: Signature) -> list[Option]:
    """Without the model that an average is made for."""
    return [option for option in options.options.values() if not (kind == "average" and option.name == "model")]


def _default(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _events(options: argparse.Namespace) -> int:
    Imports(options.imports, find_files_in(Path.cwd()))
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
        table.add_row(name, _COUNTED[event.counts], ", ".join(_payload(event)))
    return table


_COUNTED = {
    "iter": "iterations",
    "epoch": "epochs",
    "update": "updates",
    "batch": "batches",
    "validation": "validations",
    "publish": "publishes",
}


def _payload(event: type[Event]) -> Iterator[str]:
    """Yield an event's own fields, then what every event of a run has."""
    hints = typing.get_type_hints(event, include_extras=True)
    fields = [name for name in event.__struct_fields__ if name not in ("run", "progress")]
    for name in [*fields, *(name for name in ("progress", "run") if name in event.__struct_fields__)]:
        yield f"{name}: {_field_type(hints[name])}"


def _field_type(hint: Any) -> str:
    for mark in getattr(hint, "__metadata__", ()):
        if kind := (mark.extra or {}).get("detach"):
            return str(kind)
    return describe(hint)
