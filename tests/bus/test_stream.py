"""``bus.stream(...)``: a subscription as an async iterator."""

import gc
import signal
import threading
from functools import partial

import anyio
import pytest
import torch

from trainbus.eventloop import BusStateError, LiveFieldError, Progress, SubscribeError
from trainbus.eventloop.events import AfterTrainIter, CheckpointCommitted

from ..failing import fails
from ..handlers import held, iteration, publish_all

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_blocking")]


def committed(i: int) -> CheckpointCommitted:
    return CheckpointCommitted(progress=Progress(iter=i), path=f"{i}.safetensors")


async def iters(stream) -> list[int]:
    """All that is left in a stream, which has to end."""
    with anyio.fail_after(30):
        return [event.progress.iter async for event in stream]


async def test_a_stream_yields_filtered_events_of_each_mount_point_and_ends_when_the_bus_closes(bus):
    async with bus:
        stream = bus.stream("after_train_iter", "checkpoint_committed", every=2)
        for i in range(4):
            bus.publish(iteration(i))
            bus.publish(committed(i + 100))
    assert await iters(stream) == [1, 101, 3, 103]
    assert bus.subscriptions == ()


async def test_a_ctrl_c_handler_of_the_program_ends_no_stream_whatever_attributes_it_has(bus):
    class Program:
        should_exit = False

        def stop(self, number, frame):
            self.should_exit = True

    program = Program()
    former = signal.signal(signal.SIGINT, program.stop)
    try:
        signal.raise_signal(signal.SIGINT)
        assert program.should_exit
        async with bus:
            stream = bus.stream("after_train_iter")
            with anyio.fail_after(30):
                for at in range(3):
                    bus.publish(iteration(at))
                    assert (await anext(stream)).batch_idx == at
    finally:
        signal.signal(signal.SIGINT, former)


async def test_it_ends_where_the_bus_closes_just_then(bus):
    _, _, _, closing = held(bus)
    await anyio.to_thread.run_sync(bus.open)
    bus.publish(iteration(0))
    async with anyio.create_task_group() as group:
        group.start_soon(bus.aclose)
        while bus.state != "draining":
            await anyio.sleep(0.001)
        stream = bus.stream("after_train_iter")
        closing.set()
        assert await iters(stream) == []


@pytest.mark.parametrize("replay", [0, 2])
async def test_a_reader_in_another_task_gets_events_of_another_thread_which_waits_for_it(bus, replay):
    bus.keep("after_train_iter", last=2)
    publish_all(bus, range(replay))
    heard = []

    async def read(stream) -> None:
        heard.extend(await iters(stream))

    async with anyio.create_task_group() as group, bus:
        group.start_soon(read, bus.stream(AfterTrainIter, replay=replay, queue=5, full="block"))
        await anyio.to_thread.run_sync(publish_all, bus, range(replay, 200))
    assert heard == list(range(200))


async def test_events_are_detached_and_capture_picks(bus):
    async with bus.stream(AfterTrainIter) as events, bus.stream(AfterTrainIter, capture=lambda e: e.batch_idx) as numbers:
        bus.publish(iteration(3, run=object()))
        event = await anext(events)
        with pytest.raises(LiveFieldError):
            _ = event.run
        assert await anext(numbers) == 3


@pytest.mark.parametrize("how", ["aclose", "async with", "forgotten"])
async def test_leaving_it_cancels_the_subscription(bus, how):
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


async def test_a_stream_can_be_read_after_a_cancellation(bus):
    stream = bus.stream("after_train_iter")
    with anyio.move_on_after(0.02):
        await anext(stream)
    bus.publish(iteration(5))
    assert (await anext(stream)).batch_idx == 5
    await stream.aclose()


async def test_misuse_is_a_clear_error(bus):
    for options in ({}, {"replay": 1}):
        with pytest.raises(BusStateError):
            await anyio.to_thread.run_sync(partial(bus.stream, "after_train_iter", **options))
    async with bus.stream("after_train_iter") as stream, anyio.create_task_group() as group:
        group.start_soon(anext, stream)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(BusStateError):
            await anext(stream)
        group.cancel_scope.cancel()
    assert bus.subscriptions == ()


