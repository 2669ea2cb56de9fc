"""The page of the ids of warnings and errors in the log, read from the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LEVELS = {"warning": "warning", "error": "error", "exception": "error", "critical": "critical"}


class Line(NamedTuple):
    """A place where the code logs a warning or an error; ``id`` is empty if it has none."""

    id: str
    level: str
    text: str
    module: str
    number: int


def lines() -> Iterator[Line]:
    """Yield all places of the packages, also those that pass such a method on."""
    for path in sorted(path for package in ("eventloop", "hooks", "trainbus") for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {one: node for node in ast.walk(tree) if isinstance(node, ast.Call) for one in (node.func, *node.args)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in LEVELS and ast.unparse(node.value) == "log":
                call = calls.get(node)
                given = {one.arg: one.value for one in call.keywords} if call else {}
                name = ast.literal_eval(given["id"]) if "id" in given else ""
                text = _text(call.args[call.args.index(node) + 1 if node in call.args else 0]) if call else ""
                yield Line(name, LEVELS[node.attr], text, path.relative_to(ROOT).as_posix(), node.lineno)


def _text(node: ast.expr) -> str:
    """Return a message, with an ellipsis for what it fills in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
    return "…"


def page() -> str:
    """Return the page."""
    rows = sorted({(one.id, one.level, one.text) for one in lines() if one.id})
    head = [
        "# Warnings and errors in the log",
        "",
        "Each has an `id` that stays the same when its text is improved. Filter by it, and test for it:",
        "",
        "```python",
        "from structlog.testing import capture_logs",
        "from trainbus.testing import toy_job",
        "from trainbus import EMAHook, Bus, TrainLoop",
        "",
        "model, optimizer, step, train, val = toy_job()  # put yours here",
        "bus = Bus(EMAHook())",
        "with capture_logs() as lines:",
        "    TrainLoop(model, optimizer, step=step, train_data=train, bus=bus, max_epochs=1).run()",
        'assert [line["id"] for line in lines] == ["momentum-too-small"]',
        "```",
        "",
        "Lines in JSON have it as a field. Lines on a terminal leave it out.",
        "",
        "| id | level | text |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *(f"| `{name}` | {level} | {text.replace('|', '&#124;')} |" for name, level, text in rows)]) + "\n"
