"""Context variables of the publisher in offloaded handlers."""

from collections.abc import Callable
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest
import sniffio

from trainbus.eventloop import Bus, Event, Progress
from trainbus.eventloop.events import AfterTrainIter

from ..handlers import offload
from .workers import Told

variable: ContextVar[str] = ContextVar("variable", default="nothing")


def live(i: int) -> Event:
    return AfterTrainIter(progress=Progress(iter=i))


def plain(i: int) -> Event:
    return Told(what=str(i))


def publish(bus: Bus, number: int, event: Callable[[int], Event] = live) -> None:
    for i in range(number):
        variable.set(f"iteration {i}")
        bus.publish(event(i))


@pytest.fixture(autouse=True)
def _as_found():
    token = variable.set("at the start")
    yield
    variable.reset(token)


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("event", [live, plain])
def test_a_handler_sees_those_of_its_publish_and_keeps_its_own_changes_to_itself(backend, kind, event):
    bus = Bus(backend=backend)
    seen = []

    def look():
        seen.append(variable.get())
        variable.set("changed by the handler")

    async def handler(event):
        await anyio.lowlevel.checkpoint()
        look()
        await anyio.lowlevel.checkpoint()
        assert variable.get() == "changed by the handler"

    if kind == "async":
        bus.on(type(event(0)), handler)
    else:
        bus.on(type(event(0)), lambda event: look(), offload="thread")
    with bus:
        publish(bus, 3, event)
    assert seen == ["iteration 0", "iteration 1", "iteration 2"]
    assert variable.get() == "iteration 2"


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_handler_of_batches_sees_those_of_its_subscription(bus, kind):
    seen = set()
    variable.set("when it was subscribed")
    offload(bus, lambda events: seen.add(variable.get()), kind, batch=2)
    variable.set("when the bus was opened")
    with bus:
        publish(bus, 5)
    assert seen == {"when it was subscribed"}


def test_an_async_handler_runs_in_its_own_event_loop_for_any_publisher(backend):
    bus = Bus(backend=backend)
    slept = []

    @bus.on("after_train_iter")
    async def handler(event):
        with anyio.move_on_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 0)
            slept.append((sniffio.current_async_library(), await anyio.to_thread.run_sync(variable.get)))

    async def host() -> None:
        publish(bus, 2)

    with bus:
        anyio.run(host, backend="asyncio" if backend == "trio" else "trio")
    assert slept == [(backend, "iteration 0"), (backend, "iteration 1")]


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"timeout": 30}, {"batch": 2}, {"capture": lambda event: event.progress.iter}])
async def test_a_thread_handler_runs_async_code_of_its_own_whichever_loop_subscribes_and_publishes(bus, options):
    ran = []

    async def post() -> None:
        await anyio.sleep(0)
        ran.append(sniffio.current_async_library())

    def handler(event):
        for library in ("asyncio", "trio"):
            anyio.run(post, backend=library)

    for event in (live, plain):
        if "capture" not in options or event is live:
            bus.on(type(event(0)), handler, offload="thread", **options)
    async with bus:
        publish(bus, 2)
        if "capture" not in options:
            publish(bus, 2, plain)
    assert ran.count("asyncio") == ran.count("trio") >= 2
