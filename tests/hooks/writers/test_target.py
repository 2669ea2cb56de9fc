"""Retrying: which calls a failing writer gets again, and which are dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from hooks.writers import RunFacts, Where, Writer
from hooks.writers.target import MOST_IMAGES, Target

WHERE = Where("train", epoch=1, iter=1)
IMAGE = np.zeros((1, 1, 1), np.uint8)


class Recorder(Writer):
    """Records its calls; those in ``fails`` raise."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails: set[Any] = set()

    def record(self, call: Any) -> None:
        self.calls.append(call)
        if call in self.fails:
            raise OSError("no space left on device")

    def open(self, run: RunFacts) -> None:
        self.record("open")

    def write_scalars(self, scalars: Any, step: int, where: Where) -> None:
        self.record(step)

    def write_image(self, name: str, image: Any, step: int) -> None:
        self.record("image")

    def flush(self) -> None:
        self.record("flush")

    def close(self) -> None:
        self.record("close")


@pytest.fixture
def writer() -> Recorder:
    return Recorder()


@pytest.fixture
def target(writer: Recorder) -> Target:
    target = Target(writer, 1, RunFacts("digits"))
    writer.calls.clear()
    return target


def give(target: Target, *steps: int) -> None:
    for step in steps:
        target.give("write_scalars", {"train/loss": 0.5}, step, WHERE)


def lost(target: Target) -> int:
    """Close the target, and return the number of lost calls that it logs."""
    with capture_logs() as logs:
        target.close(finished=True)
    return sum(entry["lost"] for entry in logs if entry["event"] == "a writer has lost data")


def test_a_failed_call_is_repeated_without_reopening(writer: Recorder, target: Target) -> None:
    writer.fails = {2}
    with capture_logs():
        give(target, 1, 2, 3)
        writer.fails.clear()
        target.flush(durable=True)
    assert writer.calls == [1, 2, 2, 3, "flush"]
    assert lost(target) == 0


def test_a_second_failure_reopens_the_writer_and_repeats_calls_since_the_last_flush(writer: Recorder, target: Target) -> None:
    give(target, 1)
    target.flush()
    writer.fails = {3}
    with capture_logs():
        give(target, 2, 3)
        target.flush(durable=True)
        writer.fails.clear()
        target.flush(durable=True)
    assert writer.calls == [1, "flush", 2, 3, 3, "close", "open", 2, 3, "flush"]


def test_a_failed_flush_reopens_the_writer_and_repeats_calls(writer: Recorder, target: Target) -> None:
    give(target, 1)
    writer.fails = {"flush"}
    with capture_logs():
        target.flush()
        writer.fails.clear()
        target.flush(durable=True)
    assert writer.calls == [1, "flush", "close", "open", 1, "flush"]
    assert lost(target) == 0


def test_a_call_that_fails_before_one_that_succeeds_is_dropped_and_counted(writer: Recorder, target: Target) -> None:
    writer.fails = {2, 4}
    with capture_logs():
        give(target, 1, 2, 3, 4, 5)
        target.flush(durable=True)
    assert writer.calls == [1, 2, 2, 3, 4, 5, "flush"]
    assert lost(target) == 2


def test_a_failing_writer_keeps_a_bounded_number_of_images(writer: Recorder, target: Target) -> None:
    writer.fails = {1}
    with capture_logs():
        give(target, 1)
        for _ in range(MOST_IMAGES + 3):
            target.give("write_image", "train/noise", IMAGE, 1)
        writer.fails.clear()
        target.flush(durable=True)
    assert writer.calls.count("image") == MOST_IMAGES
    assert lost(target) == 3


def test_a_writer_that_cannot_be_opened_is_not_closed(writer: Recorder) -> None:
    writer.fails = {"open"}
    with capture_logs():
        target = Target(writer, 1, RunFacts("digits"))
        give(target, 1)
        target.close(finished=True)
    assert set(writer.calls) == {"open"}
