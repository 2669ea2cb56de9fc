"""Retrying: which calls a failing writer gets again, and which are dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from hooks import Writer
from hooks.writers import RunFacts, Where
from hooks.writers.target import MOST_IMAGES, MOST_KEPT, Target

WHERE = Where("train", epoch=1, iter=1)
IMAGE = np.zeros((1, 1, 1), np.uint8)


class Recorder(Writer):
    """Records its calls; those in ``fails`` raise."""

    def __init__(self):
        self.calls: list[Any] = []
        self.fails: set[Any] = set()

    def record(self, call):
        self.calls.append(call)
        if call in self.fails:
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


@pytest.fixture
def writer():
    return Recorder()


@pytest.fixture
def target(writer):
    target = Target(writer, 1, RunFacts("digits"))
    writer.calls.clear()
    return target


def give(target, *steps):
    for step in steps:
        target.give("write_scalars", {"train/loss": 0.5}, step, WHERE)


def lost(target):
    """Close the target, and return the number of lost calls that it logs."""
    with capture_logs() as logs:
        target.close(finished=True)
    return sum(entry["lost"] for entry in logs if entry["event"] == "a writer has lost data")


def test_a_failed_call_is_repeated_without_reopening(writer, target, logs):
    writer.fails = {2}
    give(target, 1, 2, 3)
    writer.fails.clear()
    target.flush(durable=True)
    assert writer.calls == [1, 2, 2, 3, "flush"]
    assert lost(target) == 0


def test_a_text_that_the_writer_does_not_take_is_no_sign_that_it_works(writer, target, logs):
    writer.fails = {1}
    give(target, 1)
    target.give("write_text", "experiment", "digits", WHERE)
    target.flush(durable=True)
    writer.fails.clear()
    target.flush(durable=True)
    assert writer.calls[-2:] == [1, "flush"]
    assert lost(target) == 0


def test_a_second_failure_reopens_the_writer_and_repeats_calls_since_the_last_flush(writer, target, logs):
    give(target, 1)
    target.flush()
    writer.fails = {3}
    give(target, 2, 3)
    target.flush(durable=True)
    writer.fails.clear()
    target.flush(durable=True)
    assert writer.calls == [1, "flush", 2, 3, 3, "close", "open", 2, 3, "flush"]


def test_the_configuration_that_a_reopened_writer_gets_again_is_no_lost_call(writer, target, monkeypatch, logs):
    monkeypatch.setattr("hooks.writers.target.MOST_KEPT", 3)
    writer.fails = {1, 2, 3, 4, 5}
    give(target, 1, 2)
    for _ in range(2):
        target.flush(durable=True)
    give(target, 3, 4, 5)
    assert lost(target) == 5


def test_a_failed_flush_reopens_the_writer_and_repeats_calls(writer, target, logs):
    give(target, 1)
    writer.fails = {"flush"}
    target.flush()
    writer.fails.clear()
    target.flush(durable=True)
    assert writer.calls == [1, "flush", "close", "open", 1, "flush"]
    assert lost(target) == 0


def test_a_call_that_fails_before_one_that_succeeds_is_dropped_and_counted(writer, target, logs):
    writer.fails = {2, 4}
    give(target, 1, 2, 3, 4, 5)
    target.flush(durable=True)
    assert writer.calls == [1, 2, 2, 3, 4, 5, "flush"]
    assert lost(target) == 2


def test_a_failing_writer_keeps_a_bounded_number_of_images(writer, target, logs):
    writer.fails = {1}
    give(target, 1)
    for _ in range(MOST_IMAGES + 3):
        target.give("write_image", "train/noise", IMAGE, 1)
    writer.fails.clear()
    target.flush(durable=True)
    assert writer.calls.count("image") == MOST_IMAGES
    assert lost(target) == 3


def test_a_writer_that_cannot_be_opened_is_not_closed(writer, logs):
    writer.fails = {"open"}
    target = Target(writer, 1, RunFacts("digits"))
    give(target, 1)
    target.close(finished=True)
    assert set(writer.calls) == {"open"}


class RowRecorder(Recorder):
    """Takes many rows at once; a batch with a step of ``fails`` raises before it is recorded."""

    def write_rows(self, rows):
        steps = [step for _, step, _ in rows]
        self.record(steps)
        if self.fails.intersection(steps):
            raise OSError("no space left on device")

    def record(self, call):
        self.calls.append(call)
        if not isinstance(call, list) and call in self.fails:
            raise OSError("no space left on device")


@pytest.fixture
def row_target():
    return Target(RowRecorder(), 1, RunFacts("digits"))


def give_rows(target, *steps):
    """Give one batch, and return the calls that the writer has had since it was opened."""
    target.give_rows([({"train/loss": 0.5}, step, WHERE) for step in steps])
    return calls(target)


def calls(target):
    recorded: list[Any] = target._writer.calls  # type: ignore[attr-defined]
    return recorded[recorded.index("flush") + 1 :]


class Doubles(RowRecorder):
    """Overrides write_scalars alone."""

    def write_scalars(self, scalars, step, where):
        super().write_scalars(scalars, 2 * step, where)


@pytest.mark.parametrize(("kind", "written"), [(RowRecorder, [[1, 2], [3]]), (Recorder, [1, 2, 3]), (Doubles, [2, 4, 6])])
def test_a_batch_comes_by_one_call_of_write_rows_or_row_by_row_to_write_scalars(kind, written):
    target = Target(kind(), 1, RunFacts("digits"))
    give_rows(target, 1, 2)
    assert give_rows(target, 3) == written


def test_write_rows_calls_write_scalars_by_default(writer):
    writer.write_rows([({"train/loss": 0.5}, 1, WHERE), ({"train/loss": 0.5}, 2, WHERE)])
    assert writer.calls == [1, 2]


def test_a_bad_row_of_a_batch_costs_one_row(row_target, logs):
    row_target._writer.fails = {2}  # type: ignore[attr-defined]
    give_rows(row_target, 1, 2, 3)
    row_target.flush(durable=True)
    assert calls(row_target) == [[1, 2, 3], 1, 2, 3, "flush"]
    assert lost(row_target) == 1
    assert give_rows(row_target, 4)[-1] == [4]


def test_a_failed_flush_repeats_the_rows_of_batches(row_target, logs):
    give_rows(row_target, 1, 2)
    row_target._writer.fails = {"flush"}  # type: ignore[attr-defined]
    row_target.flush()
    give_rows(row_target, 3)
    row_target._writer.fails = set()  # type: ignore[attr-defined]
    row_target.flush(durable=True)
    assert calls(row_target) == [[1, 2], "flush", "close", "open", 1, 2, 3, "flush"]
    assert lost(row_target) == 0


def test_a_failing_writer_keeps_a_bounded_number_of_rows(row_target, logs):
    row_target._writer.fails = {"flush", 0}  # type: ignore[attr-defined]
    give_rows(row_target, 0, 1)
    give_rows(row_target, *range(2, MOST_KEPT + 5))
    row_target._writer.fails = set()  # type: ignore[attr-defined]
    row_target.flush(durable=True)
    assert calls(row_target)[1:-1] == list(range(5, MOST_KEPT + 5))
    assert lost(row_target) == 5
