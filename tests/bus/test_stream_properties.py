"""Streams: order and loss, whenever they begin, are left, and the bus closes."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainbus.eventloop import Bus, Event, Stream


class NoteOfStreamTests(Event):
    number: int


BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
LAST = 4

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 6)),
        st.tuples(
            st.just("open"),
            st.fixed_dictionaries(
                {"replay": st.integers(0, LAST), "queue": st.integers(LAST, 6)},
                optional={"full": st.sampled_from(["drop_old", "drop_new", "latest"])},
            ),
        ),
        st.tuples(st.just("read"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
    ),
    max_size=25,
)


class Reader:
    """A stream beside a model of its queue."""

    def __init__(self, bus: Bus, options: dict[str, Any], kept: list[int]) -> None:
        self.stream: Stream[NoteOfStreamTests] = bus.stream(NoteOfStreamTests, **options)
        self.full, self.queue = options.get("full", "drop_old"), options["queue"]
        self.expected = kept[-options["replay"] :] if options["replay"] else []
        self.published = len(self.expected)
        self.read = 0

    def publish(self, number: int) -> None:
        self.published += 1
        if len(self.expected) == self.queue:
            if self.full == "drop_new":
                return
            del self.expected[: 1 if self.full == "drop_old" else None]
        self.expected.append(number)

    async def take(self) -> None:
        if self.expected:
            assert (await anext(self.stream)).number == self.expected.pop(0)
            self.read += 1

    def check(self) -> None:
        stats = self.stream.stats
        assert (stats.published, stats.delivered, stats.pending) == (self.published, self.read, len(self.expected))
        assert stats.dropped == self.published - self.read - len(self.expected)


@BACKENDS
@given(ACTIONS)
def test_each_stream_yields_what_its_queue_holds_in_order_and_counts_the_rest(backend, actions):
    async def scenario() -> None:
        bus, readers, numbers, kept = Bus(), [], itertools.count(), []
        bus.keep(NoteOfStreamTests, last=LAST)
        async with bus:
            for action, argument in actions:
                if action == "publish":
                    for number in itertools.islice(numbers, argument):
                        bus.publish(NoteOfStreamTests(number=number))
                        kept = [*kept, number][-LAST:]
                        for reader in readers:
                            reader.publish(number)
                elif action == "open":
                    readers.append(Reader(bus, argument, kept))
                elif readers and action == "read":
                    await readers[argument % len(readers)].take()
                elif readers:
                    left = readers.pop(argument % len(readers))
                    await left.stream.aclose()
                    stats = left.stream.stats
                    assert (stats.published, stats.delivered, stats.pending) == (left.published, left.read, 0)
                for reader in readers:
                    reader.check()
        for reader in readers:
            with anyio.fail_after(30):
                assert [event.number async for event in reader.stream] == reader.expected
            stats = reader.stream.stats
            assert (stats.delivered + stats.dropped, stats.pending) == (reader.published, 0)
        assert [one.mode for one in bus.subscriptions] == ["history"]

    anyio.run(scenario, backend=backend)


@BACKENDS
@given(
    begins=st.lists(st.tuples(st.integers(0, 3), st.integers(0, LAST)), min_size=1, max_size=6),
    closes_after=st.integers(0, 5),
    stops=st.booleans(),
)
def test_streams_that_begin_at_any_time_lose_nothing_and_end(backend, begins, closes_after, stops):
    """Beside a thread that publishes until the bus closes, or is closed. A stream has all events from its first to its last."""
    heard: list[list[int]] = []
    over = threading.Event()

    async def scenario() -> None:
        bus, stopped = Bus(), anyio.Event()
        bus.keep(NoteOfStreamTests, last=LAST)

        def publish() -> None:
            for number in itertools.count():
                bus.publish(NoteOfStreamTests(number=number))
                if over.wait(1e-4):
                    return

        async def publish_until_over() -> None:
            await anyio.to_thread.run_sync(publish)
            stopped.set()

        async def read(stream: Stream[NoteOfStreamTests]) -> None:
            heard.append([event.number async for event in stream])

        async def begin(group: anyio.abc.TaskGroup) -> None:
            for turns, replay in begins:
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.start_soon(read, bus.stream(NoteOfStreamTests, replay=replay, queue=10**6))

        async with anyio.create_task_group() as publisher:
            publisher.start_soon(publish_until_over)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    async with bus:
                        group.start_soon(begin, group)
                        for _ in range(closes_after):
                            await anyio.lowlevel.checkpoint()
                        if stops:
                            over.set()
                            await stopped.wait()
            over.set()
        assert [one.mode for one in bus.subscriptions] == ["history"]

    anyio.run(scenario, backend=backend)
    assert len(heard) == len(begins)
    heard = [numbers for numbers in heard if numbers]
    for numbers in heard:
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len({numbers[-1] for numbers in heard}) <= 1 or not stops
