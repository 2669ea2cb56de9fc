"""The offloaded methods of a hook are called one at a time, in the order of their events; ``after_run`` comes last."""

import random
import threading
from types import SimpleNamespace

import anyio
import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Event, Hook, Progress, mount
from trainbus.eventloop.events import AfterRun

from ..waiting import on_threads
from . import workers

P = Progress()
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class One(Event):
    number: int
    thread: int = 0


class Two(Event):
    number: int
    thread: int = 0


class Three(Event):
    number: int
    thread: int = 0


KINDS = (One, Two, Three)


def hook(kind: str, handle, **options) -> Hook:
    """Return a hook with a method for each kind of events, all of them offloaded, and an offloaded ``after_run``."""

    def method(event, more):
        offload = {"offload": "thread"} if kind == "thread" else {}

        async def handle_async(self, what):
            await anyio.lowlevel.checkpoint()
            handle(what)

        return mount(event, **offload, **more)(handle_async if kind == "async" else lambda self, what: handle(what))

    methods = {f"take_{event.__name__}": method(event, options.get(event.__name__, {})) for event in (*KINDS, AfterRun)}
    return type("Ship", (Hook,), methods)()


@pytest.fixture(params=["thread", "asyncio", "trio"])
def where(request) -> SimpleNamespace:
    """The mode of handlers, and a bus for them."""
    kind = "thread" if request.param == "thread" else "async"
    return SimpleNamespace(kind=kind, bus=Bus(backend="trio" if request.param == "trio" else "asyncio"))


def counts_add_up(bus: Bus) -> bool:
    return all(one.published == one.delivered + one.failed + one.dropped + one.pending for one in bus.stats().values())


def numbers(what) -> list[tuple[int, int]]:
    return [(one.thread, one.number) for one in (what if isinstance(what, list) else [what])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"Two": {"batch": 16, "linger": 0.2}},
        {"One": {"capture": lambda event: event}, "Two": {"batch": 3, "capture": lambda event: event}, "Three": {"queue": 2}},
    ],
    ids=["alike", "batches", "captured"],
)
def test_what_each_thread_publishes_comes_in_its_order_whatever_the_options_of_the_methods(where, options):
    plain = SimpleNamespace  # an event is no value for capture=
    for own in options.values():
        if "capture" in own:
            own["capture"] = lambda event: plain(thread=event.thread, number=event.number)
    heard = []
    where.bus.add(hook(where.kind, lambda what: heard.extend(numbers(what)), **options))

    def publish(thread: int) -> None:
        chosen = random.Random(thread)
        for number in range(300):
            where.bus.publish(chosen.choice(KINDS)(number=number, thread=thread))

    with where.bus:
        on_threads(publish, 0, 1)
    assert counts_add_up(where.bus)
    for thread in (0, 1):
        assert [number for of, number in heard if of == thread] == list(range(300))


def test_each_method_has_a_bound_and_a_policy_of_its_own():
    started, release, heard = threading.Event(), threading.Event(), []

    def handle(event):
        started.set()
        release.wait()
        heard.append((type(event).__name__, event.number))

    bus = Bus(hook("thread", handle, One={"full": "latest", "queue": 1}, Two={"full": "drop_new", "queue": 2}))
    with bus:
        bus.publish(Three(number=0))
        started.wait()
        for number in range(1, 5):
            bus.publish(One(number=number))
            bus.publish(Two(number=number))
        assert counts_add_up(bus)
        release.set()
    assert heard == [("Three", 0), ("Two", 1), ("Two", 2), ("One", 4)]
    dropped = {one.mount_point: stats.dropped for one, stats in bus.stats().items()}
    assert dropped == {"one": 3, "two": 2, "three": 0, "after_run": 0}


def test_a_method_never_runs_beside_another_one_of_its_hook(where):
    inside, most = [], []

    def enter(event):
        inside.append(event)
        most.append(len(inside))
        inside.pop()

    where.bus.add(hook(where.kind, enter))
    with where.bus:
        for number in range(50):
            for kind in KINDS:
                where.bus.publish(kind(number=number))
    assert set(most) == {1}


def test_another_hook_and_a_function_are_not_held_up():
    bus, release, heard = Bus(), threading.Event(), threading.Event()
    bus.add(hook("thread", lambda event: release.wait()), hook("thread", lambda event: heard.set()))
    heard_too = threading.Event()
    bus.on(Two, lambda event: heard_too.set(), offload="thread")
    with bus:
        bus.publish(One(number=0))
        bus.publish(Two(number=1))
        assert heard.wait(10)
        assert heard_too.wait(10)
        release.set()


def test_a_method_that_is_cancelled_or_retired_leaves_the_others_in_order(where):
    heard = []

    def handle(event):
        heard.append((type(event).__name__, event.number))
        assert not isinstance(event, Two)

    where.bus.add(hook(where.kind, handle, Two={"disable_after": 2}))
    with where.bus, capture_logs():
        for number in range(2):
            for kind in KINDS:
                where.bus.publish(kind(number=number))
        where.bus.drain()
        where.bus.publish(One(number=2))
        next(one for one in where.bus.subscriptions if one.mount_point == "one").cancel()
        for kind in KINDS:
            where.bus.publish(kind(number=3))
        assert counts_add_up(where.bus)
    names = ["One", "Two", "Three"]
    assert heard == [*((name, number) for number in (0, 1) for name in names), ("One", 2), ("Three", 3)]


