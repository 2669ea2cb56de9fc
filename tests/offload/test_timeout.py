"""``timeout=``: a handler that hangs has failed, and its lane goes on. For worker processes see test_process.py."""

import threading
from concurrent.futures import Future

import anyio
import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, HandlerTimeoutError

from ..failing import fails
from ..handlers import iteration, publish_all


@pytest.fixture
def release(no_thread_is_left):
    """Ends handlers that hang in threads."""
    event = threading.Event()
    yield event
    event.set()


def hanging(bus: Bus, kind: str, hangs: set[int], release: threading.Event, **options):
    """Subscribe a handler that hangs in some iterations; returns its subscription and the iterations that it finished."""
    finished: list[int] = []

    def numbers(what) -> list[int]:
        return [event.batch_idx for event in (what if isinstance(what, list) else [what])]

    def handler(what):
        if hangs & set(numbers(what)):
            release.wait()
        finished.extend(numbers(what))

    async def task(what):
        if hangs & set(numbers(what)):
            await anyio.sleep_forever()
        finished.extend(numbers(what))

    if kind == "thread":
        return bus.on("after_train_iter", handler, offload="thread", **options), finished
    return bus.on("after_train_iter", task, **options), finished


@pytest.mark.parametrize(("kind", "library"), [("async", "asyncio"), ("async", "trio"), ("thread", "asyncio")])
def test_a_handler_that_hangs_is_cancelled_or_abandoned_and_reported_once_and_the_lane_continues(kind, library, release):
    bus = Bus(backend=library)
    subscription, finished = hanging(bus, kind, {1}, release, timeout=0.3, on_error="log")
    with capture_logs() as logs, bus:
        publish_all(bus, range(3))
        bus.drain()
        assert finished == [0, 2]
        release.set()  # the abandoned thread ends now, without a report
    stats = subscription.stats
    assert (stats.published, stats.delivered, stats.failed, stats.pending) == (3, 2, 1, 0)
    errors = [entry["exc_info"] for entry in logs if "exc_info" in entry]
    assert [type(error) for error in errors] == [HandlerTimeoutError]
    assert "timeout=0.3 s" in str(errors[0])


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_hanging_batch_fails_as_a_whole(bus, kind, release):
    subscription, _ = hanging(bus, kind, {0}, release, timeout=0.3, on_error="log", batch=8, linger=0)
    with capture_logs(), bus:
        publish_all(bus, range(20))
    stats = subscription.stats
    assert 1 <= stats.failed <= 8
    assert stats.delivered == 20 - stats.failed


def test_a_thread_that_finishes_while_being_abandoned_ends(bus, monkeypatch, release):
    subscription, finished = hanging(bus, "thread", set(), release, timeout=10, on_error="log")
    wait = Future.exception

    def too_late(outcome, timeout):
        wait(outcome, timeout)
        raise TimeoutError

    with capture_logs(), bus:
        monkeypatch.setattr(Future, "exception", too_late)
        bus.publish(iteration(0))
        bus.drain()
        monkeypatch.undo()
        bus.publish(iteration(1))
    assert finished == [0, 1]
    assert (subscription.stats.failed, subscription.stats.delivered) == (1, 1)
    # The fixture joins all threads.


def test_the_second_thread_ends_if_the_lane_is_retired_concurrently(bus, monkeypatch, release):
    subscription, finished = hanging(bus, "thread", set(), release, timeout=30)
    look, looked = subscription.lane.finished, []

    def finished_a_moment_later():
        if threading.current_thread() is threading.main_thread():
            return look()  # a drain, which looks for consumers that have ended
        looked.append(look())
        if len(looked) == 1:
            subscription.cancel()
        return looked[-1]

    with bus:
        monkeypatch.setattr(subscription.lane, "finished", finished_a_moment_later)
        bus.publish(iteration(0))
        subscription.lane.wake()
        bus.drain()
    assert finished == [0]
    assert looked[0] is False
    # The fixture joins all threads.


def test_after_three_abandoned_threads_the_handler_is_retired_and_pending_events_dropped(bus, release):
    subscription, finished = hanging(bus, "thread", set(range(100)), release, timeout=0.05, on_error="log")
    with capture_logs() as logs, bus:
        publish_all(bus, range(10))
        bus.drain()
        assert not subscription.active
        bus.publish(iteration(10))
    assert finished == []
    stats = subscription.stats
    assert (stats.published, stats.failed, stats.dropped, stats.pending) == (10, 3, 7, 0)
    assert logs[-1].get("id") == "handler-retired"


def test_an_async_handler_is_not_retired_for_timeouts(bus, release):
    subscription, _ = hanging(bus, "async", set(range(5)), release, timeout=0.02, on_error="log")
    with capture_logs(), bus:
        publish_all(bus, range(6))
    assert subscription.stats.failed == 5
    assert subscription.stats.delivered == 1


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_by_default_a_hanging_handler_ends_the_run(bus, kind, release):
    hanging(bus, kind, {0}, release, timeout=0.05)
    with capture_logs(), pytest.raises(TimeoutError, match=r"timeout=0\.05"), bus:
        bus.publish(iteration(0))


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_handler_in_time_is_unaffected_and_its_own_timeout_error_is_kept(bus, kind, release):
    async def fail_async(event):
        raise TimeoutError("the database")

    if kind == "thread":
        bus.on("after_train_iter", fails(TimeoutError("the database")), offload="thread", timeout=30)
    else:
        bus.on("after_train_iter", fail_async, timeout=30)
    _, finished = hanging(bus, kind, set(), release, timeout=30)
    with capture_logs(), pytest.raises(TimeoutError, match="database") as caught, bus:
        bus.publish(iteration(0))
    assert not isinstance(caught.value, HandlerTimeoutError)
    assert finished == [0]
