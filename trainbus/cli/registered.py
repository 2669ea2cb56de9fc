"""The pages of ``trainbus hooks`` and ``trainbus events``: registered classes and mount points."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from trainbus.cli.common import write_json
from trainbus.config import option_descriptions
from trainbus.config.names import Imports
from trainbus.eventloop.annotations import Signature, describe
from trainbus.eventloop.bus.hook import mount_points_of
from trainbus.eventloop.bus.priority import Priority
from trainbus.eventloop.events.event import hints_of, mount_name, mount_points, name_of, resolve
from trainbus.eventloop.events.mount_points import BUILTIN
from trainbus.eventloop.registry import Registered, find, registered
from trainbus.eventloop.terminal import cell

_TITLES = {"hook": "Hooks", "writer": "Writers (for the loggers' writers)", "average": "Averages (for EMAHook's ema_type)"}
_USES = {"hook": "bus.add({}(…))", "writer": "LoggerHook(writers=[{}(…)])", "average": 'EMAHook(ema_type="{}")'}
_COUNTED = {"iter": "iterations", "batch": "batches", "publish": "publishes"}


def print_hooks(name: str | None, imports: Sequence[str], *, as_json: bool) -> None:
    """Print the registered classes, or one of them."""
    Imports(imports, [Path.cwd()])
    if as_json:
        every = [(kind, entry) for kind in _TITLES for entry in registered(kind)]
        chosen = every if name is None else [_entry(name)]
        write_json({entry.name: _as_json(kind, entry.cls) for kind, entry in chosen})
        return
    if name is not None:
        _show(name)
        return
    console = Console()
    listed = {kind: sorted(registered(kind), key=lambda entry: entry.name.lower()) for kind in _TITLES}
    names = max(len(entry.name) for entries in listed.values() for entry in entries)
    for kind, title in _TITLES.items():  # what there is, before pages of options
        console.print(Text(title, style="bold"))
        table = Table.grid(Column(width=names, no_wrap=True), Column(), padding=(0, 2, 0, 0))
        for entry in listed[kind]:
            line = cell(_summary(entry.cls))
            line.truncate(console.width - names - 4, overflow="ellipsis")  # a column would cut it without a mark
            table.add_row(cell(entry.name, "cyan"), line)
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for kind, title in _TITLES.items():
        console.rule(f"[bold]{title}: options", align="left")
        entries = [(entry, Signature(entry.cls)) for entry in listed[kind]]
        width = max((len(name) for _, signature in entries for name in signature.options), default=0)
        for entry, signature in entries:
            aliases = (f" = {', '.join(entry.aliases)}" if entry.aliases else "", "cyan")
            summary = _summary(entry.cls)
            lines: list[RenderableType] = [cell(summary)] if summary else []
            if kind == "hook":
                lines.append(_where(entry.cls))
            lines.append(_options(kind, signature, width))
            console.print(Text.assemble(cell(entry.name, "bold cyan"), cell(*aliases)))
            console.print(Padding(Group(*lines), (0, 0, 0, 2)))
            console.print()
    console.print("next: trainbus hooks NAME explains one and its options", highlight=False)


def _as_json(kind: str, cls: type[Any]) -> dict[str, Any]:
    descriptions, options = option_descriptions(cls), dict[str, Any]()
    for option in Signature(cls).options.values():
        default = {} if option.default is option.empty else {"default": _default(option)}
        options[option.name] = {
            "type": describe(option.annotation),
            "description": descriptions.get(option.name, ""),
            **default,
        }
    heard = {"mount_points": mount_points_of(cls), "priority": Priority.parse(cls.priority)} if kind == "hook" else {}
    return {"kind": kind, "summary": _summary(cls), "options": options, **heard}


def _entry(name: str) -> tuple[str, Registered]:
    """Return the kind and the class of a name; raise UnknownNameError with the nearest ones."""
    entries = ((kind, entry) for kind in _TITLES for entry in registered(kind))
    found = next(((kind, entry) for kind, entry in entries if name in (entry.name, *entry.aliases)), None)
    return ("hook", Registered(name, find("hook", name))) if found is None else found


def _summary(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _where(cls: type[Any]) -> Text:
    priority = Priority.parse(cls.priority)
    return cell(f"priority {priority} {Priority.label(priority)}, at {', '.join(mount_points_of(cls))}", "dim")


def _show(name: str) -> None:
    """Print one class: its description, and its options with theirs."""
    kind, entry = _entry(name)
    cls = entry.cls
    console, descriptions = Console(highlight=False), option_descriptions(cls)
    signature = Signature(cls)
    text = re.split(r"^(?:Args|Raises|Attributes):$", inspect.getdoc(cls) or "", maxsplit=1, flags=re.MULTILINE)[0].strip()
    console.print(Text(cls.__name__, style="bold cyan"))
    console.print(cell(_plain(text), keep="\n"))
    if kind == "hook":
        console.print(_where(cls))
    for option in signature.options.values():
        if kind != "average" or option.name != "model":  # the hook gives it
            shown = ("required", "red") if option.default is option.empty else (f"= {_default(option)}", "green")
            console.print()
            console.print(
                Text.assemble(cell(option.name, "bold"), ": ", cell(describe(option.annotation), "dim"), " ", cell(*shown))
            )
            console.print(Padding(cell(_plain(descriptions.get(option.name, "")), keep="\n"), (0, 0, 0, 4), expand=False))
    if signature.rest_of is not None:
        console.print(f"\nFurther options: all options of {signature.rest_of}.", markup=False)
    console.print(f"\nin a script: {_USES[kind].format(cls.__name__)}", markup=False)
    if kind == "hook":
        console.print(f'in a configuration: [[custom_hooks]] with type = "{cls.__name__}"', markup=False)


def _plain(text: str) -> str:
    """Return the text of a docstring for a terminal: without roles, one line per paragraph."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"(?<=\S)\n(?=[^\s*-])", " ", text)


