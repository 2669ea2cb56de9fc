import asyncio
import gc
import sys
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, BusStateError, Event, LaneFullError, OffloadError, Progress
from trainbus.eventloop.errors import LaneClosedError
from trainbus.eventloop.events import AfterRun, AfterTrainIter, BeforeRun
from trainbus.eventloop.offload import DrainReport, lane
from trainbus.eventloop.offload.lane import Lane

from ..conftest import UVLOOP
from ..failing import fails
from ..handlers import held, iteration, offload, publish_all
from ..waiting import meanwhile, on_threads, until

P = Progress()
EVENT = AfterTrainIter(progress=P)
KINDS = ["async", "thread"]

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class Mark(Event):
    """Its fields are all plain: it goes into a lane as it is, by a shorter way."""

    number: int


EVERYWHERE = pytest.mark.parametrize(
    "where", ["thread", "asyncio", pytest.param("uvloop", marks=UVLOOP), "trio"], indirect=True
)
"""With uvloop, too: what depends on how a loop wakes up."""


@pytest.fixture(params=["thread", "asyncio", "trio"])
def where(request, monkeypatch) -> str:
    """Where the handlers of a test run: on threads, or in one of the event loops."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    return request.param


@pytest.fixture
def kind(where) -> str:
    return "thread" if where == "thread" else "async"


@pytest.fixture
def library(where) -> str:
    return "trio" if where == "trio" else "asyncio"


@pytest.fixture
def bus(library) -> Bus:
    return Bus(backend=library)


# ---------------------------------------------------------------------------------------------------------- delivery


@EVERYWHERE
def test_a_clean_exit_delivers_everything_in_order_off_the_publishers_thread(bus, kind):
    heard, threads = [], set()
    subscription = offload(bus, lambda event: (heard.append(event.batch_idx), threads.add(threading.current_thread())), kind)
    with bus:
        assert bus.state == "open"
        publish_all(bus, range(500))
    assert heard == list(range(500))
    assert bus.state == "idle"
    stats = subscription.stats
    assert (stats.published, stats.delivered, stats.pending) == (500, 500, 0)
    [thread] = threads
    assert thread.daemon
    assert thread is not threading.current_thread()


def test_two_lanes_that_publish_to_each_other_while_the_bus_closes_settle(backend):
    bus = Bus(backend=backend)
    heard = []

    def ping(event):
        heard.append("ping")
        if len(heard) < 40:
            bus.publish(BeforeRun(progress=P))

    def pong(event):
        heard.append("pong")
        bus.publish(AfterRun(progress=P))

    offload(bus, pong, "thread", event="before_run")
    offload(bus, ping, "async", event="after_run")
    with bus:
        bus.publish(AfterRun(progress=P))
    assert heard == ["ping", "pong"] * 20 + ["ping"]


def test_a_slow_lane_does_not_delay_another(bus, kind):
    _, _, started, release = held(bus, kind)
    heard = threading.Event()
    offload(bus, lambda event: heard.set(), kind)
    with bus:
        bus.publish(EVENT)
        started.wait()
        assert heard.wait(10)
        release.set()


def test_a_handler_that_never_waits_does_not_starve_the_other_lanes(backend):
    bus, stop, heard = Bus(backend=backend), threading.Event(), threading.Event()
    offload(bus, lambda event: stop.is_set() or bus.publish(event), "async", event="before_run")
    offload(bus, lambda event: heard.set(), "async", event="after_run")
    with bus:
        bus.publish(BeforeRun(progress=P))
        bus.publish(AfterRun(progress=P))
        assert heard.wait(10)
        stop.set()


def test_priority_determines_the_snapshot_of_an_offloaded_handler(bus, kind):
    weight = torch.zeros(1)
    seen = {}
    for name, priority in (("before", 20), ("after", 60)):
        options = {"priority": priority, "capture": lambda event: event.run}
        offload(bus, lambda value, name=name: seen.setdefault(name, value.item()), kind, **options)
    bus.on("after_train_iter", lambda event: event.run.add_(1), priority=50)
    with bus:
        bus.publish(AfterTrainIter(run=weight, progress=P))
        weight.fill_(7)
    assert seen == {"before": 0.0, "after": 1.0}


def test_batched_handlers_get_lists_up_to_the_batch_size(bus, kind):
    subscription, batches, _, release = held(bus, kind, number=lambda events: [event.batch_idx for event in events], batch=8)
    with bus:
        publish_all(bus, range(50))
        release.set()
    assert [i for batch in batches for i in batch] == list(range(50))
    assert max(map(len, batches)) == 8
    assert subscription.stats.delivered == 50


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [None, 16])
def test_plain_events_arrive_as_the_objects_they_were_in_order(kind, batch):
    bus, seen = Bus(), []
    subscription = offload(bus, seen.extend if batch else seen.append, kind, event=Mark, queue=7, batch=batch)
    marks = [Mark(number=i) for i in range(500)]
    with bus:
        publish_all(bus, range(500), marks.__getitem__)
    assert all(got is sent for got, sent in zip(seen, marks, strict=True))
    assert subscription.stats.delivered == 500


# ------------------------------------------------------------------------------------------------------- cancelling


@pytest.mark.timeout(60)
def test_an_event_at_the_end_of_a_cancelled_consumer_is_delivered_once(monkeypatch, backend):
    bus = Bus(backend=backend)
    heard = []
    at_its_end = threading.Event()
    real = Lane.finished

    def finished(lane):
        is_finished = real(lane)
        if is_finished and not at_its_end.is_set():
            at_its_end.set()
            until(lambda: lane.stats.pending)
        return is_finished

    monkeypatch.setattr(Lane, "finished", finished)
    with bus:
        subscription = offload(bus, lambda event: heard.append(event.batch_idx), "async")
        bus.on("after_train_iter", lambda event: (subscription.cancel(), at_its_end.wait()), priority=1)
        bus.publish(iteration(0))
        assert bus.drain(timeout=10) == DrainReport(delivered=1)
    assert heard == [0]


def test_an_event_in_progress_to_a_cancelled_handler_is_delivered_at_close(bus, kind):
    heard = []
    for _ in range(30):
        subscription = offload(bus, lambda event: heard.append(event.batch_idx), kind)
        canceller = bus.on("after_train_iter", lambda event, mine=subscription: (mine.cancel(), bus.drain()), priority=1)
        with bus:
            bus.publish(iteration(0))
            canceller.cancel()
        assert subscription.stats.pending == 0
    assert len(heard) == 30


def test_cancelled_lanes_leave_no_thread_and_report_once():
    before, bus = set(threading.enumerate()), Bus()
    with bus:
        for _ in range(30):
            with bus.on("after_train_iter", lambda event: None, offload="thread"):
                bus.publish(EVENT)
        assert bus.drain().delivered == 30
        until(lambda: not any(one.name.startswith("trainbus") for one in set(threading.enumerate()) - before))
        assert bus.drain().delivered == 30
        assert not bus._runtime._consumers


@pytest.mark.long
def test_a_drain_counts_every_event_once_while_handlers_come_and_go(bus, kind):
    subscriptions = []
    with bus:
        with meanwhile(lambda: bus.publish(EVENT)), meanwhile(lambda: bus.publish(EVENT)):
            for number in range(30):
                with offload(bus, lambda event: None, kind, full="drop_old", linger=0) as subscription:
                    time.sleep(0.001 * (number % 2))
                subscriptions.append(subscription)
        report = bus.drain(timeout=20)
        assert report.pending == 0
        assert report.delivered == sum(subscription.stats.delivered for subscription in subscriptions)
        assert report.dropped == sum(subscription.stats.dropped for subscription in subscriptions)


# ---------------------------------------------------------------------------------------------------------- policies


FULL_WITH_ONE = pytest.mark.parametrize(
    "options", [{"queue": 1}, {"capture": lambda event: torch.zeros(2), "max_bytes": 8}], ids=["places", "bytes"]
)


@FULL_WITH_ONE
def test_a_hanging_handler_that_blocks_its_publisher_is_named_once(change, options):
    change(lane.PATIENCE, 0.002)
    change(lane.POLL, 0.001)
    bus, release = Bus(), threading.Event()

    @bus.on("after_train_iter", offload="thread", **options)
    def hangs(what):
        release.wait()

    def named():
        return [line["handler"] for line in logs if line.get("id") == "publisher-waits"]

    publisher = threading.Thread(target=publish_all, args=(bus, range(4)))
    with capture_logs() as logs, bus:
        publisher.start()
        until(named)
        time.sleep(0.02)
        release.set()
        publisher.join()
    assert named() == ["hangs (after_train_iter)"]


@FULL_WITH_ONE
def test_publishing_to_a_full_blocking_lane_from_a_bus_thread_is_an_error(bus, kind, options):
    failures, release = [], threading.Event()

    def greedy(event):
        try:
            publish_all(bus, range(5), lambda _: AfterRun(progress=P))
        except LaneFullError as error:
            failures.append(str(error))
        release.set()

    offload(bus, lambda event: release.wait(), "thread", event="after_run", **options)
    offload(bus, greedy, kind, event="before_run")
    with bus:
        bus.publish(BeforeRun(progress=P))
        until(lambda: failures)
    assert ("max_bytes=8" if "max_bytes" in options else "queue=") in failures[0]


# --------------------------------------------------------------------------------------------------------- lifecycle


@EVERYWHERE
def test_a_bus_can_be_closed_and_opened_again_and_is_for_inline_handlers_meanwhile(bus, kind):
    heard, inline = [], []
    offload(bus, lambda event: heard.append(event.batch_idx), kind)
    bus.on("after_run", inline.append)
    for i in range(3):
        bus.close()
        bus.publish(AfterRun(progress=P))
        with bus:
            bus.publish(iteration(i))
            assert bus.drain() == DrainReport(delivered=1)
            bus.close()
            bus.close()
            with pytest.raises(LaneClosedError):
                bus.publish(EVENT)
    assert heard == [0, 1, 2]
    assert len(inline) == 3


@EVERYWHERE
def test_threads_that_close_a_bus_wait_for_delivery_but_at_most_for_their_own_deadline(bus, kind):
    _, heard, started, release = held(bus, kind)
    with bus:
        publish_all(bus, range(3))
        started.wait()
        other = threading.Thread(target=bus.close)
        other.start()
        until(lambda: bus.state == "draining")
        bus.abort_timeout = 0.02
        bus.close(abort=True)
        assert bus.state == "draining"
        threading.Timer(0.05, release.set).start()
    assert heard == [0, 1, 2]
    assert bus.state == "idle"
    other.join()


def test_a_bus_whose_loop_does_not_start_remains_idle_and_usable(monkeypatch, backend):
    bus = Bus(backend=backend)
    heard = []
    offload(bus, lambda event: heard.append(1), "thread")
    offload(bus, lambda event: heard.append(2), "async")
    with monkeypatch.context() as patched:
        patched.setattr("anyio.run", fails(LookupError("No such backend: trio")))
        with pytest.raises(BusStateError, match="backend"):
            bus.open()
    assert bus.state == "idle"
    with bus:
        bus.publish(EVENT)
    assert sorted(heard) == [1, 2]


def test_drain_returns_after_its_timeout_with_pending_events(bus, kind):
    _, _, started, release = held(bus, kind)
    with bus:
        bus.publish(iteration(0))
        started.wait()
        bus.publish(iteration(1))
        assert bus.drain(timeout=0.01).pending == 2
        release.set()
        assert bus.drain().pending == 0


@pytest.mark.parametrize("options", [{}, {"timeout": 30}], ids=["plain", "timeout"])
@pytest.mark.parametrize("call", ["drain", "close"])
def test_waiting_for_the_bus_in_one_of_its_handlers_is_an_error(bus, kind, call, options):
    def handler(event):
        with pytest.raises(BusStateError, match=rf"bus\.{call}\(\)"):
            getattr(bus, call)()

    subscription = offload(bus, handler, kind, **options)
    with bus:
        bus.publish(EVENT)
    assert subscription.stats.delivered == 1


def test_an_exit_that_cannot_deliver_in_time_names_the_handlers_and_abandons_their_events(kind, library):
    bus = Bus(backend=library, drain_timeout=0.02)
    subscription, heard, started, release = held(bus, kind)
    with capture_logs(), pytest.raises(OffloadError, match=r"0.02 s: 3 for (handler|task) \(after_train_iter\)"), bus:
        publish_all(bus, range(3))
        started.wait()
        if kind == "thread":
            threading.Timer(0.1, release.set).start()
    release.set()
    stats = subscription.stats
    assert stats.published == 3
    assert stats.dropped >= 2
    assert bus.state == "idle"
    with bus:
        bus.publish(iteration(7))
    assert heard == [0, 7]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_events_left_at_an_error_or_by_a_handler_with_on_error_log_are_only_logged(kind, library, error):
    bus = Bus(backend=library, drain_timeout=0.02, abort_timeout=0.02)
    _, _, started, release = held(bus, kind, on_error="raise" if error else "log")
    with capture_logs() as logs, pytest.raises(error) if error else nullcontext(), bus:
        publish_all(bus, range(3))
        started.wait()
        threading.Timer(0.1, release.set).start()
        if error:
            raise error
    release.set()
    left = [line for line in logs if line["event"] == "events were not delivered before the bus closed"]
    assert [list(line["events"].values()) for line in left] == [[3]]
    assert left[0]["log_level"] == ("warning" if error else "error")
    assert bus.state == "idle"


# ------------------------------------------------------------------------------------------------------------ errors


def wait_for_failure(subscription) -> None:
    until(lambda: subscription.stats.failed)


def test_an_entry_that_an_offloaded_handler_does_not_get_is_answered_with_capture(bus, kind):
    def look(event):
        return event.outputs["logits"]

    subscription = offload(bus, look, kind)
    with capture_logs(), bus:
        bus.publish(AfterTrainIter(progress=P, batch_idx=0, outputs={"loss": torch.tensor(1.0), "logits": torch.zeros(3)}))
        wait_for_failure(subscription)
        with pytest.raises(KeyError) as caught:
            bus.publish(BeforeRun(progress=P))
    assert "event.outputs" in caught.value.__notes__[1]
    assert "capture=lambda event: event.outputs['logits']" in caught.value.__notes__[1]


@pytest.mark.parametrize(
    "options",
    [{}, {"capture": lambda event: torch.zeros(1)}, {"batch": 8}, {"timeout": 10}],
    ids=str.split("event capture batch timeout"),
)
def test_the_first_note_is_about_the_handler_and_its_event_wherever_the_error_is_raised(bus, kind, options):
    subscription = offload(bus, fails(ValueError), kind, **options)

    @bus.on("after_run", priority=30)
    def update(event):
        bus.publish(iteration(36))
        wait_for_failure(subscription)
        bus.publish(BeforeRun(progress=P))

    with capture_logs() as logs, bus, pytest.raises(ValueError) as caught:
        bus.publish(AfterRun(progress=Progress(iter=48)))
    first, second = caught.value.__notes__
    start = f"in the offloaded ({subscription.mode}) handler {subscription.label} of after_train_iter, epoch 1, iteration 37"
    assert first.startswith(start)
    assert second.startswith("raised later, in update (inline, priority 30")
    assert logs[0]["exc_info"].__notes__[0] == first


def test_the_note_of_a_batch_names_its_first_and_its_last_event(bus, kind):
    started, release = threading.Event(), threading.Event()

    def broken(events):
        if len(events) > 1:
            raise ValueError
        started.set()
        release.wait()

    offload(bus, broken, kind, batch=8)
    with capture_logs(), pytest.raises(ValueError) as caught, bus:
        bus.publish(iteration(0))
        started.wait()
        publish_all(bus, (3, 4, 5))
        release.set()
    assert "after_train_iter, epoch 1, iteration 4 to after_train_iter, epoch 1, iteration 6" in caught.value.__notes__[0]


@pytest.mark.parametrize("drains", [True, False])
def test_drain_and_close_raise_the_first_error(bus, kind, drains):
    def broken(event):
        raise ValueError(f"event {event.batch_idx}")

    subscription = offload(bus, broken, kind)
    with capture_logs(), pytest.raises(ValueError, match="event 0"), bus:
        for i in range(5):
            subscription.lane.put(iteration(i))  # past bus.publish, which would raise the error itself
        if drains:
            bus.drain()


def test_the_error_of_a_closed_session_is_not_raised_in_the_next(bus, kind):
    offload(bus, fails(ValueError), kind)
    with capture_logs(), pytest.raises(ZeroDivisionError), bus:
        bus.publish(EVENT)
        raise ZeroDivisionError
    with bus:
        bus.publish(BeforeRun(progress=P))


def test_an_event_that_cannot_be_detached_is_a_failure_of_its_handler_which_drain_reports(bus, kind, registry):
    class Demanding(AfterTrainIter):
        def __post_init__(self):
            self.run.upper()  # live: fails once detached

    offload(bus, lambda event: None, kind, event="event", on_error="log")
    with capture_logs() as logs, bus:
        bus.publish(Demanding(run="run", progress=P, outputs={"loss": torch.tensor(1.0)}))
        bus.publish(EVENT)
        assert bus.drain() == DrainReport(delivered=1, failed=1)
    assert [line["event"] for line in logs] == ["a handler failed"]


@pytest.mark.parametrize("options", [{"on_error": "raise"}, {"on_error": "log"}, {"timeout": 30}], ids=str)
def test_a_handler_that_exits_the_program_breaks_its_lane_and_is_raised(bus, kind, options):
    heard = []

    def leave(event):
        heard.append(event.batch_idx)
        sys.exit(7)

    subscription = offload(bus, leave, kind, **options)
    with pytest.raises(SystemExit) as caught, bus:
        bus.publish(iteration(0))
        bus.drain()
    assert caught.value.code == 7
    assert heard == [0]
    assert subscription.stats.pending == 0


def test_awaiting_a_cancelled_task_fails_the_event_and_not_the_lane():
    bus, heard = Bus(), []

    @bus.on("after_train_iter", on_error="log")
    async def handler(event):
        heard.append(event.batch_idx)
        if event.batch_idx == 0:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    with capture_logs() as logs, bus:
        publish_all(bus, range(3))
        assert bus.drain() == DrainReport(delivered=2, failed=1)
    assert heard == [0, 1, 2]
    assert "CancelledError" in str(logs[0]["exc_info"])


# ------------------------------------------------------------------------------------------------------------ stress


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_that_is_half_full_is_not_left_to_a_long_linger(bus, kind):
    heard = []
    arrived = threading.Event()

    def note(event):
        heard.append(event.batch_idx)
        if event.batch_idx >= 32:
            arrived.set()

    offload(bus, note, kind, queue=64, linger=50)
    with bus:
        bus.publish(iteration(0))
        until(lambda: heard)
        publish_all(bus, range(1, 64))
        assert arrived.wait(10)
    assert heard == list(range(64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("linger", "number"), [(0, 200), (0.0005, 200), (0.01, 40)])  # half as many bursts
def test_no_wake_up_is_lost_in_many_short_bursts(bus, kind, linger, number):
    heard = []
    offload(bus, lambda event: heard.append(event.batch_idx), kind, linger=linger)
    with bus:
        for i in range(number):
            bus.publish(iteration(i))
            if i % 2:
                # Wait without drain(), which would wake the consumer by itself.
                waited = threading.Event()
                for _ in range(5000):
                    if len(heard) == i + 1:
                        break
                    waited.wait(0.001)
                assert len(heard) == i + 1
    assert heard == list(range(number))


@EVERYWHERE
def test_publishers_on_many_threads_lose_nothing(bus, kind):
    heard = []
    subscription = offload(bus, lambda event: heard.append(event.batch_idx), kind, queue=7)

    def publish(start):
        publish_all(bus, range(start, start + 200))

    with bus:
        on_threads(publish, *(200 * n for n in range(4)))
    assert sorted(heard) == list(range(800))
    for n in range(4):
        assert [i for i in heard if i // 200 == n] == list(range(200 * n, 200 * n + 200))
    assert subscription.stats.delivered == 800


POLICIES = [{}, {"queue": 2}, {"queue": 2, "full": "drop_old"}]


@EVERYWHERE
@pytest.mark.parametrize("options", [*POLICIES, {"queue": 2, "full": "drop_new"}])
def test_every_event_is_accounted_for_when_ctrl_c_interrupts_the_publisher(bus, kind, options, ctrl_c):
    """A timer signal, whose handler raises as Ctrl-C does, strikes the publisher at arbitrary instructions."""
    heard = []
    subscription = offload(bus, lambda event: heard.append(event.batch_idx), kind, linger=0.0001, **options)
    ctrl_c.publish_all(bus, map(iteration, range(4000)), 0.0006)
    assert_accounted(subscription.stats, heard, 4000, ctrl_c.strikes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [*POLICIES, {"batch": 16}])
def test_plain_events_are_accounted_for_when_ctrl_c_interrupts_the_publisher(kind, options, ctrl_c):
    bus, seen = Bus(), []
    function = seen.extend if "batch" in options else seen.append
    subscription = offload(bus, function, kind, event=Mark, linger=0.0001, **options)
    ctrl_c.publish_all(bus, (Mark(number=i) for i in range(20_000)), 0.0003)
    assert_accounted(subscription.stats, [mark.number for mark in seen], 20_000, ctrl_c.strikes)


def assert_accounted(stats, heard: list[int], events: int, strikes: int) -> None:
    assert stats.published == stats.delivered + stats.dropped
    assert stats.failed == stats.pending == 0
    assert len(heard) == stats.delivered
    assert events - strikes <= stats.published <= events
    assert heard == sorted(set(heard))


def test_a_closed_runtime_is_released(bus, kind):
    offload(bus, lambda event: None, kind)
    with bus:
        runtime = weakref.ref(bus._runtime)
        bus.publish(EVENT)
    gc.collect()
    assert runtime() is None
