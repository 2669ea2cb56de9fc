"""The drawings of the site for narrow screens: the same content, one thing below the other, 380 pixels wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from canvas import Canvas  # type: ignore[import-not-found]  # beside this file

WIDTH = 380


def _lines(c: Canvas, x: float, y: float, *lines: str, kind: str = "ink", size: int = 13) -> None:
    for number, line in enumerate(lines):
        c.text(x, y + 18 * number, line, size=size, kind=kind)


def event() -> Canvas:
    c = Canvas(WIDTH, 640, "The life of an event")
    c.panel(4, 4, 372, 384, "Training thread")
    c.box(20, 36, 210, 48, "AfterTrainIter", "the loop publishes", mono=True)
    rows = (
        ("30  optimizer", "backward, step", "green", "runs at once"),
        ("50  EMA", "average", "green", "sees new weights"),
        ("60  logger", "copy, append", "blue", "a copy of now"),
        ("70  schedule", "next rate", "green", "runs at once"),
        ("90  checkpoint", "copy the state", "blue", "one copy"),
    )
    for number, (title, line, kind, beside) in enumerate(rows):
        y = 98 + 57 * number
        c.arrow((125, y - 14), (125, y - 1))
        c.box(20, y, 210, 43, title, line, kind=kind)
        c.text(242, y + (18 if kind == "blue" else 26), beside, size=13, kind=kind)
    c.panel(4, 404, 372, 136, "Beside it: a bounded lane each")
    for y, name, work in ((434, "logger", "write lines"), (488, "checkpoint", "write, fsync, commit")):
        c.box(20, y, 340, 44, "", kind="blue")
        c.text(30, y + 27, name, size=13, bold=True)
        c.slots(116, y + 13, 3, filled=2)
        c.arrow((184, y + 22), (202, y + 22), kind="blue")
        c.text(208, y + 27, work, size=13)
    c.arrow((230, 241), (368, 241), (368, 456), (362, 456), kind="blue", dashed=True)
    c.arrow((230, 355), (352, 355), (352, 486), kind="blue", dashed=True)
    _lines(
        c, 8, 564,
        "Green handlers are inline: the step waits for them.",
        "Blue ones are offloaded: they append to a lane.",
        "The next step waits for no disk and no network.",
        "A full lane blocks, drops or raises, as you chose.",
    )  # fmt: skip
    return c


def events() -> Canvas:
    c = Canvas(WIDTH, 560, "Scopes of a run and their mount points")

    def scope(inset: float, y: float, height: float, name: str, first: str, last: str) -> None:
        width = WIDTH - 2 * inset
        c.panel(inset, y, width, height, name)
        c.text(inset + width - 8, y + 20, first, mono=True, anchor="end", kind="blue")
        c.text(inset + width - 8, y + height - 9, last, mono=True, anchor="end", kind="blue")

    scope(4, 4, 550, "run", "before_run", "after_run")
    scope(14, 36, 490, "training", "before_train", "after_train")
    scope(24, 68, 326, "each epoch", "before_train_epoch", "after_train_epoch")
    scope(34, 100, 266, "each iteration", "before_train_iter", "after_train_iter")
    c.box(46, 134, 288, 74, "your step", "before_forward", "after_forward", kind="green")
    c.arrow((190, 208), (190, 220))
    c.box(
        46,
        222,
        288,
        112,
        "the update",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "after_optimizer_step",
        kind="green",
    )
    scope(24, 402, 96, "each validation", "before_val", "after_val")
    c.text(32, 442, "before_val_epoch · after_val_epoch", mono=True, kind="blue")
    c.text(32, 464, "before_val_iter · after_val_iter", mono=True, kind="blue")
    return c


def priorities() -> Canvas:
    c = Canvas(WIDTH, 500, "Handlers of after_train_iter on the scale of priorities")
    c.text(8, 24, "Handlers of after_train_iter, first to last", size=14, bold=True)
    top, scale = 48.0, 3.9
    c.arrow((160, top), (160, top + 100 * scale + 6))
    names = {
        0: "HIGHEST", 10: "VERY_HIGH", 30: "HIGH", 40: "ABOVE_NORMAL", 50: "NORMAL",
        60: "BELOW_NORMAL", 70: "LOW", 90: "VERY_LOW", 100: "LOWEST",
    }  # fmt: skip
    for number, name in names.items():
        y = top + number * scale
        c.arrow((155, y), (165, y), head=False)
        c.text(148, y + 4, f"{name} {number}", anchor="end", kind="dim", size=11)
    for number, name, kind in (
        (10, "RuntimeInfo", "green"), (30, "update", "green"), (50, "EMA", "green"),
        (60, "Logger", "blue"), (70, "Schedule", "green"), (90, "Checkpoint", "blue"),
    ):  # fmt: skip
        y = top + number * scale
        c.box(182, y - 15, 100, 30, name, kind=kind)
        c.arrow((181, y), (167, y), kind=kind)
    for begin, end, words, kind in (
        (0, 30, ("weights", "before", "the step"), "amber"),
        (30, 50, ("new", "weights"), "green"),
        (50, 100, ("new", "weights,", "new", "average"), "blue"),
    ):
        y1, y2 = top + begin * scale + 2, top + end * scale - 2
        c.rect(292, y1, 80, y2 - y1, 7, f"{kind}-fill", kind)
        for row, word in enumerate(words):
            c.text(332, (y1 + y2) / 2 + 18 * (row - (len(words) - 1) / 2) + 4, word, size=13, anchor="middle")
    _lines(c, 8, 472, "A handler sees what its priority shows it. An", "offloaded one gets a copy made at its priority.")
    return c


def offloading() -> Canvas:
    c = Canvas(WIDTH, 472, "Inline and offloaded handlers over time")

    def column(x: float, spans: Sequence[tuple[float, float, str, str]]) -> None:
        for y, height, words, kind in spans:
            c.box(x, y, 116 if x > 200 else 130, height, words, kind=kind)

    c.panel(4, 4, 176, 380, "All inline")
    column(
        26,
        [
            (40, 60, "step 1", "green"), (104, 32, "log", "red"), (140, 60, "step 2", "green"), (204, 32, "log", "red"),
            (240, 70, "write a save", "red"), (314, 60, "step 3", "green"),
        ],
    )  # fmt: skip
    c.panel(192, 4, 184, 380, "The same, offloaded")
    for number in range(5):
        c.box(202, 40 + 67 * number, 70, 60, f"step {number + 1}", kind="green")
    c.box(290, 90, 76, 34, "log", kind="blue")
    c.box(290, 164, 76, 150, "write", "a save", kind="blue")
    for y in (103, 170):
        c.arrow((273, y), (288, y), kind="blue", dashed=True)
    c.text(284, 348, "appending", kind="dim")
    c.text(284, 364, "takes µs", kind="dim")
    _lines(
        c, 8, 410,
        "Left, the step waits for each write: a slow disk or a",
        "dead server stops the training. Right, the training",
        "appends to a lane, and goes on.",
    )  # fmt: skip
    return c


def snapshots() -> Canvas:
    c = Canvas(WIDTH, 560, "What an offloaded handler gets")
    c.text(8, 22, "From the event, to the handler later", size=14, bold=True)

    def pair(y: float, source: tuple[str, str, str], label: str, target: tuple[str, str, str], dashed: bool = False) -> None:
        first, second, kind = source
        c.box(8, y, 364, 48, first, second, kind=kind, mono=True)
        way = target[2] or "dim"
        c.arrow((40, y + 48), (40, y + 76), kind=way, dashed=dashed)
        c.text(54, y + 67, label, size=13, kind="dim")
        c.box(8, y + 78, 364, 44, *filter(None, target[:2]), kind=target[2])

    pair(38, ("progress, path, name", "plain fields", ""), "copied", ("the same values", "numbers, text, lists of them", ""))
    pair(180, ("outputs", "scalars", "blue"), "one copy per batch of events", ("numbers", "copied off the step", "blue"))
    pair(
        322, ("run, model, batch", "live fields", "amber"), "without capture: the weights have changed",
        ("LiveFieldError on touch", "", "red"), dashed=True,
    )  # fmt: skip
    c.arrow((340, 370), (356, 384), (356, 484), kind="green")
    c.box(8, 486, 364, 56, "capture=lambda event: …", "a copy, made at the handler's priority", kind="green", mono=True)
    return c


def lanes() -> Canvas:
    c = Canvas(WIDTH, 620, "A lane and what happens when it is full")
    c.box(90, 8, 200, 48, "training thread", "publishes", kind="green")
    c.arrow((190, 56), (190, 80))
    c.text(202, 73, "append", kind="dim")
    c.panel(40, 82, 300, 74, "lane: queue=1024, first in first out", kind="blue")
    c.slots(58, 116, 12, filled=6)
    c.arrow((190, 156), (190, 180), kind="blue")
    c.text(202, 173, "in batches", kind="dim")
    c.box(90, 182, 200, 48, "consumer", "calls the handler", kind="blue")
    c.text(8, 268, "When the lane is full, full= decides:", size=14, bold=True)
    rows = (
        ('"block"', "the publisher waits;", "nothing is lost (default)", "green"),
        ('"drop_old"', "the oldest waiting event is", "dropped (default of streams)", "amber"),
        ('"drop_new"', "the new event is dropped", "", "amber"),
        ('"latest"', "all waiting ones are dropped;", "only the new one stays", "amber"),
        ('"raise"', "publish raises LaneFullError", "", "red"),
    )
    for number, (name, first, second, kind) in enumerate(rows):
        y = 284 + 54 * number
        c.box(8, y, 112, 38, name, kind=kind, mono=True)
        _lines(c, 132, y + (16 if second else 24), first, *[second] * bool(second))
    _lines(c, 8, 576, "Always, in bus.stats(): published =", "delivered + failed + dropped + pending")
    return c


def saves() -> Canvas:
    c = Canvas(WIDTH, 650, "One save, from the request to the durable file")
    c.panel(4, 4, 372, 222, "Training thread")
    c.box(20, 36, 250, 44, "hooks request", "one or several", kind="green")
    c.arrow((145, 80), (145, 96))
    c.box(20, 98, 250, 44, "gather and copy", "training waits for this only", kind="amber")
    c.arrow((145, 142), (145, 158))
    c.box(20, 160, 250, 52, "next iterations", "go on while it is written", kind="green")
    c.panel(4, 242, 372, 302, "Writer thread")
    rows = (
        ("write", "a temporary name"), ("fsync", "the bytes"), ("rename", "to the real name"),
        ("fsync", "the directory"), ("then", "last_checkpoint; remove older files"),
    )  # fmt: skip
    for number, (first, second) in enumerate(rows):
        y = 274 + 53 * number
        if number:
            c.arrow((145, y - 13), (145, y - 1), kind="blue")
        c.box(20, y, 250, 40, first, second, kind="blue")
    c.arrow((270, 120), (330, 120), (330, 294), (272, 294), kind="blue", dashed=True)
    _lines(
        c, 8, 566,
        "A kill at any moment leaves the files before it",
        "intact. checkpoint_committed is published when",
        "the file is durable. A best checkpoint of the same",
        "state is a second name of it.",
    )  # fmt: skip
    return c


def errors() -> Canvas:
    c = Canvas(WIDTH, 640, "What happens after an exception in an iteration")
    c.panel(4, 4, 372, 246, "open scopes")
    c.panel(14, 34, 352, 206, "run", note="undo: close files")
    c.panel(26, 66, 328, 164, "training", note="undo: restore settings")
    c.panel(38, 98, 304, 122, "epoch")
    c.panel(50, 128, 280, 82, "iteration")
    c.box(140, 140, 180, 60, "step() raises", "no after_train_iter", kind="red")
    steps = (
        ("1  on_exception", "hooks see the error first"),
        ("2  scopes end, innermost first", "undo functions run; no after_… events"),
        ("3  lanes drain", "for at most abort_timeout seconds"),
        ("4  the bus closes", "and reports what it did not deliver"),
        ("5  you get your exception", "the same object, with a note"),
    )
    for number, (first, second) in enumerate(steps):
        y = 282 + 72 * number
        c.box(30, y, 320, 52, first, second, kind="red" if number in (0, 4) else "")
        if number:
            c.arrow((190, y - 20), (190, y - 1))
    c.arrow((225, 200), (225, 262), (190, 262), (190, 281), kind="red")
    return c


def house() -> Canvas:
    c = Canvas(WIDTH, 639, "The packages and which may import which")
    _lines(c, 8, 22, "An upper package may import a lower one,", "never the other way round.")
    rows = (
        ("trainbus.cli", "the command"),
        ("trainbus.compat", "other hook systems"),
        ("trainbus.config", "a file to a loop"),
        ("trainbus.bridges", "other trainers"),
        ("trainbus.observe", "costs, records"),
        ("trainbus.hooks", "one module per hook"),
        ("trainbus.convert", "others' files"),
        ("eventloop.training", "the order of a run"),
        ("eventloop.bus", "who hears what"),
        ("eventloop.offload", "where it runs"),
        ("eventloop.events", "what can happen"),
        ("eventloop.errors, .log", ""),
    )
    for number, (name, words) in enumerate(rows):
        kind = "green" if name == "trainbus.hooks" else "blue"
        y = 54 + 39 * number
        c.rect(8, y, 364, 32, 7, f"{kind}-fill", kind)
        c.text(18, y + 21, name, mono=True, bold=True, size=13)
        c.text(362, y + 21, words, anchor="end", kind="dim", size=13)
    _lines(c, 8, 545, "cli and compat are side by side, and so are", "bridges and observe.")
    c.box(8, 581, 364, 52, "eventloop.checkpoint", "files and commits; training imports it", mono=True)
    return c


DRAWINGS: tuple[Callable[[], Canvas], ...] = (event, events, priorities, offloading, snapshots, lanes, saves, errors, house)
