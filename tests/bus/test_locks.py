"""No lock of a bus is held where code waits, logs or starts a thread."""

import asyncio
import itertools
import logging
import threading

import anyio
import pytest
import structlog
import torch

from trainbus.eventloop import Bus, Event, Hook, locks
from trainbus.eventloop.bus import redefined

from ..handlers import iteration
from ..interleaver.points import Lines


class Line(Event):
    text: str = ""


@pytest.fixture(autouse=True)
def _checked(change):
    """The switch of ``TRAINBUS_CHECK_LOCKS=1``, for what is made from now on."""
    change(locks.CHECKED, True)


@pytest.fixture
def lines(backend):
    """Publish what is logged: with the lock of the handler held, as logging does, and from all threads."""
    bus = Bus(backend=backend)
    found: list[str] = []
    bus.on(Line, lambda event: found.append(event.text))

    class ToBus(logging.Handler):
        def emit(self, record):
            locks.may_wait("the lock of a logging.Handler")  # which another thread may hold, and publish
            bus.publish(Line(text=record.getMessage()))

    root, before = logging.getLogger(), logging.getLogger().level
    handler = ToBus()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory(), wrapper_class=structlog.stdlib.BoundLogger)
    yield bus, found
    root.removeHandler(handler)
    root.setLevel(before)


def test_a_wait_with_the_lock_of_a_bus_or_a_lane_is_an_error(bus):
    subscription = bus.on("after_train_iter", print, offload="thread")
    for lock in (bus._lock, subscription.lane._lock):
        with lock, pytest.raises(locks.WaitWithLockError, match=r"docs/internals/locks\.md"):
            locks.may_wait("a test")
    locks.may_wait("a test")


def test_a_log_that_publishes_on_the_bus_that_logs(lines):
    """asyncio logs as the loop of the bus starts, on its thread, and asyncio's debug mode each slow step."""
    bus, found = lines
    with bus:
        logging.info("open")
        bus.on("after_train_iter", _nothing)  # the first async handler of an open bus
        bus.publish(iteration(0))
    bus.on("after_train_iter", _nothing)
    with bus:
        bus.publish(iteration(0))
    assert "open" in found


async def _nothing(event): ...


def test_nothing_is_logged_with_the_lock(lines, change):
    bus, found = lines

    class Bridge:
        def warn_of_missing(self, subscriptions):
            logging.warning("missing")

    module = {"__name__": "__main__"}
    exec("def handler(event): ...\nclass Mine:\n    def after_run(self, event): ...", module)  # noqa: S102 - a cell of a notebook
    hook = type("Mine", (Hook,), {"__module__": "__main__", "after_run": module["Mine"].after_run})
    bus.internal.add_bridge(Bridge())
    bus.on("after_run", module["handler"])
    bus.add(hook())
    exec("\n\ndef handler(event): ...\n", module)  # noqa: S102 - and once more
    change(redefined.PROMPTS, ("<string>",))
    bus.on("after_run", module["handler"])
    assert found.count("missing") == 4
    assert any("defined again" in line for line in found)


def test_threads_of_timing_start_and_end_without_the_lock(monkeypatch, no_thread_is_left):
    start, join = threading.Thread.start, threading.Thread.join

    def checked(method):
        def call(self, *arguments):
            locks.may_wait("a thread")
            return method(self, *arguments)

        return call

    monkeypatch.setattr(threading.Thread, "start", checked(start))
    monkeypatch.setattr(threading.Thread, "join", checked(join))
    bus, model = Bus(timing=True), torch.nn.Linear(1, 1)
    monkeypatch.setattr(torch.compiler, "reset", lambda: locks.may_wait("the compiler"))
    bus.on("after_train_iter", print, offload="thread")
    with bus:
        bus.on("after_train_iter", _nothing)
        bus.on("after_val_iter", print, offload="thread")
        bus.timing = False
        bus.timing = True
        bus.internal.set_rank(0, 1)
        bus.on("after_module_forward", _nothing)
        bus.watch(model).detach()


def test_a_loop_that_does_not_start_is_told_and_leaves_nothing(monkeypatch, bus, no_thread_is_left):
    def fails(*arguments, **options):
        raise OSError("too many open files")

    monkeypatch.setattr("anyio.run", fails)
    bus.on("after_train_iter", _nothing)
    with pytest.raises(RuntimeError, match="too many open files"):
        bus.open()
    assert bus.state == "idle"
    bus.off(_nothing)
    with bus:
        with pytest.raises(RuntimeError, match="too many open files"):
            bus.on("after_train_iter", _nothing)
        assert not bus.subscriptions
        bus.publish(iteration(0))


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["on", "stream", "publish", "off", "wants"])
async def test_another_task_uses_the_bus_while_it_opens(bus, call):
    bus.on(Line, _nothing)

    async def hold() -> None:
        async with bus:
            await anyio.sleep(0)

    def use() -> None:
        if call == "publish":
            with pytest.raises(RuntimeError):
                bus.publish(Line())
        elif call == "off":
            bus.off(bus.on(Line, print))
        else:
            getattr(bus, call)(Line, *[print][: call == "on"])

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(hold)
            group.start_soon(_call, use)
    assert bus.state == "idle"


async def _call(function) -> None:
    function()


def test_a_thread_that_closes_never_closes_the_bus_that_a_loop_opens(bus):
    async def main() -> None:
        for _ in range(20):
            opening = asyncio.create_task(bus.__aenter__())
            await asyncio.sleep(0)
            closer = threading.Thread(target=_closes, args=(bus,))
            closer.start()
            await opening
            while closer.is_alive():
                await asyncio.sleep(0)
            assert bus.state == "open"
            await bus.aclose()

    asyncio.run(main())


def _closes(bus) -> None:
    try:
        bus.close()
    except RuntimeError as error:
        assert "async with bus:" in str(error)


@pytest.mark.parametrize("call", ["publish", "on", "subscriptions"])
def test_what_the_handler_of_a_signal_subscribes_in_the_middle_of_a_call_is_called(call):
    """At each line of it."""
    for at in itertools.count():
        bus, heard, points = Bus(), [], []

        def act(point, bus=bus, heard=heard, points=points, at=at):
            points.append(point)
            if len(points) == at + 1:
                bus.on(Line, heard.append)

        with Lines(act):
            _call_of(bus, call)
        if len(points) <= at:
            break
        heard.clear()
        bus.publish(Line())
        assert len(heard) == 1, points[at]
        assert len(bus.subscriptions) == (1 if call == "publish" else 2), points[at]
    assert at > 20


def _call_of(bus, call) -> None:
    if call == "publish":
        bus.publish(Line())
    else:
        bus.on(Line, id)
        bus.publish(Line())
        assert bus.subscriptions
