"""``async with bus:``: async handlers are tasks of the host's event loop, which is never blocked."""

import threading
import time
from contextlib import nullcontext

import anyio
import anyio.lowlevel
import pytest
from blockbuster import BlockingError
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, BusStateError, Hook, LaneFullError, OffloadError, Progress
from trainbus.eventloop.errors import LaneClosedError
from trainbus.eventloop.events import AfterRun, BeforeRun
from trainbus.eventloop.offload import DrainReport

from ..handlers import iteration, publish_all

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_blocking")]

P = Progress()


async def ticking(ticks: list[int]) -> None:
    while True:
        await anyio.sleep(0.001)
        ticks.append(1)


def held(bus: Bus, **options) -> tuple[anyio.Event, anyio.Event]:
    """Subscribe an async handler that waits in its first event. Returns started, release."""
    started, release = anyio.Event(), anyio.Event()

    @bus.on("after_train_iter", **options)
    async def hold(event):
        started.set()
        await release.wait()

    return started, release


def hears(bus: Bus, **options) -> list[int]:
    """Subscribe an async handler. Returns what it hears."""
    heard: list[int] = []

    @bus.on("after_train_iter", **options)
    async def handler(event):
        await anyio.sleep(0)
        heard.append(event.batch_idx)

    return heard


async def test_async_handlers_run_in_the_hosts_loop_and_blocking_ones_on_threads(bus):
    heard = []
    host = threading.get_ident()

    @bus.on("after_train_iter")
    async def task(event):
        await anyio.lowlevel.checkpoint()
        heard.append(("task", threading.get_ident() == host, event.batch_idx))

    bus.on("after_train_iter", lambda e: heard.append(("thread", threading.get_ident() == host, e.batch_idx)), offload="thread")
    async with bus:
        assert bus.state == "open"
        publish_all(bus, range(50))
    assert bus.state == "idle"
    assert [entry for entry in heard if entry[0] == "task"] == [("task", True, i) for i in range(50)]
    assert [entry for entry in heard if entry[0] == "thread"] == [("thread", False, i) for i in range(50)]


async def test_the_bus_can_reopen_with_its_own_loop_thread(bus):
    heard = []

    @bus.on("after_train_iter")
    async def handler(event):
        heard.append(threading.current_thread() is threading.main_thread())

    def on_its_own() -> None:
        with bus:
            bus.publish(iteration(1))

    async with bus:
        bus.publish(iteration(0))
    await anyio.to_thread.run_sync(on_its_own)
    async with bus:
        bus.publish(iteration(2))
    assert heard == [True, False, True]
    await anyio.to_thread.run_sync(bus.open)
    bus.publish(iteration(0))
    assert await bus.adrain() == DrainReport(delivered=1)
    await bus.aclose()
    assert bus.state == "idle"


async def test_subscribing_to_an_open_bus_works_from_the_host_and_from_threads(bus):
    heard = []

    async def handler(event):
        heard.append(event.batch_idx)

    async with bus:
        bus.on("after_train_iter", handler)
        bus.publish(iteration(0))
        bus.off(handler)
        await anyio.to_thread.run_sync(bus.on, "after_train_iter", handler)
        bus.publish(iteration(1))
    assert sorted(heard) == [0, 1]  # two lanes, which keep no order between them


# ------------------------------------------------------------------------------------------------- drain and misuse


async def test_adrain_reports_and_neither_it_nor_the_close_blocks_the_host(bus):
    ticks: list[int] = []
    bus.on("after_train_iter", lambda event: time.sleep(0.01), offload="thread")

    @bus.on("after_train_iter", on_error="log")
    async def handler(event):
        await anyio.sleep(0.005)
        if event.batch_idx == 3:
            raise ValueError

    async with anyio.create_task_group() as group:
        group.start_soon(ticking, ticks)
        async with bus:
            publish_all(bus, range(10))
            with capture_logs():
                assert await bus.adrain() == DrainReport(delivered=19, failed=1)
            assert ticks
            publish_all(bus, range(10, 20))
            before = len(ticks)
        assert len(ticks) > before + 5
        group.cancel_scope.cancel()


