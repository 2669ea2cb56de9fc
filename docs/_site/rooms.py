"""The pages of the reference: one for each public package, with all names that it or ``trainbus`` makes public."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

from descriptions import summary

ROOMS = {
    "trainbus.eventloop.bus": "The bus",
    "trainbus.eventloop.events": "Events",
    "trainbus.eventloop.training": "Runs and loops",
    "trainbus.eventloop.media": "Images, histograms, texts, figures",
    "trainbus.hooks": "Hooks",
    "trainbus.hooks.writers": "Writers",
    "trainbus.eventloop.checkpoint": "Checkpoints",
    "trainbus.convert": "Files of other programs",
    "trainbus.bridges": "Bridges",
    "trainbus.config": "Configuration",
    "trainbus.observe": "Costs and records",
    "trainbus.eventloop.offload": "Offloading",
    "trainbus.eventloop.errors": "Errors and logs",
    "trainbus.testing": "Testing",
}
"""The public packages, with the titles of their pages."""
FURTHER = {
    "trainbus.eventloop.errors": ("trainbus.eventloop.log", "trainbus.eventloop.checks", "trainbus.eventloop.terminal"),
    "trainbus.bridges": ("trainbus.bridges.ignite.saver", "trainbus.bridges.ray", "trainbus.bridges.torchtitan.manager"),
    "trainbus.hooks": ("trainbus.compat",),
    "trainbus.config": ("trainbus.eventloop.registry",),
}
"""Modules whose public names are on the page of a package."""
TRAINBUS = "trainbus"
HOMES = {f"trainbus.eventloop.{name}": f"trainbus.{name}" for name in ("events", "errors", "media")}
"""Where users import what a room has."""
PARTS = ("trainbus.eventloop", "trainbus.hooks", "trainbus.compat", "trainbus.bridges.ray")
FIRST = ("Bus", "Event", "TrainLoop", "Run", "Hook", "AsyncSaver", "Writer", "attach", "Costs")
"""Names that come first on their pages."""


def name_of_page(room: str) -> str:
    """Return the path of a room's page within the site."""
    return (
        f"reference/{'hooks-api' if room == 'trainbus.hooks' else room.removeprefix('trainbus.').removeprefix('eventloop.')}.md"
    )


def public(module: ModuleType) -> list[str]:
    """Return the public names of a module."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return list(names)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


def names(room: str) -> dict[str, str]:
    """Return the public names that live in a room: ``{name: where to import it from}``."""
    trainbus = importlib.import_module(TRAINBUS)
    top = public(trainbus)
    module = importlib.import_module(room)
    home = HOMES.get(room, room)
    found = {name: TRAINBUS if name in top else home for name in public(module) if not _elsewhere(room, getattr(module, name))}
    if room == "trainbus.bridges":
        found |= dict.fromkeys(trainbus._OPTIONAL, TRAINBUS)  # they need other libraries, so no list of names has them
    for package in PARTS:
        module = importlib.import_module(package)
        for name in public(module):
            home = getattr(getattr(module, name), "__module__", None) or ""
            if name not in found and _lives_in(home, room):
                found[name] = TRAINBUS
    return {name: found[name] for name in sorted(found, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))}


def _lives_in(module: str, room: str) -> bool:
    inside = any(module == one or module.startswith(f"{one}.") for one in (room, *FURTHER.get(room, ())))
    deeper = any(len(other) > len(room) and (module == other or module.startswith(f"{other}.")) for other in ROOMS)
    return inside and not deeper


def _elsewhere(room: str, value: object) -> bool:
    """Return True for what a room offers and another room has."""
    home = getattr(value, "__module__", None) or ""
    return any(_lives_in(home, other) for other in ROOMS if other != room)


def path_of(room: str, name: str) -> str:
    """Return the dotted path under which the documentation tool finds a name."""
    optional = importlib.import_module(TRAINBUS)._OPTIONAL
    if name in optional:
        return f"{optional[name][0]}.{name}"
    for module_name in (room, *PARTS):
        module = importlib.import_module(module_name)
        if name in public(module):
            value = getattr(module, name)
            defined = inspect.isclass(value) or inspect.isfunction(value)
            return f"{value.__module__}.{value.__qualname__}" if defined else f"{_home_of(module, name)}.{name}"
    raise KeyError(name)


def _home_of(module: ModuleType, name: str) -> str:
    """Return the module that assigns a constant or an alias of a type, which does not know it."""
    package = Path(str(module.__file__)).parent
    pattern = re.compile(rf"^{name}(:.*)? = ", re.MULTILINE)
    for path in sorted(package.glob("*.py")):
        if pattern.search(path.read_text(encoding="utf-8")):
            return module.__name__ if path.stem == "__init__" else f"{module.__name__}.{path.stem}"
    return module.__name__


def pages() -> dict[str, str]:
    """Return the pages, and the index of all names."""
    made = {name_of_page(room): page(room, title) for room, title in ROOMS.items()}
    made["reference/index.md"] = index()
    return made


def page(room: str, title: str) -> str:
    """Return the page of one room."""
    lines = [f"# {title}", "", summary(importlib.import_module(room).__doc__).replace("``", "`"), ""]
    for name, origin in names(room).items():
        lines += [
            f"::: {path_of(room, name)}",
            "    options:",
            "      heading_level: 2",
            "",
            f"`from {origin} import {name}`",
            "{ .import }",
            "",
        ]
    return "\n".join(lines)


def index() -> str:
    """Return the index: what is generated where, and every public name."""
    intro = (Path(__file__).parent / "reference.md").read_text(encoding="utf-8")
    lines = [intro, "## All public names", "", "| name | from | page |", "|---|---|---|"]
    rows = []
    for room, title in ROOMS.items():
        for name, origin in names(room).items():
            rows.append(
                (
                    name,
                    f"| [`{name}`][{path_of(room, name)}] | `{origin}` | [{title}]({name_of_page(room).partition('/')[2]}) |",
                )
            )
    return "\n".join([*lines, *(line for _, line in sorted(rows, key=lambda row: row[0].lower()))]) + "\n"
