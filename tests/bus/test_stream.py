"""``bus.stream(...)``: a subscription as an async iterator."""

import threading

import anyio
import pytest

from eventloop import Bus, BusStateError, LiveFieldError, Progress, SubscribeError, UnknownEventError
from eventloop.events import AfterTrainIter

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_blocking")]


def iteration(i: int, **fields) -> AfterTrainIter:
    return AfterTrainIter(progress=Progress(iter=i), batch_idx=i, **fields)


async def test_a_stream_yields_filtered_events_and_ends_when_the_bus_closes():
    bus = Bus()
    async with bus:
        stream = bus.stream("after_train_iter", every=10)
        for i in range(30):
            bus.publish(iteration(i))
    assert [event.batch_idx async for event in stream] == [9, 19, 29]
    assert bus.subscriptions == ()


async def test_a_stream_ends_on_a_closed_bus_and_works_after_reopening():
    bus = Bus()
    early = bus.stream("after_train_iter")
    async with bus:
        bus.publish(iteration(0))
    assert [event.batch_idx async for event in early] == [0]
    late = bus.stream("after_train_iter")
    with anyio.fail_after(5):
        assert [event async for event in late] == []
    assert bus.subscriptions == ()
    async with bus:
        again = bus.stream("after_train_iter")
        bus.publish(iteration(1))
    assert [event.batch_idx async for event in again] == [1]


async def test_it_ends_where_the_bus_closes_just_then():
    bus = Bus()
    closing = threading.Event()

    @bus.on("after_train_iter", offload="thread")
    def slow(event):
        closing.wait()

    await anyio.to_thread.run_sync(bus.open)
    bus.publish(iteration(0))
    async with anyio.create_task_group() as group:
        group.start_soon(bus.aclose)
        while bus.state != "draining":
            await anyio.sleep(0.001)
        stream = bus.stream("after_train_iter")
        closing.set()
        with anyio.fail_after(5):
            assert [event async for event in stream] == []


async def test_a_reader_in_another_task_gets_events_of_another_thread():
    bus = Bus()
    heard = []

    async def read(stream) -> None:
        heard.extend([event.batch_idx async for event in stream])

    def publish() -> None:
        for i in range(200):
            bus.publish(iteration(i))

    async with anyio.create_task_group() as group, bus:
        group.start_soon(read, bus.stream(AfterTrainIter, queue=5, full="block"))
        await anyio.to_thread.run_sync(publish)
    assert heard == list(range(200))


@pytest.mark.parametrize(("options", "kept"), [({}, [7, 8, 9]), ({"full": "latest"}, [9]), ({"full": "drop_new"}, [0, 1, 2])])
async def test_a_slow_reader_misses_events_and_blocks_no_publisher(options, kept):
    bus = Bus()
    async with bus:
        stream = bus.stream("after_train_iter", queue=3, **options)
        for i in range(10):
            bus.publish(iteration(i))
        assert stream.stats.dropped == 10 - len(kept)
    assert [event.batch_idx async for event in stream] == kept
    assert stream.stats.published == stream.stats.delivered + stream.stats.dropped


async def test_events_are_detached_and_capture_picks():
    bus = Bus()
    async with bus.stream(AfterTrainIter) as events, bus.stream(AfterTrainIter, capture=lambda e: e.batch_idx) as numbers:
        bus.publish(iteration(3, run=object()))
        event = await anext(events)
        with pytest.raises(LiveFieldError):
            _ = event.run
        assert await anext(numbers) == 3


@pytest.mark.parametrize("how", ["aclose", "async with", "forgotten"])
async def test_leaving_it_cancels_the_subscription(how):
    bus = Bus()
    stream = bus.stream("after_train_iter")
    bus.publish(iteration(0))
    bus.publish(iteration(1))
    if how == "async with":
        async with stream:
            async for _ in stream:
                break
    else:
        assert (await anext(stream)).batch_idx == 0
        if how == "aclose":
            await stream.aclose()
            await stream.aclose()
    if how != "forgotten":
        assert (stream.stats.delivered, stream.stats.dropped, stream.stats.pending) == (1, 1, 0)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    del stream
    while bus.subscriptions:
        await anyio.sleep(0.001)
    bus.publish(iteration(2))


async def test_a_publisher_waiting_for_a_reader_continues_when_it_leaves():
    bus = Bus()
    waits = threading.Event()

    def publish() -> None:
        bus.publish(iteration(0))
        waits.set()
        bus.publish(iteration(1))

    async with bus.stream("after_train_iter", queue=1, full="block") as stream, anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, publish)
        while not waits.is_set():
            await anyio.sleep(0.001)
        await stream.aclose()
    assert stream.stats.published == stream.stats.dropped == 2


async def test_a_stream_can_be_read_after_a_cancellation():
    bus = Bus()
    stream = bus.stream("after_train_iter")
    with anyio.move_on_after(0.02):
        await anext(stream)
    bus.publish(iteration(5))
    assert (await anext(stream)).batch_idx == 5
    await stream.aclose()


async def test_misuse_is_a_clear_error():
    bus = Bus()
    with pytest.raises(SubscribeError, match="has no option batch="):
        bus.stream("after_train_iter", batch=3)
    with pytest.raises(UnknownEventError, match="did you mean"):
        bus.stream("after_trian_iter")
    with pytest.raises(BusStateError, match="needs a running event loop"):
        await anyio.to_thread.run_sync(bus.stream, "after_train_iter")
    async with bus.stream("after_train_iter") as stream, anyio.create_task_group() as group:
        group.start_soon(anext, stream)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(BusStateError, match="two tasks read the same stream"):
            await anext(stream)
        group.cancel_scope.cancel()
    assert bus.subscriptions == ()
