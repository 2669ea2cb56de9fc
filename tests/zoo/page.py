"""Write what the zoo tried as a page."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

EXACT = ("bitwise", "exact", "as it was", "as it was, without gaps")
"""Outcomes that need no explanation."""
PACKAGES = (
    *("torch", "lightning", "transformers", "accelerate", "pytorch-ignite", "torchdata", "torchmetrics", "pytorch-optimizer"),
    *("schedulefree", "prodigyopt", "timm", "peft", "torchvision"),
)

HEAD = """\
# What was tried

<!-- written by `pytest -m zoo tests/zoo --zoo-page docs/reference/tried.md` -->

Each entry was trained to its end, and once more killed in iteration 8 and resumed by new objects from the checkpoint of
iteration 5. Both are compared bit for bit: weights, the state of the optimizer and of the schedule, types, shapes, strides and
dtypes.

The control is the same training without trainbus: a loop with `torch.save` and `load_state_dict`, or the trainer's own
checkpoints. Where the control resumes bitwise, trainbus must, too. The entries are all that a package lists, not a choice.

- **bitwise**, **exact**, **as it was**: as in the whole training
- **as torch.save**: not as in the whole training, and neither is the control, which has the same bits
- **refused**: an error that names the reason, where the control fails, too
- **refused early**: an error before training, or at the first save, with the way out: an optimizer that needs a closure in
  `TrainLoop`; an object that only a pickle can hold, which `torch.load(weights_only=True)` refuses as well
- **as it was, without gaps**: a tensor with gaps between its elements comes back without them
- **not taken**: the trainer itself does not take it, with or without trainbus
- **not trained**: the package's own loop does not train it here; the reason is the package's
- **told**: a warning at the resume says what differs
"""


class Row(NamedTuple):
    """One training: what was brought, how it trained, and what came back."""

    group: str
    name: str
    detail: str
    way: str
    ours: str
    control: str

    @property
    def outcome(self) -> str:
        return self.ours.partition(":")[0]


def written(rows: Iterable[Row]) -> str:
    """Return the page."""
    rows = sorted(set(rows))
    groups = {group: [row for row in rows if row.group == group] for group in dict.fromkeys(row.group for row in rows)}
    return "\n".join([HEAD, *_totals(groups), *(line for name, group in groups.items() for line in _group(name, group))]) + "\n"


def _totals(groups: dict[str, list[Row]]) -> Iterator[str]:
    tried = [row for rows in groups.values() for row in rows]
    yield f"With {', '.join(_versions())}; Python {platform.python_version()}, CPU:"
    yield ""
    yield "| group | entries | trainings | outcomes |"
    yield "|---|---|---|---|"
    for name, rows in groups.items():
        yield f"| {name} | {len({row.name for row in rows})} | {len(rows)} | {_counted(rows)} |"
    yield f"| all | {sum(len({row.name for row in rows}) for rows in groups.values())} | {len(tried)} | {_counted(tried)} |"


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name).partition('+')[0]}"
        except PackageNotFoundError:
            continue


def _counted(rows: list[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    return ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items(), key=lambda each: (-each[1], each[0])))


def _group(name: str, rows: list[Row]) -> Iterator[str]:
    ways = list(dict.fromkeys(row.way for row in rows))
    yield from ("", f"## {name[0].upper()}{name[1:]}", "")
    yield f"| | {' | '.join(ways)} |"
    yield "|---" * (len(ways) + 1) + "|"
    for entry in dict.fromkeys(row.name for row in rows):
        cells = [_cell([row for row in rows if row.name == entry and row.way == way]) for way in ways]
        yield f"| {entry} | {' | '.join(cells)} |"
    if odd := [row for row in rows if row.outcome not in EXACT]:
        yield from ("", "Not as in a whole training:", "")
        yield from dict.fromkeys(map(_explained, odd))


def _cell(rows: list[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    if len(counts) == 1 and len(rows) == 1:
        return next(iter(counts))
    return ", ".join(f"{outcome} {count} times" for outcome, count in sorted(counts.items()))


def _explained(row: Row) -> str:
    where = ", ".join(part for part in (row.name, row.detail, row.way) if part)
    control = f"; the control: {row.control}" if row.control else ""
    return f"- {where}: {row.ours}{control}"
