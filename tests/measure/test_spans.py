import os
import threading

import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.measure import spans
from trainbus.eventloop.measure.spans import BEGIN, END, NAME, NUMBER, THREAD, Recorder

from ..waiting import meanwhile, on_threads, until

EVENT = AfterTrainIter(progress=Progress())


class Seen:
    """A reader that keeps all spans."""

    def __init__(self, recorder: Recorder) -> None:
        self.rows: list[list[int]] = []
        recorder.add_reader(self)

    def __call__(self, spans) -> None:
        self.rows += spans.tolist()


def test_a_span_has_name_thread_begin_and_end_until_its_reader_is_removed():
    recorder = Recorder()
    assert recorder.id_of("one") == recorder.id_of("one") != recorder.id_of("other")
    seen = Seen(recorder)
    for _ in range(2):
        with recorder.span("work"):
            pass
        recorder.drain()
        recorder.remove_reader(seen)
    [row] = seen.rows
    assert recorder.names[row[NAME]] == "work"
    assert row[THREAD] == threading.get_ident()
    assert row[BEGIN] <= row[END]


def test_a_full_ring_keeps_the_newest_spans_and_counts_the_others():
    recorder = Recorder(capacity=100)
    seen = Seen(recorder)
    for begin in range(250):
        recorder.add(recorder.id_of("work"), begin, begin + 1)
    recorder.drain()
    assert [row[BEGIN] for row in seen.rows] == [*range(150, 250)]
    assert recorder.dropped == 150


def test_no_span_of_many_threads_is_lost_or_read_twice():
    recorder = Recorder()
    seen = Seen(recorder)
    recorder.start()

    def record(_: int) -> None:
        for begin in range(3000):
            recorder.add(recorder.id_of("work"), begin, begin + 1)

    with meanwhile(recorder.drain):
        on_threads(record, *range(4))
    recorder.stop()
    assert sorted(row[NUMBER] for row in seen.rows) == [*range(12_000)]
    assert recorder.dropped == 0


@pytest.mark.usefixtures("no_thread_is_left")
def test_the_thread_survives_an_error_of_a_reader_and_logs_it_once(change):
    change(spans.PERIOD, 0.0)  # seconds between two looks
    recorder = Recorder()
    calls = []

    def broken(rows) -> None:
        calls.append(rows)
        raise ValueError("mine")

    recorder.add_reader(broken)
    seen = Seen(recorder)
    with capture_logs() as logs:
        recorder.start()
        for number in range(2):
            recorder.add(recorder.id_of("work"), number, number + 1)
            until(lambda number=number: len(seen.rows) > number)
        recorder.stop()
    assert len(calls) == 2
    assert len(logs) == 1
    assert logs[0].get("id") == "span-reader-failed"


@pytest.mark.usefixtures("no_thread_is_left")
def test_stopping_joins_the_thread_and_reads_what_is_left():
    recorder = Recorder()
    seen = Seen(recorder)
    recorder.start()
    recorder.start()  # once
    recorder.add(recorder.id_of("work"), 1, 2)
    recorder.stop()
    recorder.stop()
    assert len(seen.rows) == 1


@pytest.mark.usefixtures("no_thread_is_left")
def test_closing_a_bus_ends_its_recorder():
    bus = Bus(timing=True)
    with bus:
        bus.publish(EVENT)
        assert "trainbus spans" in [thread.name for thread in threading.enumerate()]
    with bus:
        bus.timing = False
        bus.timing = True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_read_the_costs_of_its_copy():
    bus = Bus(timing=True)
    subscription = bus.on("after_train_iter", lambda event: None)
    with bus:
        bus.publish(EVENT)
        bus._recorder._reading.acquire()  # as the recorder's thread may hold it
        try:
            child = os.fork()
            if child == 0:
                bus.publish(EVENT)
                os._exit(subscription.stats.calls)
        finally:
            bus._recorder._reading.release()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert subscription.stats.calls == 1
