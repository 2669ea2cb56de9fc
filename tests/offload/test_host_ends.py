"""Cancellations that were not meant for the bus, and the end of the event loop that it was opened in."""

import asyncio
import gc
import signal
from contextlib import nullcontext

import anyio
import pytest
import trio
from anyio.from_thread import start_blocking_portal

from trainbus.eventloop import Bus, BusStateError
from trainbus.eventloop.errors import LaneClosedError

from ..conftest import UVLOOP
from ..handlers import iteration, publish_all


def _asyncio(main):
    return asyncio.run(main())


def _uvloop(main):
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _trio(main):
    return trio.run(main)


ASYNCIO = [pytest.param(_asyncio, id="asyncio"), pytest.param(_uvloop, id="uvloop", marks=UVLOOP)]
ALL = [*ASYNCIO, pytest.param(_trio, id="trio")]
EVENTS = 30


@pytest.fixture
def _sigint():
    """Python's own handler, which ``asyncio.run`` replaces; in the processes of a parallel pytest there is none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def slow(bus: Bus, seconds: float = 0.002) -> list[int]:
    """Subscribe an async handler; return what it has handled."""
    heard: list[int] = []

    @bus.on("after_train_iter")
    async def ship(event):
        await anyio.sleep(seconds)
        heard.append(event.batch_idx)

    return heard


async def holds(bus: Bus) -> None:
    async with bus:
        publish_all(bus, range(EVENTS))
        await anyio.sleep(60)


def cancel_all() -> list[asyncio.Task]:
    """The usual recipe for SIGTERM."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    return tasks


@pytest.mark.parametrize("run", ASYNCIO)
@pytest.mark.parametrize("how", ["recipe", "end of the run"])
def test_what_was_published_is_delivered_when_all_tasks_are_cancelled(run, how, bus):
    heard = slow(bus)

    async def main():
        holder = asyncio.create_task(holds(bus))
        while not heard:
            await asyncio.sleep(0)
        if how == "recipe":
            await asyncio.gather(*cancel_all(), return_exceptions=True)
            assert holder.cancelled()

    run(main)
    assert heard == [*range(EVENTS)]
    assert bus.state == "idle"


@pytest.mark.parametrize("run", ASYNCIO)
def test_a_program_that_goes_on_goes_on_being_served(run, bus):
    heard = slow(bus)

    async def main():
        async with bus:
            publish_all(bus, range(EVENTS))
            for _ in range(3):
                cancel_all()
                await asyncio.sleep(0.01)
            publish_all(bus, range(EVENTS, 2 * EVENTS))

    run(main)
    assert heard == [*range(2 * EVENTS)]


@pytest.mark.parametrize("run", ASYNCIO)
def test_the_recipe_while_the_bus_opens_leaves_a_bus_that_opens_again(run, bus):
    heard = slow(bus, 0)

    async def main():
        for steps in range(8):
            opening = asyncio.create_task(holds(bus))
            for _ in range(steps):
                await asyncio.sleep(0)
            await asyncio.gather(*cancel_all(), return_exceptions=True)
            assert opening.cancelled()
            assert bus.state == "idle"
        async with bus:
            heard.clear()
            publish_all(bus, range(3))

    run(main)
    assert heard == [0, 1, 2]


@pytest.mark.usefixtures("_sigint")
@pytest.mark.parametrize("run", ASYNCIO)
def test_ctrl_c_in_a_run_delivers_what_was_published(run, bus):
    heard = slow(bus)

    async def main():
        async with bus:
            publish_all(bus, range(EVENTS))
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert heard == [*range(EVENTS)]
    assert bus.state == "idle"


@pytest.mark.parametrize("run", ALL)
def test_a_cancelled_task_group_delivers_what_was_published(run, bus):
    heard = slow(bus)

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(holds, bus)
            while not heard:
                await anyio.sleep(0)
            group.cancel_scope.cancel()

    run(main)
    assert heard == [*range(EVENTS)]


@pytest.mark.parametrize("run", ALL)
def test_an_asynchronous_generator_that_holds_the_bus_delivers_as_its_loop_ends(run, bus):
    heard, kept = slow(bus), []

    async def session():
        async with bus:
            yield bus

    async def main():
        kept.append(session())
        publish_all(await anext(kept[0]), range(EVENTS))

    run(main)
    assert heard == [*range(EVENTS)]
    if run is not _trio:  # where a generator that trio finalizes may wait for nothing
        assert bus.state == "idle"
    bus.close()
    assert bus.state == "idle"


