"""Events whose fields are all plain go into a lane as they are, by a shorter way."""

import pytest

from eventloop import Bus, Event


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


@pytest.mark.parametrize("batch", [None, 16])
def test_they_arrive_as_the_objects_they_were_in_order(kind, batch):
    bus, seen = Bus(), []
    subscription = subscribe(bus, kind, seen, queue=7, batch=batch)
    marks = [Mark(number=i) for i in range(500)]
    with bus:
        for mark in marks:
            bus.publish(mark)
    if batch is not None:
        seen = [event for events in seen for event in events]
    assert len(seen) == 500
    assert all(got is sent for got, sent in zip(seen, marks, strict=True))
    assert subscription.stats.delivered == 500


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