async def test_adrain_gives_up_after_its_timeout_and_when_it_is_cancelled(bus):
    started, release = held(bus)
    async with bus:
        bus.publish(iteration(0))
        await started.wait()
        assert (await bus.adrain(timeout=0.01)).pending == 1
        with anyio.move_on_after(0.01) as scope:
            await bus.adrain()
        assert scope.cancelled_caught
        release.set()
        assert (await bus.adrain()).pending == 0
    with pytest.raises(BusStateError):
        await bus.adrain()


async def test_waiting_in_the_hosts_loop_or_closing_from_another_thread_is_an_error(bus):
    async with bus:
        for call in ("drain", "close"):
            with pytest.raises(BusStateError, match=rf"bus.a{call}\(\)"):
                getattr(bus, call)()
        with pytest.raises(BusStateError, match="async with bus:"):
            await anyio.to_thread.run_sync(bus.close)
        assert bus.state == "open"


@pytest.mark.parametrize("kind", ["async", "child task", "worker thread"])
@pytest.mark.parametrize("call", ["adrain", "aclose"])
async def test_waiting_for_the_bus_in_one_of_its_handlers_is_an_error(bus, kind, call):
    async def wait() -> None:
        with pytest.raises(BusStateError, match=rf"bus\.{call}\(\)"):
            await getattr(bus, call)()

    def wait_in_thread() -> None:
        with pytest.raises(BusStateError, match=rf"bus\.{call.removeprefix('a')}\(\)"):
            getattr(bus, call.removeprefix("a"))()

    @bus.on("after_train_iter")
    async def handler(event):
        if kind == "async":
            await wait()
        elif kind == "worker thread":
            await anyio.to_thread.run_sync(wait_in_thread)
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(wait)

    async with bus:
        bus.publish(iteration(0))
    assert bus.subscriptions[0].stats.delivered == 1


@pytest.mark.long
async def test_a_handler_that_swallows_its_cancellation_is_abandoned_and_named():
    bus = Bus(drain_timeout=0.01)
    started, over = anyio.Event(), anyio.Event()
    release = threading.Event()

    @bus.on("after_train_iter")
    async def stubborn(event):
        started.set()
        while not release.is_set():
            try:
                await anyio.sleep(0.001)
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.001)
        over.set()

    with capture_logs() as logs, anyio.fail_after(20):
        with pytest.raises(OffloadError, match="1 for stubborn"):
            async with bus:
                bus.publish(iteration(0))
                await started.wait()
        assert not over.is_set()
        release.set()
        await over.wait()
    (line,) = [line for line in logs if line.get("id") == "handlers-abandoned"]
    assert line["handlers"] == ["stubborn (after_train_iter), which continues after it was cancelled"]
    assert bus.state == "idle"


async def test_opening_an_open_bus_is_an_error_in_every_combination(bus):
    async def enter() -> None:
        async with bus:
            pass

    with pytest.raises(BusStateError, match="use `with bus:`"):
        bus.drain()
    async with bus:
        with pytest.raises(BusStateError, match="async with bus:"):
            bus.open()
        for call in (enter, lambda: anyio.to_thread.run_sync(anyio.run, enter)):
            with pytest.raises(BusStateError):
                await call()
    await anyio.to_thread.run_sync(bus.open)
    for call in (enter, lambda: anyio.to_thread.run_sync(bus.open)):
        with pytest.raises(BusStateError):
            await call()
    assert bus.state == "open"
    await bus.aclose()


async def test_publishing_to_an_offloaded_handler_after_the_close_is_an_error(bus):
    hears(bus)
    async with bus:
        await bus.aclose()
        await bus.aclose()
        with pytest.raises(LaneClosedError):
            bus.publish(iteration(0))
        bus.publish(BeforeRun(progress=P))
    with pytest.raises(LaneClosedError):
        bus.publish(iteration(0))


async def test_publishing_into_a_full_blocking_lane_from_the_hosts_loop_is_an_error(bus):
    started, release = held(bus, queue=1)
    async with bus:
        bus.publish(iteration(0))
        await started.wait()
        bus.publish(iteration(1))
        with pytest.raises(LaneFullError):
            bus.publish(iteration(2))
        release.set()


# ----------------------------------------------------------------------------------------- exceptions, cancellation


