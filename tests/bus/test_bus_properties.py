"""Random subscriptions, cancels, failures and publishers against a simple model of what must arrive in which order."""

from dataclasses import dataclass
from importlib.util import find_spec

import anyio
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.errors import LaneClosedError
from trainbus.eventloop.events import AfterTrainIter

from ..handlers import offload

LOOPS = [("asyncio", {"use_uvloop": fast}) for fast in (False, find_spec("uvloop") is not None)] + [("trio", {})]


@dataclass
class Planned:
    """One subscription and what it does when it is called."""

    priority: int
    mode: str
    every: int
    after: int
    fails_at: int  # iteration at which it raises; isolated
    cancels: int | None  # index of the subscription it cancels when first called
    subscribes: bool  # whether it subscribes another inline handler when first called

    def hears(self, i: int) -> bool:
        return i + 1 > self.after and (i + 1 - self.after) % self.every == 0


plans = st.lists(
    st.builds(
        Planned,
        priority=st.sampled_from([0, 10, 50, 50, 50, 90]),
        mode=st.sampled_from(["inline", "async", "thread"]),
        every=st.integers(1, 4),
        after=st.integers(0, 3),
        fails_at=st.sampled_from([-1, -1, 2, 5]),
        cancels=st.none() | st.integers(0, 5),
        subscribes=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def model(planned: list[Planned], events: int) -> dict[int, list[int]]:
    """What each subscription hears; those made on the way have numbers from 100 on. Only inline ones act on the bus."""
    heard: dict[int, list[int]] = {number: [] for number in range(len(planned))}
    order: list[tuple[int, int, int]] = sorted((plan.priority, number, number) for number, plan in enumerate(planned))
    acted: set[int] = set()
    made = 100
    for i in range(events):
        for _, _, number in list(order):
            plan = planned[number] if number < 100 else None
            if plan is not None and not plan.hears(i):
                continue
            heard[number].append(i)
            if plan is None or plan.mode != "inline" or number in acted:
                continue
            acted.add(number)
            if plan.cancels is not None:
                order = [entry for entry in order if entry[2] != plan.cancels]
            if plan.subscribes:
                heard[made] = []
                order = sorted([*order, (50, made, made)])
                made += 1
    return heard


@given(planned=plans, events=st.integers(1, 12), backend=st.sampled_from(["asyncio", "asyncio", "trio"]))
def test_everything_arrives_as_the_model_says(planned, events, backend):
    bus = Bus(backend=backend)
    heard: dict[int, list[int]] = {}
    inline_order: list[tuple[int, int, int]] = []
    subscriptions = {}
    acted: set[int] = set()
    made = iter(range(100, 200))

    def subscribe(number: int, plan: Planned | None) -> None:
        heard[number] = []

        def handle(event: AfterTrainIter) -> None:
            i = event.progress.iter
            heard[number].append(i)
            if plan is None:
                return
            if plan.mode == "inline":
                inline_order.append((i, plan.priority, number))
                if number not in acted:
                    acted.add(number)
                    if plan.cancels in subscriptions:
                        subscriptions[plan.cancels].cancel()
                    if plan.subscribes:
                        subscribe(next(made), None)
            if i == plan.fails_at:
                raise ValueError(i)

        if plan is None:
            subscriptions[number] = bus.on(AfterTrainIter, handle)
            return
        options = {"priority": plan.priority, "every": plan.every, "after": plan.after, "on_error": "log"}
        subscriptions[number] = offload(bus, handle, plan.mode, **options)

    for number, plan in enumerate(planned):
        subscribe(number, plan)
    with capture_logs(), bus:
        for i in range(events):
            bus.publish(AfterTrainIter(progress=Progress(iter=i)))
    assert heard == model(planned, events)
    assert inline_order == sorted(inline_order)
    for number, plan in enumerate(planned):
        stats = subscriptions[number].stats
        failed = [i for i in heard[number] if i == plan.fails_at]
        assert stats.failed == len(failed)
        if plan.mode != "inline":
            assert stats.published == len(heard[number])
            assert stats.published == stats.delivered + stats.failed + stats.dropped + stats.pending
            assert stats.dropped == stats.pending == 0


@given(
    hosted=st.booleans(),
    loop=st.sampled_from(LOOPS),
    modes=st.lists(st.sampled_from(["async", "thread", "stream"]), min_size=1, max_size=4),
    queue=st.integers(1, 4),
    full=st.sampled_from(["drop_old", "drop_new", "latest", "block"]),
    batch=st.none() | st.integers(1, 4),
    linger=st.sampled_from([0, 0.001]),
    fails=st.sets(st.integers(0, 30), max_size=5),
    publishers=st.integers(1, 3),
    events=st.integers(1, 30),
    cancels_after=st.none() | st.integers(0, 30),
    leaves_early=st.booleans(),
)
def test_with_failures_and_cancellations_every_lane_accounts_for_a_prefix_of_each_publisher(
    hosted, loop, modes, queue, full, batch, linger, fails, publishers, events, cancels_after, leaves_early
):
    """One subscription is cancelled from a publisher, and the host may be cancelled while they publish."""
    backend, options_of_host = loop
    bus = Bus(backend=backend, abort_timeout=5)
    heard: list[list[tuple[int, int]]] = [[] for _ in modes]
    subscriptions: list = []
    refused: list[tuple[int, int]] = []

    async def read(stream, into) -> None:
        async for event in stream:
            into.append((event.progress.epoch, event.progress.iter))

    def subscribe(mode: str, into: list[tuple[int, int]]):
        def handle(what: AfterTrainIter | list[AfterTrainIter]) -> None:
            arrived = what if isinstance(what, list) else [what]
            into.extend((event.progress.epoch, event.progress.iter) for event in arrived)
            if any(event.progress.iter in fails for event in arrived):
                raise ValueError

        options = {"queue": queue, "full": full, "linger": linger}
        if mode == "stream":
            return bus.stream(AfterTrainIter, **options)
        return offload(bus, handle, mode, on_error="log", batch=batch, **options)

    def publish(publisher: int) -> None:
        for i in range(events):
            if publisher == 0 and i == cancels_after and modes[0] != "stream":
                subscriptions[0].cancel()
            try:
                bus.publish(AfterTrainIter(progress=Progress(epoch=publisher, iter=i)))
            except LaneClosedError:  # it waited for a place in the lane that was cancelled; later lanes do not get the event
                assert cancels_after is not None
                assert full == "block"
                refused.append((publisher, i))
            for stats in [one.stats for one in subscriptions]:
                assert stats.published == stats.delivered + stats.failed + stats.dropped + stats.pending

    async def host() -> None:
        async with anyio.create_task_group() as readers:
            for mode, into in zip(modes, heard, strict=True):
                subscriptions.append(subscribe(mode, into))
                if mode == "stream":
                    readers.start_soon(read, subscriptions[-1], into)
            with anyio.CancelScope() as scope:
                if hosted:
                    async with bus:
                        await publish_all(scope)
                else:
                    await anyio.to_thread.run_sync(bus.open)
                    await publish_all(scope)
            if not hosted:
                await bus.aclose()

    async def publish_all(scope: anyio.CancelScope) -> None:
        async with anyio.create_task_group() as group:
            for n in range(publishers):
                group.start_soon(anyio.to_thread.run_sync, publish, n)
            if leaves_early:
                scope.cancel()

    with capture_logs():
        anyio.run(host, backend=backend, backend_options=options_of_host)
    assert bus.state == "idle"
    for mode, subscription, arrived in zip(modes, subscriptions, heard, strict=True):
        stats = subscription.stats
        assert stats.published == stats.delivered + stats.failed + stats.dropped
        assert stats.delivered + stats.failed == len(arrived)
        assert stats.pending == 0
        assert stats.failed == 0 or fails
        if full == "block":
            assert stats.dropped == 0
        if cancels_after is None and not leaves_early and mode != "stream":
            assert stats.published == publishers * events
        for n in range(publishers):
            mine = [i for publisher, i in arrived if publisher == n]
            assert mine == sorted(set(mine))
            untouched = cancels_after is None or subscription is not subscriptions[0]
            if full == "block" and untouched and not leaves_early and mode != "stream":
                assert mine == [i for i in range(events) if (n, i) not in refused]
