import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainbus.eventloop import Bus, Event, Progress, SubscribeError
from trainbus.eventloop.events import AfterRun, AfterTrainIter, BeforeRun
from trainbus.eventloop.events.event import resolve
from trainbus.eventloop.seams import CLOCK


def heard(filters: dict, counts: range = range(1, 31)) -> list[int]:
    """The counts at which a handler with these filters is called."""
    calls: list[int] = []
    bus = Bus()
    bus.on(AfterTrainIter, lambda event: calls.append(event.progress.iter + 1), **filters)
    for count in counts:
        bus.publish(AfterTrainIter(progress=Progress(iter=count - 1)))
    return calls


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"once": 7}, [7]),
        ({"once": range(28, 40)}, [28, 29, 30]),
        ({"when": lambda event: event.progress.iter == 4}, [5]),
        ({"every": 5, "when": lambda event: event.progress.iter > 10}, [15, 20, 25, 30]),
    ],
)
def test_filters_fire_at(filters, expected):
    assert heard(filters) == expected


@given(
    every=st.none() | st.integers(1, 9),
    after=st.none() | st.integers(0, 20),
    before=st.none() | st.integers(1, 30),
    once=st.none() | st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_filters_agree_with_their_formula(every, after, before, once):
    options = {"every": every, "after": after, "before": before, "once": once}
    filters = {name: value for name, value in options.items() if value is not None}
    a, n = after or 0, every or 1
    expected = [
        v
        for v in range(1, 200)
        if v > a and (v - a) % n == 0 and (before is None or v < before) and (once is None or v in once)
    ]
    if expected:
        assert heard(filters, range(1, 200)) == expected
    else:
        with pytest.raises(SubscribeError):
            heard(filters)


@pytest.mark.parametrize(
    ("event", "at", "before_it"),
    [
        ("after_train_iter", {"iter": 4}, {"iter": 3}),
        ("after_backward", {"iter": 4}, {"iter": 3}),
        ("after_train_epoch", {"epoch": 4, "iter": 99}, {"epoch": 3, "iter": 4}),
        ("after_optimizer_step", {"update": 4, "iter": 99}, {"update": 3, "iter": 4}),
        ("after_val_iter", {"batch_idx": 4, "iter": 99}, {"batch_idx": 3, "iter": 4}),
        ("after_val", {"validation": 4, "epoch": 99}, {"validation": 3, "epoch": 4}),
    ],
)
def test_the_counter_depends_on_the_event(bus, event, at, before_it):
    calls: list[Event] = []
    bus.on(event, calls.append, once=5)
    for progress, number in ((before_it, 0), (at, 1)):
        bus.publish(resolve(event)(progress=Progress(**progress)))
        assert len(calls) == number


def test_filters_count_progress_across_a_resume():
    assert heard({"every": 10}, range(18, 31)) == [20, 30]


def test_other_events_count_their_publishes_and_the_bus_saves_the_count():
    def publish(bus: Bus, times: int) -> list[int]:
        calls: list[int] = []
        bus.on(BeforeRun, lambda _: calls.append(number), every=3)
        for number in range(1, times + 1):  # noqa: B007 - the handler reads it
            bus.publish(BeforeRun(progress=Progress()))
        return calls

    first = Bus()
    assert publish(first, 4) == [3]
    second = Bus()
    second.load_state_dict(first.state_dict())
    assert publish(second, 6) == [2, 5]


def test_every_seconds_fires_first_and_then_after_its_interval_which_new_subscriptions_do_not_restart(bus, change):
    now = 100.0
    change(CLOCK, lambda: now)
    calls: list[tuple[float, str]] = []
    bus.on(Event, lambda event: calls.append((now, event.mount_point)), every_seconds=10)
    for now, event in (  # noqa: B007
        *((100.0, BeforeRun), (100.0, BeforeRun), (105.0, AfterRun), (109.9, AfterRun)),
        *((110.0, AfterRun), (111.0, BeforeRun), (130.0, BeforeRun)),
    ):
        bus.publish(event(progress=Progress()))
        bus.on(event, lambda _: None)
    assert calls == [(100.0, "before_run"), (110.0, "after_run"), (130.0, "before_run")]


def test_every_seconds_is_evaluated_after_other_filters(bus):
    calls: list[Event] = []
    bus.on(AfterTrainIter, calls.append, every_seconds=3600, every=5)
    for i in range(10):
        bus.publish(AfterTrainIter(progress=Progress(iter=i)))
    assert [event.progress.iter for event in calls] == [4]


async def judge(event):
    return False


def yields(event):
    yield False


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        *(
            ({name: value}, f"{name}={value!r}")
            for name, value in [
                *(("every", value) for value in (0, 2.5, True, "10")),
                *(("after", value) for value in (-1, "10")),
                *(("before", value) for value in (0, 1, "10")),
                *(("once", value) for value in (0, "12")),
                *(("every_seconds", value) for value in (0, "1", float("nan"))),
                ("when", 3),
            ]
        ),
        ({"once": [3, "4"]}, "once='4'"),
        ({"once": []}, r"once=\[\]"),
        ({"when": judge}, "when="),
        ({"when": yields}, r"when= .*`yield`"),
        ({"when": lambda event, run: True}, r"when= .*\(event, run\)"),
        ({"when": lambda: True}, r"when= .*\(\)"),
        ({"after": 5, "before": 6}, "after=5 before=6"),
        ({"every": 10, "before": 10}, "every=10 before=10"),
        ({"once": 3, "after": 3}, "after=3 once=3"),
        ({"once": 3, "every": 2}, "every=2 once=3"),
        ({"evry": 3}, "evry= .*every="),
        ({"zzz": 3}, "zzz= .*every"),
        ({"every": np.int64(3)}, "int64"),
    ],
)
def test_a_filter_that_cannot_work_is_an_error_when_subscribing(filters, message):
    def handler(event):
        raise AssertionError

    with pytest.raises(SubscribeError, match=message) as caught:
        Bus().on("after_train_iter", handler, **filters)
    assert "handler to after_train_iter" in str(caught.value)


def test_a_filter_that_always_agrees_is_none():
    assert Bus().on("after_train_iter", print, every=1, after=0).filter is None


def test_filters_describe_themselves():
    filters = {"every": 5, "after": 2, "before": 40, "once": [7, 12], "when": lambda event: True, "every_seconds": 30}
    text = str(Bus().on("after_train_iter", print, **filters).filter)
    assert text.startswith("every=5 after=2 before=40 once=[7, 12] when=")
    assert text.endswith("every 30s")


def test_an_event_that_counts_by_progress_needs_one(registry):
    class Strange(Event):
        counts = "iter"

    with pytest.raises(SubscribeError, match="progress"):
        Bus().on(Strange, print, every=3)