# ---------------------------------------------------------------------------------------------------------------- replay


async def test_a_late_stream_begins_with_the_last_events(bus):
    bus.keep("after_train_iter", "checkpoint_committed", last=3)
    async with bus:
        publish_all(bus, range(5))
        bus.publish(committed(5))
        late = bus.stream("after_train_iter", "checkpoint_committed", replay=3)
        two = bus.stream("checkpoint_committed", "after_train_iter", replay=2)
        live = bus.stream("after_train_iter", "checkpoint_committed")
        bus.publish(iteration(6))
        assert late.stats.pending == 4
    assert await iters(late) == [3, 4, 5, 6]
    assert await iters(two) == [4, 5, 6]
    assert await iters(live) == [6]
    assert (late.stats.delivered, late.stats.published) == (4, 4)


async def test_without_keep_events_are_kept_from_the_first_stream_to_the_last(bus):
    async with bus:
        bus.publish(iteration(0))
        first = bus.stream("after_train_iter", replay=2)
        publish_all(bus, (1, 2, 3))
        second = bus.stream("after_train_iter", replay=5)  # from now on five are kept
        publish_all(bus, (4, 5, 6))
        third = bus.stream("after_train_iter", replay=5)
        heard = [[(await anext(stream)).progress.iter for _ in range(n)] for stream, n in ((first, 6), (second, 5), (third, 5))]
        assert heard == [[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]
        for stream in (first, second, third):
            assert len(bus.subscriptions) == 1
            await stream.aclose()
        assert bus.subscriptions == ()
        assert not bus.wants("after_train_iter")
        bus.publish(iteration(7))
        again = bus.stream("after_train_iter", replay=5)
    assert await iters(again) == []


@pytest.mark.parametrize("replay", [0, 2])
async def test_a_stream_on_a_bus_that_has_closed_ends_and_works_after_reopening(bus, replay):
    kept = bus.keep("after_train_iter", last=2)
    async with bus:
        early = bus.stream("after_train_iter", replay=replay)
        publish_all(bus, range(3))
    assert await iters(early) == [0, 1, 2]
    for _ in range(2):
        assert await iters(bus.stream("after_train_iter", replay=replay)) == [1, 2][:replay]
    assert bus.subscriptions == (kept,)
    async with bus:
        again = bus.stream("after_train_iter", replay=replay)
        bus.publish(iteration(3))
    assert await iters(again) == [1, 2, 3][-1 - replay :]


async def test_a_stream_on_a_bus_that_was_never_open_waits_for_its_opening(bus):
    bus.keep("after_train_iter")
    bus.publish(iteration(0))
    heard: list[int] = []

    async def read(stream) -> None:
        async for event in stream:
            heard.append(event.progress.iter)  # noqa: PERF401 - while the list is looked at
        heard.append(-1)

    async with anyio.create_task_group() as group:
        group.start_soon(read, bus.stream("after_train_iter", replay=1))
        await anyio.wait_all_tasks_blocked()
        assert heard == [0]
        async with bus:
            bus.publish(iteration(1))
    assert heard == [0, 1, -1]


async def test_what_is_kept_has_passed_the_filter_and_the_capture(bus):
    def pick(event: AfterTrainIter) -> torch.Tensor:
        return event.batch["x"]

    bus.keep("after_train_iter", every=2, last=2, capture=pick)
    batch = {"x": torch.zeros(1)}
    async with bus:
        for i in range(6):
            batch["x"] += 1
            bus.publish(iteration(i, batch=batch))
        stream = bus.stream("after_train_iter", every=2, replay=2, capture=pick)
        batch["x"] += 10
        bus.publish(iteration(7, batch=batch))
    assert [tensor.item() async for tensor in stream] == [4.0, 6.0, 16.0]


@pytest.mark.parametrize(
    "other", [{"every": 3}, {"every": 2, "after": 1}, {"capture": len}, {"priority": 10}, {"every_seconds": 1}], ids=str
)
async def test_streams_with_other_options_have_a_history_of_their_own(bus, other):
    bus.keep("after_train_iter", every=2)
    publish_all(bus, range(6))
    stream = bus.stream("after_train_iter", replay=10, **other)
    assert stream.stats.pending == 0
    async with bus:
        pass
    assert await iters(stream) == []
    assert len(bus.subscriptions) == 1


@pytest.mark.parametrize("how", ["aclose", "forgotten"])
@pytest.mark.parametrize("replay", [0, 1])
async def test_leaving_a_stream_lets_a_publisher_that_waits_for_it_go_on(bus, how, replay):
    kept = bus.keep("after_train_iter", last=1)
    bus.publish(iteration(0))
    stream = bus.stream("after_train_iter", replay=replay, queue=1, full="block")
    if not replay:
        bus.publish(iteration(0))
    waits = threading.Event()

    def publish() -> None:
        waits.set()
        bus.publish(iteration(1))

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, publish)
        while not waits.is_set():
            await anyio.sleep(0.001)
        if how == "aclose":
            await stream.aclose()
            assert (stream.stats.published, stream.stats.pending) == (stream.stats.dropped, 0)
        else:
            del stream
            gc.collect()
    assert bus.subscriptions == (kept,)


