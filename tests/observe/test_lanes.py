"""What bus.costs() tells of lanes, and the warning of a full one."""

import threading
import time

import anyio
import pytest
import structlog
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.events import AfterTrainIter, BeforeRun
from trainbus.eventloop.offload import process

from ..handlers import held, publish_all
from ..offload import workers


def event(number: int = 0, do: float = 0.0) -> AfterTrainIter:
    return AfterTrainIter(progress=Progress(iter=number), outputs={"do": do})


def slow(event) -> None:
    time.sleep(0.002)


async def slow_async(event) -> None:
    await anyio.sleep(0.002)


@pytest.mark.parametrize(
    ("handler", "options"),
    [
        *((slow, {"offload": "thread", **more}) for more in ({}, {"batch": 4}, {"capture": bool}, {"timeout": 60})),
        (slow_async, {}),
        (workers.act, {"offload": "process"}),
    ],
    ids=["thread", "batch", "capture", "timeout", "async", "process"],
)
def test_a_lane_tells_its_time_depth_and_age(change, backend, handler, options):
    change(process.CONTEXT, workers.quick())
    bus = Bus(timing=True, backend=backend)
    bus.on("after_train_iter", handler, **options)
    with bus:
        publish_all(bus, range(10), event)
    [lane] = bus.costs().lanes
    assert (lane.name, lane.mount_points, lane.delivered) == (handler.__name__, ["after_train_iter"], 10)
    calls = -(-10 // options.get("batch", 1))
    assert lane.seconds >= (0 if handler is workers.act else calls * 0.002 * 0.5)
    assert 1 <= lane.depth_mean <= lane.depth_max <= 10
    assert 0 < lane.age_mean <= lane.age_max
    assert lane.waited == lane.dropped == 0


@pytest.mark.parametrize("full", ["drop_old", "drop_new", "latest"])
def test_dropped_events_are_told(full):
    bus, released = Bus(timing=True), threading.Event()
    bus.on("after_train_iter", lambda event: released.wait(), offload="thread", queue=2, full=full, linger=0)
    with capture_logs(), bus:
        publish_all(bus, range(20), event)
        released.set()
    [lane] = bus.costs().lanes
    assert lane.dropped + lane.delivered == 20
    assert lane.dropped >= 15
    assert lane.depth_max <= 2


def test_timing_can_change_while_events_are_queued(bus):
    _, heard, _, release = held(bus, number=lambda event: event.progress.iter, linger=0)
    with bus:
        for number in range(12):
            bus.timing = number % 4 in (1, 2)
            bus.publish(event(number))
        release.set()
    assert heard == [*range(12)]


def test_the_lane_of_a_cancelled_subscription_stays_in_the_costs():
    bus = Bus(timing=True)
    with bus:
        with bus.on("before_run", slow, offload="thread"):
            bus.publish(BeforeRun(progress=Progress()))  # a plain event is measured as well
        bus.publish(BeforeRun(progress=Progress()))
    assert [lane.delivered for lane in bus.costs().lanes] == [1]


@pytest.mark.anyio
async def test_streams_come_and_go_without_a_trace():
    bus = Bus(timing=True)
    names = []
    for _ in range(3):
        async with bus.stream("after_train_iter") as stream:
            bus.publish(event())
            assert (await anext(stream)).progress.iter == 0
        bus.costs()
        names.append(len(bus._recorder.names))
    assert len(set(names)) == 1
    assert bus.costs().lanes == []


# ------------------------------------------------------------------------------------------------------- the warning


def warnings(logs) -> list[dict]:
    return [line for line in logs if line.get("id") == "lane-full"]


BYTES = {"capture": lambda event: torch.zeros(100), "max_bytes": 1000}


@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("full", ["block", "drop_old", "drop_new"])
@pytest.mark.parametrize(("options", "named"), [({"queue": 4}, "4 events wait"), (BYTES, "max_bytes")])
def test_a_lane_that_fills_is_a_warning_once_with_both_speeds(options, full, named, timing):
    bus = Bus(timing=timing)
    bus.on("after_train_iter", slow, offload="thread", full=full, linger=0, **options)
    with capture_logs() as logs, bus:
        number = 0
        while not warnings(logs):  # when the first event is done
            bus.publish(event(number := number + 1))
        publish_all(bus, range(40), event)
    [line] = warnings(logs)
    assert line["log_level"] == "warning"
    assert line["handler"] == "slow (after_train_iter)"
    for words in (named, "training waits for it" if full == "block" else "events are dropped", "an event comes each"):
        assert words in line["event"]
    assert "takes" in line["event"] or "has not done one event" in line["event"]  # that on a machine that is very busy


@pytest.mark.anyio
async def test_a_lane_of_the_latest_event_or_a_stream_without_a_reader_is_no_warning(bus):
    bus.on("after_train_iter", slow, offload="thread", queue=1, full="latest", linger=0)
    with capture_logs() as logs:
        async with bus, bus.stream("after_train_iter", queue=2):
            publish_all(bus, range(40), event)
    assert warnings(logs) == []


def test_a_logger_that_publishes_to_the_full_lane_does_not_hang():
    bus, over = Bus(), []

    def publish_too(logger, name, line):
        if not over:
            over.append(line)
            bus.publish(event())
        raise structlog.DropEvent

    structlog.configure(processors=[publish_too])
    bus.on("after_train_iter", slow, offload="thread", queue=2, full="drop_new", linger=0)
    with bus:
        while not over:
            bus.publish(event())
    assert bus.state == "idle"
