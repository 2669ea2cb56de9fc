"""``python docs/_site/drawings.py [--check]``: write the drawings of the site to ``docs/drawings/``.

``--check`` writes nothing, and fails if a file differs from what this script draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import narrow  # type: ignore[import-not-found]  # beside this file
from canvas import Canvas  # type: ignore[import-not-found]

FOLDER = Path(__file__).parents[1] / "drawings"


def event() -> Canvas:
    c = Canvas(860, 388, "The life of an event")
    c.panel(12, 12, 836, 140, "Training thread", note="in order of priority, one function compiled per event type")
    c.box(28, 58, 128, 60, "AfterTrainIter", "the loop publishes", mono=True)
    steps = [
        ("30  optimizer", "backward, step", "green", "runs at once"),
        ("50  EMA", "average", "green", "sees new weights"),
        ("60  logger", "copy, append", "blue", "a copy of this moment"),
        ("70  schedule", "next rate", "green", "runs at once"),
        ("90  checkpoint", "copy the state", "blue", "one copy"),
    ]
    x = 182
    for number, (title, line, kind, below) in enumerate(steps):
        c.arrow((x - (26 if number == 0 else 12), 88), (x - 2, 88))
        c.box(x, 58, 120, 60, title, line, kind=kind)
        c.text(x + 60, 138, below, anchor="middle", kind=kind)
        x += 132
    c.panel(12, 184, 836, 144, "Beside it: one bounded lane per offloaded handler")
    c.text(
        16,
        354,
        "Green handlers are inline: the step waits for them. Blue ones are offloaded: they append to a lane and return.",
        size=13,
    )
    c.text(16, 374, "The next step begins after the last append. It waits for no disk and no network.", size=13)
    for x, name, work, below in (
        (296, "logger", "write lines", "a thread takes batches"),
        (578, "checkpoint", "write, fsync, …", "then checkpoint_committed"),
    ):
        c.box(x, 218, 258, 96, "", kind="blue")
        c.text(x + 129, 240, f"lane of the {name}", size=13, bold=True, anchor="middle")
        c.slots(x + 12, 254, 5, filled=3)
        c.arrow((x + 124, 263), (x + 142, 263), kind="blue")
        c.text(x + 148, 268, work, size=12)
        c.text(x + 129, 300, below, anchor="middle", kind="dim")
    c.arrow((506, 146), (506, 216), kind="blue", dashed=True)
    c.arrow((770, 146), (770, 216), kind="blue", dashed=True)
    for number, line in enumerate(
        (
            "A full lane blocks, drops or",
            "raises, as you chose. Each",
            "drop is counted. A clean exit",
            "delivers what is left.",
        )
    ):
        c.text(28, 234 + 19 * number, line, kind="dim", size=13)
    return c


def events() -> Canvas:
    c = Canvas(860, 452, "Scopes of a run and their mount points")

    def scope(x: float, y: float, w: float, h: float, name: str, first: str, last: str) -> None:
        c.panel(x, y, w, h, name)
        c.text(x + w - 12, y + 21, first, mono=True, anchor="end", kind="blue")
        c.text(x + w - 12, y + h - 10, last, mono=True, anchor="end", kind="blue")

    scope(12, 12, 836, 428, "run", "before_run", "after_run")
    scope(32, 46, 796, 360, "training", "before_train", "after_train")
    scope(52, 80, 756, 212, "each epoch", "before_train_epoch", "after_train_epoch")
    scope(72, 114, 716, 144, "each iteration", "before_train_iter", "after_train_iter")
    c.box(88, 150, 214, 68, "your step", "before_forward · after_forward", kind="green")
    c.arrow((302, 184), (328, 184))
    c.box(
        330,
        150,
        440,
        68,
        "the update, while after_train_iter is published",
        "before_backward · after_backward",
        "before_optimizer_step · after_optimizer_step",
        kind="green",
    )
    scope(52, 302, 756, 70, "each validation", "before_val · before_val_epoch", "after_val_epoch · after_val")
    c.text(64, 352, "per batch: before_val_iter · after_val_iter", mono=True, kind="blue")
    return c


def priorities() -> Canvas:
    c = Canvas(860, 300, "Handlers of after_train_iter on the scale of priorities")
    c.text(20, 28, "Handlers of after_train_iter, from 0 (first) to 100 (last)", size=14, bold=True)
    left, scale = 40.0, 7.8
    c.arrow((left, 150), (left + 100 * scale, 150))
    marks = (
        (0, "HIGHEST"),
        (10, "VERY_HIGH"),
        (30, "HIGH"),
        (40, "ABOVE_NORMAL"),
        (50, "NORMAL"),
        (60, "BELOW_NORMAL"),
        (70, "LOW"),
        (90, "VERY_LOW"),
        (100, "LOWEST"),
    )
    for number, name in marks:
        x = left + number * scale
        c.arrow((x, 145), (x, 155), head=False)
        c.text(x, 171, str(number), anchor="middle", kind="dim")
        row = 187 if number not in (40, 60) else 201
        c.text(x, row, name, anchor="middle", kind="dim", size=10)
    for number, name, kind in (
        (10, "RuntimeInfo", "green"),
        (30, "update", "green"),
        (50, "EMA", "green"),
        (60, "Logger", "blue"),
        (70, "Schedule", "green"),
        (90, "Checkpoint", "blue"),
    ):
        x = left + number * scale
        high = 92 if number == 60 else 54
        width = 104 if len(name) > 8 else 84
        c.box(x - width / 2, high, width, 32, name, kind=kind)
        c.arrow((x, high + 32), (x, 143), kind=kind)
    for begin, end, words, kind in (
        (0, 30, "weights before the step", "amber"),
        (30, 50, "new weights", "green"),
        (50, 100, "new weights, new average", "blue"),
    ):
        x1, x2 = left + begin * scale + 2, left + end * scale - 2
        c.box(x1, 222, x2 - x1, 34, words, kind=kind)
    c.text(
        left,
        284,
        "What a handler sees depends on its priority. An offloaded handler gets a copy made at its priority.",
        size=13,
    )
    return c


def offloading() -> Canvas:
    c = Canvas(860, 330, "Inline and offloaded handlers over time")
    c.panel(12, 12, 836, 150, "A loop that logs and saves inline")
    c.panel(12, 174, 836, 144, "The same work offloaded")

    def row(y: float, name: str, spans: list[tuple[float, float, str, str]]) -> None:
        c.text(28, y + 24, name, size=12, kind="dim")
        for x, width, words, kind in spans:
            c.box(x, y, width, 36, words, kind=kind)

    row(
        60,
        "training",
        [
            (130, 110, "step 1", "green"),
            (244, 60, "log", "red"),
            (308, 110, "step 2", "green"),
            (422, 60, "log", "red"),
            (486, 170, "write checkpoint", "red"),
            (660, 110, "step 3", "green"),
        ],
    )
    c.text(130, 130, "The step waits for each write. A slow disk or a dead server stops the training.", kind="dim")
    row(
        206,
        "training",
        [
            (130, 110, "step 1", "green"),
            (250, 110, "step 2", "green"),
            (380, 110, "step 3", "green"),
            (500, 110, "step 4", "green"),
            (620, 110, "step 5", "green"),
        ],
    )
    for x in (245, 370):
        c.arrow((x, 243), (x, 262), kind="blue", dashed=True)
    row(264, "lanes", [(236, 60, "log", "blue"), (364, 250, "write checkpoint", "blue")])
    c.text(628, 286, "appending to a lane takes", kind="dim")
    c.text(628, 303, "some microseconds", kind="dim")
    return c


def snapshots() -> Canvas:
    c = Canvas(860, 330, "What an offloaded handler gets")
    c.panel(12, 12, 250, 306, "The event when it is published")
    rows = (
        ("progress, path, name", "plain fields", ""),
        ("outputs", "scalars", "blue"),
        ("run, model, batch", "live fields", "amber"),
    )
    for number, (first, second, kind) in enumerate(rows):
        c.box(30, 50 + 86 * number, 214, 62, first, second, kind=kind, mono=True)
    c.panel(560, 12, 288, 306, "What the handler gets, later")
    c.box(578, 50, 252, 62, "the same values", "numbers, text, lists of them")
    c.box(578, 136, 252, 62, "numbers", "copied to the host off the step", kind="blue")
    c.box(578, 222, 252, 36, "LiveFieldError on touch", kind="red")
    c.box(578, 268, 252, 36, "a copy of capture's result", kind="green")
    c.arrow((244, 81), (576, 81))
    c.text(410, 73, "copied", anchor="middle", kind="dim")
    c.arrow((244, 167), (576, 167), kind="blue")
    c.text(410, 159, "one copy per batch of events", anchor="middle", kind="dim")
    c.arrow((244, 240), (576, 240), kind="red", dashed=True)
    c.text(410, 232, "the weights change before the handler runs", anchor="middle", kind="dim")
    c.arrow((244, 262), (300, 262), (300, 286), (576, 286), kind="green")
    c.text(424, 278, "capture=lambda event: …", anchor="middle", kind="green", mono=True)
    c.text(424, 304, "copied at the handler's priority", anchor="middle", kind="dim")
    return c


def lanes() -> Canvas:
    c = Canvas(860, 420, "A lane and what happens when it is full")
    c.box(20, 40, 150, 56, "training thread", "publishes", kind="green")
    c.arrow((170, 68), (228, 68))
    c.text(199, 60, "append", anchor="middle", kind="dim")
    c.panel(230, 24, 330, 88, "lane: queue=1024, first in first out", kind="blue")
    c.slots(250, 60, 13, filled=6)
    c.arrow((560, 68), (640, 68), kind="blue")
    c.text(600, 60, "in batches", anchor="middle", kind="dim")
    c.box(642, 40, 198, 56, "consumer", "calls the handler", kind="blue")
    c.text(20, 150, "When the lane is full, full= decides:", size=14, bold=True)
    rows = (
        ('"block"', "the publisher waits for room; nothing is lost (default)", "green"),
        ('"drop_old"', "the oldest waiting event is dropped (default of streams)", "amber"),
        ('"drop_new"', "the new event is dropped", "amber"),
        ('"latest"', "all waiting events are dropped; only the new one stays", "amber"),
        ('"raise"', "publish raises LaneFullError", "red"),
    )
    for number, (name, words, kind) in enumerate(rows):
        y = 168 + 40 * number
        c.box(20, y, 130, 30, name, kind=kind, mono=True)
        c.text(168, y + 20, words, size=13)
    c.text(20, 394, "Always, in bus.stats():  published = delivered + failed + dropped + pending", size=13, mono=True)
    return c


def saves() -> Canvas:
    c = Canvas(860, 340, "One save, from the request to the durable file")
    c.panel(12, 12, 836, 134, "Training thread")
    c.box(28, 50, 160, 64, "hooks request", "one or several", kind="green")
    c.arrow((188, 82), (218, 82))
    c.box(220, 50, 190, 64, "gather and copy", "after the last handler", kind="amber")
    c.arrow((410, 82), (440, 82))
    c.box(442, 50, 390, 64, "next iterations", "training goes on while the copy is written", kind="green")
    c.text(315, 134, "the only time that training waits", anchor="middle", kind="amber")
    c.panel(12, 180, 836, 148, "Writer thread")
    x = 28.0
    for number, (first, second) in enumerate(
        (
            ("write", "temporary name"),
            ("fsync", "the bytes"),
            ("rename", "to the real name"),
            ("fsync", "the directory"),
            ("then", "last_checkpoint"),
        )
    ):
        if number:
            c.arrow((x - 14, 242), (x - 1, 242), kind="blue")
        c.box(x, 212, 128, 60, first, second, kind="blue")
        x += 142
    c.text(x - 8, 234, "remove older", kind="dim")
    c.text(x - 8, 252, "files, publish", kind="dim")
    c.arrow((315, 146), (315, 163), (130, 163), (130, 210), kind="blue", dashed=True)
    c.text(
        28,
        298,
        "A kill at any moment leaves the files before it intact. checkpoint_committed is published when the file is durable.",
        size=13,
    )
    c.text(28, 316, "If another file has the same state (a best checkpoint), it is a second name of this one.", size=13)
    return c


def errors() -> Canvas:
    c = Canvas(860, 372, "What happens after an exception in an iteration")
    c.panel(12, 12, 500, 348, "open scopes")
    c.panel(32, 46, 460, 300, "run", note="undo: close files")
    c.panel(52, 82, 420, 248, "training", note="undo: restore settings")
    c.panel(72, 118, 380, 196, "epoch")
    c.panel(92, 154, 340, 144, "iteration")
    c.box(112, 190, 300, 84, "step() raises", "no after_train_iter for this iteration", kind="red")
    steps = (
        ("1  on_exception", "hooks see the error first"),
        ("2  scopes end, innermost first", "undo functions run; no after_x events"),
        ("3  lanes drain", "for at most abort_timeout seconds"),
        ("4  the bus closes", "and reports what it did not deliver"),
        ("5  you get your exception", "the same object, with a note"),
    )
    for number, (first, second) in enumerate(steps):
        y = 20 + 70 * number
        c.box(548, y, 298, 54, first, second, kind="red" if number in (0, 4) else "")
        if number:
            c.arrow((697, y - 16), (697, y - 1))
    c.arrow((412, 232), (530, 232), (530, 47), (546, 47), kind="red")
    return c


def house() -> Canvas:
    c = Canvas(860, 516, "The packages and which may import which")
    c.text(20, 28, "An upper package may import a lower one, never the other way round.", size=14, bold=True)
    rows = (
        (("trainbus.cli", "the command"), ("trainbus.compat", "other hook systems")),
        (("trainbus.config", "a configuration to a loop"),),
        (("trainbus.bridges", "other trainers"), ("trainbus.observe", "costs, records")),
        (("trainbus.hooks", "one module per hook"), ("trainbus.convert", "others' files")),
        (("eventloop.training", "the order of a run"),),
        (("eventloop.bus", "who hears what"),),
        (("eventloop.offload", "where it runs"),),
        (("eventloop.events", "what can happen"),),
        (("eventloop.errors", ""), ("eventloop.log", "")),
    )
    for number, row in enumerate(rows):
        y = 44 + 46 * number
        width = (600 - 12 * (len(row) - 1)) / len(row)
        for column, (name, words) in enumerate(row):
            c.rect(
                20 + column * (width + 12),
                y,
                width,
                36,
                7,
                "green-fill" if name == "trainbus.hooks" else "blue-fill",
                "green" if name == "trainbus.hooks" else "blue",
            )
            c.text(32 + column * (width + 12), y + 23, name, mono=True, bold=True)
            c.text(12 + (column + 1) * (width + 12) - 10, y + 23, words, anchor="end", kind="dim")
    c.panel(650, 44, 190, 450, "Beside them")
    c.box(664, 268, 162, 100, "eventloop.checkpoint", "files, copies, commits", "knows no bus", mono=True)
    c.arrow((620, 292), (662, 308), kind="dim")
    c.text(664, 392, "training imports it;", kind="dim")
    c.text(664, 410, "it imports errors and", kind="dim")
    c.text(664, 428, "log only", kind="dim")
    return c


DRAWINGS: tuple[Callable[[], Canvas], ...] = (event, events, priorities, offloading, snapshots, lanes, saves, errors, house)


def files() -> Iterator[tuple[Path, str]]:
    """Yield the files and what is in them: each drawing, and the same for narrow screens."""
    for draw in DRAWINGS:
        yield FOLDER / f"{draw.__name__}.svg", draw().svg()
    for draw in narrow.DRAWINGS:
        yield FOLDER / f"{draw.__name__}-narrow.svg", draw().svg()


def main() -> int:
    """Write the files, or check them; return the exit status."""
    stale = []
    for path, text in files():
        if "--check" not in sys.argv:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        print(f"{', '.join(stale)} differ from what docs/_site/drawings.py draws; run it", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