@pytest.mark.parametrize("run", ALL)
def test_a_bus_that_nobody_closes_delivers_and_then_says_that_its_loop_has_ended(run, bus):
    heard = slow(bus)
    threads: list[int] = []
    bus.on("after_train_iter", lambda event: threads.append(event.batch_idx), offload="thread", priority=10)

    async def main():
        await bus.__aenter__()
        publish_all(bus, range(EVENTS))

    run(main)
    assert heard == [*range(EVENTS)]
    with pytest.raises(BusStateError, match="event loop has ended"):
        bus.publish(iteration(0))
    for call in (bus.drain, bus.open):
        with pytest.raises(BusStateError, match="event loop has ended"):
            call()
    bus.close()
    heard.clear()
    with bus:
        bus.publish(iteration(7))
    assert heard == [7]
    assert threads == [*range(EVENTS), 0, 7]


@pytest.mark.parametrize("run", ALL)
def test_a_loop_that_ends_waits_no_longer_than_the_bus_when_it_aborts(run, logs):
    bus = Bus(abort_timeout=0.02)
    slow(bus, 60)

    async def main():
        await bus.__aenter__()
        publish_all(bus, range(EVENTS))
        await anyio.sleep(0.05)

    run(main)
    (stats,) = bus.stats().values()
    assert (stats.dropped, stats.pending) == (EVENTS, 0)
    with pytest.raises(BusStateError, match=f"{EVENTS} for ship"):
        bus.close()
    assert bus.state == "idle"
    assert not logs


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, pytest.param("uvloop", marks=UVLOOP)])
@pytest.mark.parametrize("close", ["close", "aclose"])
def test_a_loop_that_was_closed_as_it_was_is_told_at_once(new_loop, close, bus):
    if new_loop == "uvloop":
        import uvloop

        new_loop = uvloop.new_event_loop
    slow(bus)
    loop = new_loop()
    loop.run_until_complete(bus.__aenter__())
    loop.close()
    for _ in range(3):
        with pytest.raises(LaneClosedError, match="event loop has ended"):
            bus.publish(iteration(0))
    (stats,) = bus.stats().values()
    assert (stats.dropped, stats.pending) == (1, 0)  # the first; later ones are refused
    with pytest.raises(BusStateError, match="1 for"):
        bus.close() if close == "close" else asyncio.run(bus.aclose())
    assert bus.state == "idle"


@pytest.mark.parametrize("run", ASYNCIO)
def test_a_handler_that_cancels_its_own_task_loses_no_other_event(run, logs):
    bus, heard = Bus(), []

    @bus.on("after_train_iter", on_error="log")
    async def handler(event):
        heard.append(event.batch_idx)
        if event.batch_idx % 2:
            asyncio.current_task().cancel()
        if event.batch_idx % 3:
            await asyncio.sleep(0)

    async def main():
        async with bus:
            publish_all(bus, range(EVENTS))

    run(main)
    assert heard == [*range(EVENTS)]
    (stats,) = bus.stats().values()
    assert stats.dropped == stats.pending == 0


# ------------------------------------------------------------------------------- programs as other people's reports have them


@pytest.mark.long
@pytest.mark.parametrize("run", ASYNCIO)
def test_the_garbage_collector_finds_no_task_of_a_bus(run, bus):
    """asyncio holds its tasks weakly (python/cpython#91887)."""
    heard = slow(bus, 0)

    async def main():
        async with bus:
            for number in range(5):
                bus.publish(iteration(number))
                gc.collect()
                await asyncio.sleep(0.002)

    run(main)
    assert heard == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, pytest.param("uvloop", marks=UVLOOP)])
def test_a_loop_that_runs_by_turns_serves_in_its_turns(new_loop, bus):
    """As the fixtures of a test do."""
    if new_loop == "uvloop":
        import uvloop

        new_loop = uvloop.new_event_loop
    heard, loop = slow(bus, 0), new_loop()
    loop.run_until_complete(bus.__aenter__())
    for number in range(5):
        bus.publish(iteration(number))
        loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(bus.aclose())
    loop.close()
    assert heard == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_bus_in_the_loop_of_a_portal(backend, closes, bus):
    heard = slow(bus)
    with start_blocking_portal(backend) as portal:
        with portal.wrap_async_context_manager(bus) if closes else nullcontext(portal.call(bus.__aenter__)):
            publish_all(bus, range(EVENTS))
    assert heard == [*range(EVENTS)]
    bus.close()


@pytest.mark.parametrize("run", ASYNCIO)
def test_timeouts_and_task_groups_of_a_handler_cancel_its_task_and_no_other_event(run, bus):
    heard: list[str] = []

    @bus.on("after_train_iter")
    async def handler(event):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(60))
                raise ZeroDivisionError
        heard.append(event.batch_idx)

    async def main():
        async with bus:
            publish_all(bus, range(5))

    run(main)
    assert heard == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("_sigint")
def test_a_second_ctrl_c_while_the_bus_closes_leaves_it_closed(bus):
    heard = slow(bus)

    async def main():
        async with bus:
            publish_all(bus, range(EVENTS))
            for seconds in (0.005, 0.02):
                asyncio.get_running_loop().call_later(seconds, signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    bus.close()
    assert bus.state == "idle"
    (stats,) = bus.stats().values()
    assert stats.delivered == len(heard)
    assert not stats.pending
