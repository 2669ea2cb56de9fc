import contextlib
import io
import os
import re
import sys
import threading
import time
from functools import partial

import pytest
from rich.console import Console

from trainbus.eventloop import Bus, get_logger
from trainbus.hooks import ConsoleWriter, LoggerHook, ProgressBar

from ..failing import fails
from . import conftest

DATA = conftest.batches(5)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def step(model, batch):
    time.sleep(0.03)
    return conftest.loss_of(model, batch)


make_loop = partial(conftest.make_loop, train_data=DATA, step=step)


@pytest.fixture
def screen():
    return io.StringIO()


@pytest.fixture
def terminal(screen):
    return Console(file=screen, force_terminal=True, width=120, legacy_windows=False, _environ={"TERM": "xterm-256color"})


def test_the_bar_shows_the_training_and_leaves_the_terminal_as_it_was(terminal, screen, monkeypatch, no_thread_is_left):
    hidden, written, before = [], screen.write, sys.stdout

    def write(text):
        written(text)
        hidden.append(screen.getvalue().rfind(HIDE) > screen.getvalue().rfind(SHOW))

    monkeypatch.setattr(screen, "write", write)
    make_loop(ProgressBar(terminal), val_data=DATA).run()
    for part in ("epoch 1/2", "epoch 2/2", "val", "/5", "loss", "eta"):
        assert part in screen.getvalue()
    assert hidden and not any(hidden)  # the cursor
    assert_restored(screen)
    assert sys.stdout is before


def test_the_bar_counts_to_the_end_of_an_iteration_based_run_and_of_an_epoch_without_a_length(terminal, screen):
    make_loop(ProgressBar(terminal), max_iters=8).run()
    assert "/8" in screen.getvalue()
    assert "epoch" not in screen.getvalue()
    make_loop(ProgressBar(terminal), train_data=iter(DATA), max_epochs=1).run()
    assert "/?" in screen.getvalue()


def assert_restored(screen):
    text = screen.getvalue()
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert text.endswith("\x1b[2K")  # the line of the bar is wiped


@contextlib.contextmanager
def pseudo_terminal(monkeypatch):
    """A terminal of 80 columns for ``sys.stdout`` and ``sys.stderr``; the list gets what was written to it."""
    ours, theirs = pytest.importorskip("pty").openpty()
    pytest.importorskip("termios").tcsetwinsize(theirs, (24, 80))
    pieces, text = [], []

    def read():
        with contextlib.suppress(OSError):  # the terminal is closed
            while piece := os.read(ours, 4096):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setenv("TERM", "xterm-256color")
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            patched.delenv(name, raising=False)
        patched.setattr("structlog.is_configured", lambda: False)
        patched.setattr("rich._console", None)
        patched.setattr(sys, "stdout", terminal)
        patched.setattr(sys, "stderr", terminal)
        reader.start()
        yield text
    reader.join()
    os.close(ours)
    text.append(b"".join(pieces).decode())


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def test_lines_of_the_log_and_of_the_logger_are_printed_unchanged_above_the_bar(monkeypatch):
    with pseudo_terminal(monkeypatch) as written:
        bus = Bus(ProgressBar(), LoggerHook(interval=5, writers=[ConsoleWriter()]))
        bus.on("after_train_iter", lambda event: get_logger().info("nine", of="ten"), once=9)
        make_loop(bus=bus).run()
    (text,) = written
    assert "━" in text
    lines = [line for line in text.split("\n") if "iter" in line]
    assert len(lines) == 2
    # Each on a line of its own, after the bar was wiped off it.
    assert all("\x1b[2K" in line and "━" not in line.rsplit("\x1b[2K", 1)[1] for line in lines)
    plain = ESCAPES.sub("", text)
    assert not re.search(r"\x1b|\[[0-9;]*m", plain)  # half an escape sequence is garbage on the screen
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[info +\] nine +of=ten *$", plain.replace("\r", "\n"), re.MULTILINE)


def test_in_a_pipe_lines_of_log_and_logger_are_whole_and_without_escape_codes(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr("structlog.is_configured", lambda: False)
    monkeypatch.setattr("rich._console", None)
    with os.fdopen(reading) as pipe, os.fdopen(os.dup(writing), "w") as out, os.fdopen(writing, "w", 1) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        bus = Bus(ProgressBar(), LoggerHook(interval=1, writers=[ConsoleWriter()]))
        bus.on("after_train_iter", lambda event: get_logger().info("told", by="hook"))
        make_loop(bus=bus, step=conftest.loss_of, train_data=DATA * 10).run()
        out.close()
        err.close()
        lines = pipe.read().splitlines()
    assert len(lines) == 200
    assert all(re.fullmatch(r"epoch [12]/2 .*|\d{4}-\S+ \S+ \[info +\] told +by=hook", line) for line in lines)


def test_redirected_output_is_not_captured_by_the_bar(terminal, screen, capsys):
    bus = Bus(ProgressBar(terminal))
    bus.on("after_train_iter", lambda event: sys.stdout.write("printed\n"), once=9)
    bus.on("after_train_iter", lambda event: sys.stderr.write("told\n"), once=9)
    make_loop(bus=bus).run()
    assert capsys.readouterr() == ("printed\n", "told\n")
    assert "printed" not in screen.getvalue()
    assert "told" not in screen.getvalue()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_as_it_was_after_an_exception(terminal, screen, error):
    bus = Bus(ProgressBar(terminal))
    out = sys.stdout

    bus.on("after_train_iter", fails(error("stop")), once=8, priority=90)
    with pytest.raises(error, match="stop"):
        make_loop(bus=bus).run()
    assert_restored(screen)
    assert sys.stdout is out


def test_a_terminal_that_goes_away_does_not_end_the_run(terminal, screen, capsys):
    bus = Bus(ProgressBar(terminal))
    bus.on("after_train_iter", lambda event: screen.close(), once=7)
    loop = make_loop(bus=bus)
    loop.run()
    assert loop.counters.iter == 10


def test_another_run_gets_another_bar(terminal, screen):
    loop = make_loop(ProgressBar(terminal), test_data=DATA, max_epochs=1)
    loop.run()
    loop.test()
    assert screen.getvalue().count(HIDE) == 2
    assert "test" in screen.getvalue()
    assert_restored(screen)


def test_nothing_is_drawn_without_a_terminal(screen):
    make_loop(ProgressBar(Console(file=screen))).run()
    assert screen.getvalue() == ""


def test_the_step_hands_over_only_now_and_then(terminal):
    bus = Bus(ProgressBar(terminal))
    make_loop(bus=bus, step=conftest.loss_of, train_data=DATA * 40).run()
    moved = next(one.stats for one in bus.subscriptions if one.mount_point == "bar_moved")
    assert 0 < moved.published < 100
    assert moved.delivered == moved.published
