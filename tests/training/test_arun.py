"""``await loop.arun()``: training on a thread while the host's event loop goes on; cancelling it from the host."""

import contextvars
import threading
from contextlib import nullcontext

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, BusStateError, Progress, TrainingError
from trainbus.eventloop.events import AfterTest

from .. import waiting
from ..failing import fails

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_blocking")]


async def until(condition) -> None:
    while not condition():
        await anyio.sleep(0.001)


async def cancelled(loop, condition) -> bool:
    """Run it, cancel that when a condition holds, and return whether the scope caught the cancellation."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(loop.arun)
            await until(condition)
            scope.cancel()
    return scope.cancelled_caught


async def test_the_hosts_loop_runs_while_another_thread_trains(parts, bus):
    ticks, threads = [], []

    async def ticker() -> None:
        while True:
            await anyio.sleep(0.01)
            ticks.append(1)

    @bus.on("after_train_iter")
    def wait_for_a_tick(event):
        before = len(ticks)
        waiting.until(lambda: len(ticks) > before)  # in vain if training held up the loop
        threads.append(threading.get_ident())

    async with anyio.create_task_group() as group:
        group.start_soon(ticker)
        metrics = await parts.loop(bus, max_epochs=2).arun()
        group.cancel_scope.cancel()
    assert len(threads) == 6
    assert threading.get_ident() not in threads
    assert metrics.keys() == {"loss"}
    assert bus.state == "idle"


async def test_arun_publishes_trains_and_returns_like_run(parts):
    one, other = parts.loop(model=parts.model()), parts.loop(model=parts.model())
    trace, its_trace = parts.Trace(one.bus), parts.Trace(other.bus)
    assert await one.arun() == await anyio.to_thread.run_sync(other.run)
    assert trace.names == its_trace.names
    parts.assert_same(one.model.state_dict(), other.model.state_dict())


async def test_async_handlers_run_in_the_hosts_loop_on_open_and_closed_buses_and_training_sees_its_context(parts):
    variable = contextvars.ContextVar("variable", default="")
    variable.set("of the host")
    threads, seen, bus = set(), [], Bus()
    bus.on("before_run", lambda event: seen.append(variable.get()))

    @bus.on("after_train_iter")
    async def handler(event):
        await anyio.lowlevel.checkpoint()
        threads.add(threading.get_ident())

    await parts.loop(bus).arun()
    assert threads == {threading.get_ident()}
    async with bus:
        await parts.loop(bus).arun()
        assert bus.state == "open"
    assert threads == {threading.get_ident()}
    assert seen == ["of the host"] * 2


@pytest.mark.parametrize("opened", [False, True], ids=["bus opened by arun", "bus open already"])
async def test_cancelling_ends_the_run_at_the_next_safe_mount_point(parts, bus, trace, opened):
    delivered = []

    @bus.on("after_train_iter")
    async def handler(event):
        delivered.append(event.progress.iter)

    loop = parts.loop(bus, max_epochs=100_000, val_data=None)
    undone = []
    bus.on("before_train_epoch", lambda event: event.run.defer(lambda: undone.append("epoch")))
    bus.on("before_run", lambda event: event.run.defer(lambda: undone.append("run")))

    async with bus if opened else nullcontext():
        assert await cancelled(loop, lambda: len(trace.of("after_train_iter")) > 20)
    # The iteration under way was finished; nothing around it was.
    assert trace.names[-1] == "on_exception"
    assert len(trace.of("before_train_iter")) == len(trace.of("after_train_iter"))
    assert "RunCancelled" in trace.events[-1].error
    assert not {"after_train", "after_run"} & set(trace.names)
    assert undone[-2:] == ["epoch", "run"]
    assert delivered == [event.progress.iter for event in trace.of("after_train_iter")]
    assert bus.state == "idle"


async def test_cancelling_reaches_a_training_thread_that_waits_on_a_full_lane(parts, logs):
    bus = Bus(abort_timeout=0.05)
    trace = parts.Trace(bus)
    waits = threading.Event()
    stuck = anyio.Event()

    @bus.on("after_train_iter", queue=1)
    async def hang(event):
        await stuck.wait()

    @bus.on("after_train_iter", priority=40)
    def third(event):
        if event.progress.iter == 2:  # one is in the handler's hands, one in the lane
            waits.set()

    assert await cancelled(parts.loop(bus, max_epochs=100), waits.is_set)
    assert trace.names[-1] == "on_exception"
    assert len(trace.of("after_train_iter")) == 3
    assert bus.state == "idle"
    assert next(entry for entry in logs if entry.get("id") == "events-left-by-bus")


async def test_cancelling_cuts_a_validation_short_without_its_after_val(parts, bus, trace):
    loop = parts.loop(bus, val_data=parts.batches(2, seed=2) * 100_000)
    assert await cancelled(loop, lambda: len(trace.of("after_val_iter")) > 3)
    assert trace.names[-2:] == ["after_val_iter", "on_exception"]
    assert loop.model.training


async def test_a_run_cancelled_before_it_begins_ends_immediately_and_runs_again(parts):
    loop = parts.loop(max_epochs=1)
    trace = parts.Trace(loop.bus)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await loop.arun()
    assert scope.cancelled_caught
    assert not trace.of("after_train_iter")
    await loop.arun()
    assert trace.names[-1] == "after_run"


async def test_an_error_of_training_is_raised_unchanged(parts, bus, trace):
    with pytest.raises(ZeroDivisionError, match="in the step"):
        await parts.loop(bus, step=fails(ZeroDivisionError("in the step"))).arun()
    assert trace.names[-1] == "on_exception"
    assert bus.state == "idle"


async def test_a_real_error_wins_over_the_cancellation_that_came_meanwhile(parts):
    entered, cancelled = threading.Event(), threading.Event()

    def broken(model, batch):
        entered.set()
        cancelled.wait()
        raise ZeroDivisionError

    loop = parts.loop(step=broken)

    async def train() -> None:
        with pytest.raises(ZeroDivisionError):
            await loop.arun()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await until(entered.is_set)
            scope.cancel()
            cancelled.set()


async def test_run_in_the_loop_of_its_bus_is_an_error_that_names_arun(parts, bus):
    async with bus:
        with pytest.raises(BusStateError, match=r"use `await loop\.arun"):
            parts.loop(bus).run()


async def test_one_loop_does_not_run_twice_at_the_same_time(parts):
    loop = parts.loop(max_epochs=100_000)
    trace = parts.Trace(loop.bus)
    async with loop.bus, anyio.create_task_group() as group:
        group.start_soon(loop.arun)
        await until(lambda: trace.names)
        with pytest.raises(TrainingError, match="already running"):
            await loop.arun()
        loop.stop()


@pytest.mark.parametrize("call", ["arun", "run", "validate"])
async def test_a_refused_call_leaves_the_first_one_alone_from_its_first_step_to_its_last(parts, call):
    loop = parts.loop(max_epochs=100_000)
    trace, refused = parts.Trace(loop.bus), 0

    async def again() -> None:
        nonlocal refused
        with pytest.raises(TrainingError, match="already running"):
            if call == "arun":
                with anyio.CancelScope() as scope:
                    scope.cancel()  # as the client of a request leaves
                    await loop.arun()
            else:
                await anyio.to_thread.run_sync(getattr(loop, call))
        refused += 1
        await anyio.lowlevel.checkpoint()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(loop.arun)
            await until(lambda: trace.names)  # trio begins the tasks of a group in any order
            while len(trace.of("after_train_iter")) < 20 or refused < 2:
                await again()
            loop.pause()
            await until(lambda: trace.names[-1] == "run_paused")
            await again()
            group.start_soon(again)
            scope.cancel()
    assert scope.cancelled_caught  # and no RunCancelled: the first call was cancelled, and knows it
    assert refused > 2
    loop.bus.on("before_run", lambda event: event.run.stop())
    await loop.arun()


async def test_two_calls_at_once_train_once(parts, bus):
    loop, ends = parts.loop(bus, max_epochs=2), []

    async def train() -> None:
        try:
            await loop.arun()
            ends.append("trained")
        except TrainingError:
            ends.append("refused")

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(train)
    assert sorted(ends) == ["refused", "refused", "trained"]
    assert loop.counters.epoch == 2


async def test_two_loops_on_one_idle_bus_begin_at_once_and_one_is_refused(parts, bus):
    """Who opens the bus, and closes it, is decided once."""
    loops, ends = [parts.loop(bus, max_epochs=1), parts.loop(Bus(), max_epochs=1)], []
    loops[1].bus = bus

    async def train(loop) -> None:
        try:
            await loop.arun()
            ends.append("trained")
        except BusStateError as error:
            assert "run" in str(error)
            ends.append("refused")

    async with anyio.create_task_group() as group:
        for loop in loops:
            group.start_soon(train, loop)
    assert "trained" in ends
    assert bus.state == "idle"


async def test_a_failure_is_raised_on_the_training_thread_only(parts, bus):
    heard = threading.Event()

    @bus.on("before_train_iter")
    async def broken(event):
        raise ValueError("of the handler")

    @bus.on("before_train_iter", priority=90)
    def wait(event):
        heard.wait(30)  # the failure is there, and a publisher of the host does not take it

    async def publish_from_the_host() -> None:
        await until(lambda: bus.internal.failures)
        bus.publish(AfterTest(progress=Progress()))
        await bus.adrain()
        assert not bus.wants("after_load_checkpoint")
        heard.set()

    with capture_logs():
        async with bus, anyio.create_task_group() as group:
            group.start_soon(publish_from_the_host)
            with pytest.raises(ValueError, match="of the handler"):
                await parts.loop(bus).arun()
