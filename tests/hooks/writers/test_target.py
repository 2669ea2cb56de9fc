"""Retrying: which calls a failing writer gets again, and which are dropped."""

from typing import Any

import numpy as np
import pytest

from trainbus.hooks import Writer
from trainbus.hooks.writers import RunFacts, Where
from trainbus.hooks.writers.target import MOST_KEPT, MOST_LARGE, Target

WHERE = Where("train", epoch=1, iter=1)
IMAGE = np.zeros((1, 1, 1), np.uint8)


class Recorder(Writer):
    """Records its calls; those in ``fails`` raise."""

    def __init__(self):
        self.calls: list[Any] = []
        self.fails: set[Any] = set()

    def record(self, call):
        self.calls.append(call)
        if not isinstance(call, list) and call in self.fails:
            raise OSError("no space left on device")

    def open(self, run):
        self.record("open")

    def write_scalars(self, scalars, step, where):
        self.record(step)

    def write_image(self, name, image, step):
        self.record("image")

    def flush(self):
        self.record("flush")

    def close(self):
        self.record("close")


class RowRecorder(Recorder):
    """Takes many rows at once; a batch with a step of ``fails`` raises."""

    def write_rows(self, rows):
        steps = [step for _, step, _ in rows]
        self.record(steps)
        if self.fails.intersection(steps):
            raise OSError("no space left on device")


class Doubles(RowRecorder):
    """Overrides write_scalars alone."""

    def write_scalars(self, scalars, step, where):
        super().write_scalars(scalars, 2 * step, where)


@pytest.fixture
def writer():
    return Recorder()


def opened(writer):
    target = Target(writer, 1, RunFacts("digits"))
    writer.calls.clear()
    return target


def play(target, writer, *acts):
    """Give a number as the step of a row, a list as a batch of rows; a set is what fails from then on; or flush."""
    for act in acts:
        if isinstance(act, int):
            target.give("write_scalars", {"train/loss": 0.5}, act, WHERE)
        elif isinstance(act, list):
            target.give_rows([({"train/loss": 0.5}, step, WHERE) for step in act])
        elif isinstance(act, set):
            writer.fails = act
        else:
            target.flush(durable=act == "sync")


def lost(target, logs):
    """Close the target, and return the number of lost calls that it logs."""
    target.close(finished=True)
    return sum(entry["lost"] for entry in logs if entry.get("id") == "writer-lost-data")


RETRIES = {
    "a failed call is repeated without reopening": (Recorder, [{2}, 1, 2, 3, set(), "sync"], [1, 2, 2, 3, "flush"], 0),
    "a second failure reopens the writer and repeats calls since the last flush": (
        *(Recorder, [1, "flush", {3}, 2, 3, "sync", set(), "sync"]),
        *([1, "flush", 2, 3, 3, "close", "open", 2, 3, "flush"], 0),
    ),
    "a failed flush reopens the writer and repeats calls": (
        *(Recorder, [1, {"flush"}, "flush", set(), "sync"]),
        *([1, "flush", "close", "open", 1, "flush"], 0),
    ),
    "a call that fails before one that succeeds is dropped and counted": (
        *(Recorder, [{2, 4}, 1, 2, 3, 4, 5, "sync"]),
        *([1, 2, 2, 3, 4, 5, "flush"], 2),
    ),
    "a writer with write_rows gets a batch by one call": (RowRecorder, [[1, 2], [3]], [[1, 2], [3]], 0),
    "a writer without write_rows gets single rows": (Recorder, [[1, 2], [3]], [1, 2, 3], 0),
    "a subclass that overrides write_scalars alone gets every row": (Doubles, [[1, 2], [3]], [2, 4, 6], 0),
    "a bad row of a batch costs one row": (
        *(RowRecorder, [{2}, [1, 2, 3], "sync", [4]]),
        *([[1, 2, 3], 1, 2, 3, "flush", [4]], 1),
    ),
    "a failed flush repeats the rows of batches": (
        *(RowRecorder, [[1, 2], {"flush"}, "flush", [3], set(), "sync"]),
        *([[1, 2], "flush", "close", "open", 1, 2, 3, "flush"], 0),
    ),
}


@pytest.mark.parametrize(("kind", "acts", "calls", "dropped"), RETRIES.values(), ids=RETRIES)
def test_calls_of_a_writer_that_fails(kind, acts, calls, dropped, logs):
    writer = kind()
    target = opened(writer)
    play(target, writer, *acts)
    assert writer.calls == calls
    assert lost(target, logs) == dropped


def test_a_text_that_the_writer_does_not_take_is_no_sign_that_it_works(writer, logs):
    target = opened(writer)
    play(target, writer, {1}, 1)
    target.give("write_text", "experiment", "digits", WHERE)
    play(target, writer, "sync", set(), "sync")
    assert writer.calls[-2:] == [1, "flush"]
    assert lost(target, logs) == 0


def test_the_configuration_that_a_reopened_writer_gets_again_is_no_lost_call(writer, change, logs):
    change(MOST_KEPT, 3)
    target = opened(writer)
    play(target, writer, {1, 2, 3, 4, 5}, 1, 2, "sync", "sync", 3, 4, 5)
    assert lost(target, logs) == 5


def test_a_failing_writer_keeps_a_bounded_number_of_images(writer, logs):
    target = opened(writer)
    play(target, writer, {1}, 1)
    for _ in range(MOST_LARGE + 3):
        target.give("write_reported", "train/noise", IMAGE, 1, WHERE)
    play(target, writer, set(), "sync")
    assert writer.calls.count("image") == MOST_LARGE
    assert lost(target, logs) == 3


def test_a_failing_writer_keeps_a_bounded_number_of_rows(logs):
    target = opened(writer := RowRecorder())
    play(target, writer, {"flush", 0}, [0, 1], [*range(2, MOST_KEPT.value + 5)], set(), "sync")
    assert writer.calls == [[0, 1], *range(5, MOST_KEPT.value + 5), "flush"]
    assert lost(target, logs) == 5


def test_a_writer_that_cannot_be_opened_is_not_closed(writer, logs):
    writer.fails = {"open"}
    target = Target(writer, 1, RunFacts("digits"))
    play(target, writer, 1)
    target.close(finished=True)
    assert set(writer.calls) == {"open"}


def test_write_rows_calls_write_scalars_by_default(writer):
    writer.write_rows([({"train/loss": 0.5}, 1, WHERE), ({"train/loss": 0.5}, 2, WHERE)])
    assert writer.calls == [1, 2]