@pytest.mark.parametrize("cancelled", [False, True], ids=["exception", "cancelled"])
async def test_a_block_left_by_an_exception_or_a_cancellation_delivers_what_was_published(bus, cancelled):
    heard = hears(bus)
    with anyio.CancelScope() as scope, nullcontext() if cancelled else pytest.raises(ZeroDivisionError):
        async with bus:
            publish_all(bus, range(5))
            if not cancelled:
                raise ZeroDivisionError
            scope.cancel()
            await anyio.sleep(10)
    assert scope.cancelled_caught == cancelled
    assert heard == [0, 1, 2, 3, 4]
    assert bus.state == "idle"


@pytest.mark.parametrize("closes", [False, True], ids=["block", "close"])
async def test_a_cancelled_block_or_close_abandons_and_reports_a_hanging_handler(closes):
    """And does not wait for the long deadline of a close."""
    bus = Bus(drain_timeout=1000, abort_timeout=0.02)
    started, _ = held(bus)
    with capture_logs() as logs, anyio.CancelScope() as scope:
        async with bus:
            bus.publish(iteration(0))
            bus.publish(iteration(1))
            await started.wait()
            scope.deadline = anyio.current_time() + 0.02
            if not closes:
                await anyio.sleep(10)
    assert scope.cancelled_caught
    assert next(entry for entry in logs if entry.get("id") == "events-left-by-bus")["events"] == {"hold (after_train_iter)": 2}
    assert bus.state == "idle"


async def test_failures_are_raised_by_publish_drain_and_close_and_several_as_a_group(bus):
    @bus.on("after_train_iter")
    async def broken(event):
        raise ValueError(event.batch_idx)

    @bus.on("after_train_iter")
    async def broken_too(event):
        raise KeyError(event.batch_idx)

    with capture_logs():
        with pytest.raises(ExceptionGroup) as caught:
            async with bus:
                bus.publish(iteration(0))
        assert {type(error) for error in caught.value.exceptions} == {ValueError, KeyError}
        bus.off(broken_too)
        async with bus:
            bus.publish(iteration(1))
            with pytest.raises(ValueError, match="1"):
                await bus.adrain()
            bus.publish(iteration(2))
            while not bus.wants(AfterRun):
                await anyio.sleep(0.001)
            with pytest.raises(ValueError, match="2"):
                bus.publish(AfterRun(progress=P))
            assert not bus.wants(AfterRun)


async def test_a_handler_of_another_bus_may_drain_this_one():
    one, other = Bus(), Bus()
    reports = []

    @one.on("after_train_iter")
    async def handler(event): ...

    @other.on("after_run")
    async def wait(event):
        one.publish(iteration(0))
        reports.append(await one.adrain())

    async with one, other:
        other.publish(AfterRun(progress=P))
    assert reports == [DrainReport(delivered=1)]


async def test_a_handler_that_blocks_the_loop_is_detected_on_asyncio(bus, anyio_backend_name):
    @bus.on("after_train_iter")
    async def blocking(event):
        time.sleep(0.001)  # noqa: ASYNC251 - what blockbuster is there to find

    if anyio_backend_name == "trio":
        async with bus:
            bus.publish(iteration(0))
        return
    with capture_logs(), pytest.raises(BlockingError, match=r"time\.sleep"):
        async with bus:
            bus.publish(iteration(0))


class Client(Hook):
    """Sends what happens, and closes in an inline ``after_run``."""

    closed = False

    def __init__(self):
        self.sent = []

    async def after_train_iter(self, event):
        await anyio.sleep(0.01)
        assert not self.closed
        self.sent.append(event.batch_idx)

    def after_run(self, event):
        self.closed = True


async def test_an_inline_after_run_waits_on_the_training_thread_beside_the_hosts_loop():
    async with Bus(client := Client()) as bus:

        def train():
            publish_all(bus, range(3))
            bus.publish(AfterRun(progress=P))
            assert client.closed

        await anyio.to_thread.run_sync(train)
    assert client.sent == [0, 1, 2]


async def test_an_inline_after_run_on_the_hosts_loop_does_not_wait_and_says_so():
    bus = Bus(client := Client(), abort_timeout=1)
    with capture_logs() as logs, pytest.raises(AssertionError):
        async with bus:
            publish_all(bus, range(2))
            bus.publish(AfterRun(progress=P))
            assert client.closed
    [log] = [one for one in logs if one.get("id") == "hook-ends-early"]
    assert (log["handler"], log["events"]) == ("Client", {"Client.after_train_iter (after_train_iter)": 2})