def _default(option: inspect.Parameter) -> str:
    return option.default.__name__ if isinstance(option.default, type) else repr(option.default)


def _options(kind: str, signature: Signature, width: int) -> Table:
    fold = [Column(ratio=ratio, overflow="fold") for ratio in (3, 2)]
    table = Table.grid(Column(width=width, no_wrap=True), *fold, padding=(0, 2, 0, 0), expand=True)
    for option in signature.options.values():
        if kind != "average" or option.name != "model":  # the hook gives it
            shown = Text("required", style="red") if option.default is option.empty else cell(_default(option), "green")
            table.add_row(cell(option.name), cell(describe(option.annotation), "dim"), shown)
    if signature.rest_of is not None:
        table.add_row(cell(f"all options of {signature.rest_of}"), "", "")
    return table


def print_events(name: str | None, imports: Sequence[str], *, as_json: bool) -> None:
    """Print the mount points, or one of them."""
    Imports(imports, [Path.cwd()])
    names = mount_points() if name is None else [name_of(resolve(mount_name(name)))]
    if as_json:
        write_json({one: {"counted": _counted(one), "fields": _fields(one)} for one in names})
        return
    if name is not None:
        _explain(names[0])
        return
    console = Console()
    further = [name for name in mount_points() if name not in BUILTIN]
    console.print(_event_table("Mount points in the order of a run", [name for name in mount_points() if name in BUILTIN]))
    if further:
        console.print()
        console.print(_event_table("Declared by hooks and by your modules", further))
    console.print('\nin a script: @bus.on("after_train_iter") above a function that takes the event', highlight=False)
    console.print("next: trainbus events NAME explains one and its fields", highlight=False)


def _explain(name: str) -> None:
    """Print what an event is, when it comes, its fields, and how to subscribe."""
    event, console = resolve(name), Console(highlight=False)
    console.print(Text.assemble(cell(name, "bold cyan"), cell(f" ({event.__name__})", "dim")))
    if event.__doc__:
        console.print(cell(_plain(inspect.cleandoc(event.__doc__)), keep="\n"))
    order = mount_points()
    if not event.group and name in BUILTIN:
        index = order.index(name)
        console.print(cell(f"order: {' → '.join(order[max(index - 1, 0) : index + 2])}", "dim"))
    heard = [one for one in order if issubclass(resolve(one), event)] if event.group else []
    if heard:
        console.print(cell(f"comes as {', '.join(heard)}", "dim"))
    console.print(f"every=, once=, after= and before= count {_counted(name)}")
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for field, kind in _fields(name).items():
        table.add_row(cell(field, "bold"), cell("live: not for offloaded handlers" if kind == "live" else kind, "dim"))
    console.print()
    console.print(table)
    console.print(f'\nin a script: @bus.on("{name}") above a function that takes the event', markup=False)


def _event_table(title: str, names: list[str]) -> Table:
    columns = [Column("mount point", no_wrap=True), Column("filters count", no_wrap=True)]
    payload = Column("payload (live: not for offloaded handlers)", overflow="fold")
    table = Table(*columns, payload, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in names:
        row = ", ".join(f"{field}: {kind}" for field, kind in _fields(name).items())
        table.add_row(*map(cell, (name, _counted(name), row)))
    return table


def _counted(name: str) -> str:
    counts = resolve(name).counts
    return _COUNTED.get(counts, f"{counts}s")


def _fields(name: str) -> dict[str, str]:
    """Return the kinds of an event's fields; its own ones come first."""
    event = resolve(name)
    hints = hints_of(event)
    return {field: _kind(hints[field]) for field in sorted(event.__struct_fields__, key=["progress", "run"].count)}


def _kind(hint: Any) -> str:
    marks = getattr(hint, "__metadata__", ())
    return next((mark.extra["detach"] for mark in marks if mark.extra and "detach" in mark.extra), None) or describe(hint)
