"""Events whose fields are all plain go into a lane as they are, by a shorter way."""

import contextvars

import pytest

from eventloop import Bus, Event

request_id = contextvars.ContextVar("request_id", default="none")


class Mark(Event):
    number: int


def subscribe(bus: Bus, kind: str, seen: list, **options):
    if kind == "thread":
        return bus.on(Mark, seen.append, offload="thread", **options)

    async def handler(event):
        seen.append(event)

    return bus.on(Mark, handler, **options)


@pytest.fixture(params=["thread", "async"])
def kind(request) -> str:
    return request.param


def test_they_arrive_as_the_objects_they_were_in_order(kind):
    bus, seen = Bus(), []
    subscription = subscribe(bus, kind, seen, queue=7)
    marks = [Mark(number=i) for i in range(500)]
    with bus:
        for mark in marks:
            bus.publish(mark)
    assert len(seen) == 500
    assert all(got is sent for got, sent in zip(seen, marks, strict=True))
    assert subscription.stats.delivered == 500


def test_the_publishers_context_variables_are_copied(kind):
    bus, seen = Bus(), []
    if kind == "thread":
        bus.on(Mark, lambda event: seen.append(request_id.get()), offload="thread")
    else:

        async def handler(event):
            seen.append(request_id.get())

        bus.on(Mark, handler)
    with bus:
        for name in ("a", "b"):
            token = request_id.set(name)
            bus.publish(Mark(number=0))
            request_id.reset(token)
    assert seen == ["a", "b"]


@pytest.mark.parametrize("batch", [None, 16])
def test_they_reach_batch_handlers(kind, batch):
    bus, seen = Bus(), []
    subscribe(bus, kind, seen, batch=batch)
    with bus:
        for i in range(100):
            bus.publish(Mark(number=i))
    got = seen if batch is None else [event for events in seen for event in events]
    assert [event.number for event in got] == list(range(100))


@pytest.mark.parametrize("options", [{}, {"queue": 2}, {"queue": 2, "full": "drop_old"}, {"batch": 16}])
def test_events_are_accounted_for_when_ctrl_c_interrupts_the_publisher(kind, options, ctrl_c):
    bus, seen = Bus(), []
    subscription = subscribe(bus, kind, seen, linger=0.0001, **options)
    with bus:
        ctrl_c.every(0.0003)
        for i in range(20_000):
            ctrl_c.publish(bus, Mark(number=i))
        ctrl_c.every(0)
        assert bus.drain(timeout=20).pending == 0
    assert ctrl_c.strikes
    stats = subscription.stats
    assert stats.published == stats.delivered + stats.dropped
    assert stats.failed == stats.pending == 0
    numbers = [event.number for event in (seen if "batch" not in options else [one for many in seen for one in many])]
    assert len(numbers) == stats.delivered
    assert 20_000 - ctrl_c.strikes <= stats.published <= 20_000
    assert numbers == sorted(set(numbers))