def test_a_hanging_thread_is_abandoned_and_the_other_methods_go_on():
    release, heard = threading.Event(), []

    class Mixed(Hook):
        @mount(One, offload="thread", timeout=0.02, on_error="log")
        def hang(self, event):
            release.wait()

        @mount(Two, offload="thread")
        def go_on(self, event):
            heard.append(event.number)

    bus = Bus(Mixed())
    with capture_logs() as logs, bus:
        for number in range(4):
            bus.publish(One(number=number))
            bus.publish(Two(number=number))
        bus.drain()
        release.set()
    assert heard == [0, 1, 2, 3]
    assert [one["handler"] for one in logs if one.get("id") == "handler-retired"] == ["Mixed.hang"]
    assert counts_add_up(bus)


def test_methods_on_threads_share_one_thread_also_if_one_has_a_timeout():
    threads = set()

    class Database(Hook):  # sqlite3 refuses a connection on another thread
        @mount(One, offload="thread")
        def open(self, event):
            threads.add(threading.get_ident())

        @mount(Two, offload="thread", timeout=60)
        def write(self, event):
            threads.add(threading.get_ident())

    with Bus(Database()) as bus:
        bus.publish(One(number=0))
        bus.publish(Two(number=1))
    assert len(threads) == 1


@pytest.mark.usefixtures("quick_workers", "no_worker_is_left")
def test_the_methods_in_worker_processes_share_one_worker():
    bus = Bus(workers.Counts())
    with capture_logs() as logs, bus:
        for number in range(3):
            bus.publish(workers.Told(what=f"one {number}"))
            bus.publish(workers.Asked(what=[f"one {number}"]))
    assert [one for one in logs if one["log_level"] == "error"] == []
    assert [stats.delivered for stats in bus.stats().values()] == [3, 3]


# ----------------------------------------------------------------------------------------------------- after_run


class Both(Hook):
    """Has methods in two modes, and an ``after_run`` that ends what they use."""

    def __init__(self) -> None:
        self.ended = False
        self.heard: list[str] = []
        self.pause = 0.02

    @mount(One, offload="thread")
    def on_thread(self, event):
        threading.Event().wait(self.pause)
        self.use(event)

    @mount(Two)
    async def in_loop(self, event):
        await anyio.sleep(self.pause)
        self.use(event)

    def use(self, event):
        assert not self.ended
        self.heard.append(f"{type(event).__name__} {event.number}")


class Inline(Both):
    def after_run(self, event):
        self.ended = True


class InLoop(Both):
    async def after_run(self, event):
        self.ended = True


class OnThread(Both):
    @mount(offload="thread")
    def after_run(self, event):
        self.ended = True


class Captured(Both):
    @mount(offload="thread", capture=lambda event: event.progress)
    def after_run(self, progress):
        self.ended = True


class InBoth(Both):
    ends = 0

    @mount("after_run", offload="thread")
    def end_on_thread(self, event):
        self.ends += 1

    @mount("after_run", priority=10)
    async def end_in_loop(self, event):
        self.ends += 1
        self.ended = self.ends == 2


@pytest.mark.parametrize("kind", [Inline, InLoop, OnThread, Captured, InBoth])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_after_run_comes_when_all_lanes_of_its_hook_are_empty(kind, backend):
    bus = Bus(ship := kind(), backend=backend)
    with bus:
        for number in range(3):
            bus.publish(One(number=number))
            bus.publish(Two(number=number))
        bus.publish(AfterRun(progress=P))
        assert ship.ended or kind is not Inline
    assert sorted(ship.heard) == ["One 0", "One 1", "One 2", "Two 0", "Two 1", "Two 2"]
    assert getattr(ship, "ends", 2) == 2
    assert counts_add_up(bus)


def test_an_inline_after_run_waits_no_longer_than_the_bus_drains_and_says_so():
    release = threading.Event()

    class Hangs(Inline):
        @mount(One, offload="thread", on_error="log")
        def on_thread(self, event):
            release.wait()

    bus = Bus(ship := Hangs(), drain_timeout=0.05)
    with capture_logs() as logs, bus:
        bus.publish(One(number=0))
        bus.publish(AfterRun(progress=P))
        assert ship.ended
        release.set()
    [log] = [one for one in logs if one.get("id") == "hook-ends-early"]
    assert (log["handler"], log["events"]) == ("Hangs", {"Hangs.on_thread (one)": 1})
    assert "drain_timeout" in log["event"]


def test_lanes_of_a_hook_on_another_bus_are_not_waited_for():
    release, ship = threading.Event(), Inline()
    ship.use = lambda event: release.wait()
    one, other = Bus(ship), Bus(ship)
    with one, other:
        other.publish(One(number=0))
        one.publish(AfterRun(progress=P))
        assert ship.ended
        release.set()


def test_after_run_in_an_idle_bus_and_without_events_comes_at_once():
    bus = Bus(ship := Inline())
    bus.publish(AfterRun(progress=P))
    assert ship.ended
