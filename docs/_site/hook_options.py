"""The page of hooks: every option with type, default, unit and description."""

from __future__ import annotations

import re

from descriptions import as_markdown, shown, summary, unit

from trainbus import hooks
from trainbus.config import option_descriptions
from trainbus.config.defaults import DEFAULT_HOOKS
from trainbus.eventloop.annotations import Signature, describe
from trainbus.eventloop.bus import GuestHook
from trainbus.eventloop.bus.hook import mount_points_of
from trainbus.eventloop.bus.priority import Priority
from trainbus.eventloop.registry import registered

TITLES = {"hook": "Hooks", "writer": "Writers", "average": "Averages"}
INTRODUCTIONS = {
    "hook": '`bus.add(EMAHook(momentum=0.01))` in Python, `{ type = "EMAHook", momentum = 0.01 }` in a configuration.',
    "writer": "For `LoggerHook(writers=[...])`. See [log to TensorBoard, W&B and MLflow](../guides/loggers.md).",
    "average": "For `EMAHook(ema_type=...)`, which takes their options, too. See [averaged weights](../guides/ema.md).",
}
ROW = "| `{name}` | {kind} | {default} | {unit} | {words} |"


def classes(kind: str) -> list[tuple[str, type]]:
    """Return name and class of everything of a kind that comes with trainbus."""
    found = [(entry.name, entry.cls) for entry in registered(kind) if entry.cls.__module__.startswith("trainbus.")]
    return sorted((name, cls) for name, cls in found if not issubclass(cls, GuestHook))


def options(cls: type) -> list[dict[str, str]]:
    """Return the options of a class: name, type, default, unit and description."""
    described = option_descriptions(cls)
    signature = Signature(cls)
    rows = []
    for option in signature.options.values():
        if issubclass(cls, hooks.WeightAverage) and option.name == "model":
            continue  # the hook gives it
        kind = describe(option.annotation)
        words = described.get(option.name, "")
        default = "required" if option.default is option.empty else shown(option.default)
        rows.append({"name": option.name, "kind": kind, "default": default, "unit": unit(kind, words), "words": words})
    if signature.rest_of is not None:
        rows.append({"name": "**options", "kind": "", "default": "", "unit": "", "words": described.get("options", "")})
    return rows


def page() -> str:
    """Return the page."""
    lines = [
        "# Hooks, writers and averages",
        "",
        "Every option, from the signatures and docstrings of the code. `trainbus hooks` prints the same on a terminal.",
        "",
        "A *table* is a mapping, and a table in a configuration.",
        "",
        f"`trainbus run` adds these by itself: {', '.join(f'`{name}`' for name in default_names())}.",
        "",
        "| hook | priority | does |",
        "|---|---|---|",
    ]
    for name, cls in classes("hook"):
        words = as_markdown(summary(cls.__doc__))
        lines.append(f"| [`{name}`](#{name.lower()}) | {Priority.parse(cls.priority)} | {words} |")  # type: ignore[attr-defined]
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", "", INTRODUCTIONS[kind], ""]
        for name, cls in classes(kind):
            lines += section(kind, name, cls)
    return "\n".join(lines) + "\n"


def default_names() -> list[str]:
    """Return the classes of the hooks that ``trainbus run`` adds."""
    return [entry["type"] if isinstance(entry, dict) else str(entry) for entry in DEFAULT_HOOKS.values()]


def section(kind: str, name: str, cls: type) -> list[str]:
    """Return the lines of one class."""
    where = f"{cls.__module__}.{cls.__qualname__}"
    lines = [f"### {name}", "", as_markdown(summary(cls.__doc__)).replace("\\|", "|"), ""]
    if kind == "hook":
        priority = Priority.parse(cls.priority)  # type: ignore[attr-defined]
        heard = ", ".join(f"`{point}`" for point in mount_points_of(cls))  # type: ignore[arg-type]
        lines += [f"Priority {priority} ({Priority.label(priority)}), at {heard}. [Details][{where}].", ""]
    else:
        lines += [f"[Details][{where}].", ""]
    rows = options(cls)
    if not rows:
        return [*lines, "No options.", ""]
    lines += ["| option | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        cells = {**row, "kind": code(row["kind"]), "words": as_markdown(row["words"])}
        lines.append(ROW.format(**cells))
    return [*lines, ""]


def code(kind: str) -> str:
    """Return a type as code for a table's cell, each member of a union by itself, so that lines can break."""
    members = re.split(r" \| (?![^\[]*\])", kind) if kind else []
    return " \\| ".join(f"`{member}`" for member in members)