async def test_to_cancel_what_is_kept_ends_its_streams(bus):
    with bus.keep("after_train_iter"):
        bus.publish(iteration(0))
        stream = bus.stream("after_train_iter", replay=1)
    assert await iters(stream) == [0]
    assert bus.subscriptions == ()
    bus.publish(iteration(1))
    bus.keep("after_train_iter")
    bus.publish(iteration(2))
    async with bus.stream("after_train_iter", replay=9) as again:
        assert (await anext(again)).progress.iter == 2


async def test_what_is_kept_was_asked_for_and_holds_up_neither_a_checkpoint_nor_a_drain(bus):
    bus.keep("after_val")
    assert not bus.internal.may_change_state("after_val")
    async with bus:
        async with bus.stream("after_train_iter"), bus.stream("after_train_iter", replay=0):
            bus.publish(iteration(0))
            assert [one.mode for one in bus.subscriptions] == ["history", "stream", "stream"]
        assert not bus.wants("after_train_iter")
        bus.keep("after_train_iter")
        async with bus.stream("after_train_iter", replay=1):
            bus.publish(iteration(0))
            assert (await bus.adrain()).pending == 0
    assert "history" in str(bus.describe())


@pytest.mark.parametrize(
    ("call", "events", "options", "named"),
    [
        ("stream", (), {"batch": 3}, "batch="),
        *(("stream", (), {"replay": replay}, "replay") for replay in (-1, 1.5, "all")),
        ("stream", (), {"replay": 10, "queue": 9}, "queue"),
        ("stream", (), {"replay": 10, "capture": len, "max_bytes": 9}, r"max_bytes=.*replay="),
        ("stream", (), {"replay": 10, "every": 5, "before": 2}, "every=5 before=2"),
        ("stream", (), {"replay": 10, "capture": 3}, "capture"),
        ("stream", ("after_trian_iter",), {}, "'after_trian_iter'.*'after_train_iter'"),
        ("keep", (), {"queue": 3}, r"queue=.*last, capture, priority"),
        ("keep", (), {"last": "all"}, "last"),
        ("keep", ("after_trian_iter",), {}, "'after_trian_iter'.*'after_train_iter'"),
    ],
)
async def test_options_that_cannot_work_are_a_clear_error(bus, call, events, options, named):
    with pytest.raises(SubscribeError, match=named):
        getattr(bus, call)("after_train_iter", *events, **options)
    assert bus.subscriptions == ()


async def test_events_that_cannot_be_kept_fail_at_the_publish(bus):
    bus.keep("after_train_iter", capture=fails(ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        bus.publish(iteration(0))
