import functools
import linecache
import pickle

import pytest
from structlog.testing import capture_logs
from torch.profiler import ProfilerActivity, profile

from trainbus.eventloop import Bus, Event, Hook, Progress
from trainbus.eventloop.bus import mark_ranges
from trainbus.eventloop.errors import LaneClosedError, SubscribeError
from trainbus.eventloop.events import AfterRun, AfterTrainEpoch, AfterTrainIter, AfterValIter, BeforeModuleForward, BeforeRun

from ..failing import fails
from ..handlers import offload
from ..waiting import until

EVENT = AfterTrainIter(progress=Progress(epoch=1, iter=7))


def lines(bus: Bus, event="after_train_iter") -> list[str]:
    return [line.strip() for line in bus.explain(event).splitlines()]


def noted(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_the_source_has_only_one_call_per_handler(bus):
    def first(event) -> None: ...
    def second(event) -> None: ...

    bus.on("after_train_iter", second, priority=60)
    bus.on("after_train_iter", first)
    calls = [line for line in lines(bus) if "(event)" in line and "#" in line]
    assert [call.split("(")[0] for call in calls] == ["first_0", "second_1"]
    assert "50 NORMAL: first, bus/test_routes.py:" in calls[0]
    source = bus.explain("after_train_iter")
    assert bus.explain("after_run") == "def after_run(event):\n    pass  # no subscriber\n"
    for unneeded in ("if ", "for ", "v =", "clock", "spent", "count"):
        assert unneeded not in source


def test_only_a_handler_with_a_filter_has_a_condition(bus):
    bus.on("after_train_iter", print, every=10, after=3)
    bus.on("after_train_iter", print)
    bus.on("after_train_iter", print, once=[1, 5])
    text = lines(bus)
    assert "v = event.progress.iter + 1" in text
    assert [line for line in text if line.startswith("if ")] == ["if v > 3 and (v - 3) % 10 == 0:", "if v in {1, 5}:"]
    bus.on("after_run", print, when=bool)
    assert "v =" not in bus.explain("after_run")
    assert any(line.startswith("if (got := _when_0(event))") for line in lines(bus, "after_run"))


def test_calls_can_be_ranges_of_a_profiler_of_your_own():
    class Fails(Hook):
        def after_train_iter(self, event):
            raise ValueError

    buses, calls = [Bus(), Bus(timing=True)], []
    for bus in buses:
        bus.on("after_train_iter", calls.append, every=8)
        bus.publish(EVENT)
    mark_ranges(True)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for bus in buses:
                bus.publish(EVENT)
                bus.add(Fails())
                with pytest.raises(ValueError) as caught:
                    bus.publish(EVENT)
                assert "in Fails.after_train_iter" in noted(caught.value)
    finally:
        mark_ranges(False)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["append, after_train_iter"] == 4
    assert counts["Fails, after_train_iter"] == 2
    assert not any("record_function" in bus.explain("after_train_iter") for bus in buses)
    assert len(calls) == 6


def test_timing_counts_calls_and_time_of_each_subscription():
    bus = Bus(timing=True)
    subscription = bus.on("after_train_iter", lambda event: sum(range(1000)))
    for bus.timing in (True, True, True, False):
        bus.publish(EVENT)
    assert subscription.stats.calls == 3
    assert subscription.stats.seconds > 0


NAMES_IN_ROUTES = [
    *("when", "due", "count", "blame", "event", "error", "spent", "isolate", "v", "print"),
    *("clock", "began", "end", "ended", "note", "pack", "number", "thread"),
]


@pytest.mark.parametrize("name", NAMES_IN_ROUTES)
def test_a_handler_can_have_any_name(name):
    calls = []
    namespace: dict = {"calls": calls}
    exec(f"def {name}(e): calls.append(e)", namespace)  # noqa: S102
    bus = Bus(timing=True)
    bus.on("after_train_iter", namespace[name], when=lambda event: True, every=8, every_seconds=1, on_error="log")
    bus.publish(EVENT)
    assert calls == [EVENT]


@pytest.mark.parametrize("name", ["two words", "x²", "line\nbreak", "ﬁne", "#1", "日本", "'''", "\\", "after_train_iter"])
def test_a_hook_can_have_any_name(bus, name):
    class Named(Hook):
        def __init__(self):
            self.name = name
            self.calls = []

        def after_train_iter(self, event):
            self.calls.append(event)

    bus.add(hook := Named())
    bus.publish(EVENT)
    assert hook.calls == [EVENT]


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"when": fails(RuntimeError("not ready"))}, RuntimeError, "in print ("),
        ({"offload": "thread"}, LaneClosedError, "in print (thread, priority 50"),
    ],
)
def test_an_error_in_a_predicate_or_of_a_hand_off_is_noted_too(bus, options, error, named):
    bus.on("after_train_iter", print, **options)
    with pytest.raises(error) as caught:
        bus.publish(EVENT)
    assert named in noted(caught.value)


def test_a_nested_publish_leaves_a_note_per_handler(bus):
    bus.on("after_run", fails(ValueError))

    @bus.on("after_train_iter")
    def outer(event):
        bus.publish(AfterRun(progress=Progress()))

    with pytest.raises(ValueError) as caught:
        bus.publish(EVENT)
    assert [note.split()[1] for note in caught.value.__notes__] == ["fail", "outer"]


@pytest.mark.parametrize(
    ("event", "moment"),
    [
        (AfterTrainEpoch(progress=Progress(epoch=1, iter=7)), "after_train_epoch, epoch 2"),
        (AfterValIter(progress=Progress(iter=8, batch_idx=2, stage="val")), "after_val_iter, batch 3, after iteration 8"),
        (AfterRun(progress=Progress(epoch=2, iter=8)), "after_run, after iteration 8"),
        (BeforeModuleForward(module_name="head"), "before_module_forward"),
    ],
)
def test_the_note_counts_as_the_event_does_and_from_one(bus, event, moment):
    bus.on(type(event), lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        bus.publish(event)
    assert noted(caught.value).endswith(f") at {moment}")


class Dumped(Event):
    """Can be pickled: it is of a module."""

    number: int


def test_c_code_called_from_a_route_can_import():
    bus, heard = Bus(), []
    bus.on(Dumped, pickle.dumps)
    bus.on(Dumped, lambda event: heard.append(event.number))  # an error of the one before would keep it from being called
    for number in range(3):
        bus.publish(Dumped(number=number))
    assert heard == [0, 1, 2]


async def later(event) -> None: ...


async def rows(event):
    yield event


def hiding(function):
    @functools.wraps(function)
    def call(event):
        return function(event)

    return call


class Returns(Hook):
    def after_train_iter(self, event):
        return later(event)


@pytest.mark.parametrize("handler", [lambda event: later(event) or None, hiding(later), lambda event: rows(event)])
def test_a_coroutine_that_a_plain_handler_returns_is_an_error_that_names_both(bus, handler):
    subscription = bus.on("after_train_iter", handler)
    with pytest.raises(SubscribeError, match=r"later|rows") as caught:
        bus.publish(EVENT)
    assert f"in {subscription.label} (inline" in noted(caught.value)


def test_a_coroutine_that_only_some_calls_return_is_found_too_and_is_no_answer_of_when():
    heard, bus = [], Bus(Returns(), timing=True)
    bus.on("after_train_epoch", lambda event: event.progress.epoch == 7 and later(event))
    bus.on("after_run", heard.append, when=lambda event: later(event))
    bus.publish(AfterTrainEpoch(progress=Progress(epoch=1)))
    for event in (AfterTrainEpoch(progress=Progress(epoch=7)), EVENT, AfterRun(progress=Progress())):
        with pytest.raises(SubscribeError, match="later"):
            bus.publish(event)
    assert not heard


@pytest.mark.parametrize("timeout", [None, 10.0])
@pytest.mark.parametrize("kind", ["thread", "async"])
def test_a_coroutine_that_an_offloaded_handler_returns_is_an_error(bus, kind, timeout):
    offload(bus, hiding(later), kind, timeout=timeout)
    with pytest.raises(SubscribeError, match="later"), capture_logs(), bus:
        bus.publish(EVENT)


def test_what_handlers_return_otherwise_is_ignored_and_that_of_one_annotated_with_none_is_not_looked_at():
    def given(event):
        return event.progress.iter

    class Callee:
        def __call__(self, event):
            if event.progress.iter:
                return

    class Silent(Hook):
        def after_train_iter(self, event: Event) -> None:
            heard.append(event)

    def silent(event: Event) -> "None":
        heard.append(event)

    bus, heard = Bus(), []
    for handler in (given, functools.partial(given), Callee(), heard.append, silent):
        bus.on("after_train_iter", handler)
    bus.add(Silent())
    bus.publish(EVENT)
    assert heard == [EVENT] * 3
    looked_at = [line.partition("_")[0] for line in lines(bus) if line.startswith("got = ")]
    assert len(looked_at) == 3, looked_at


def test_an_isolated_handler_does_not_swallow_an_offloaded_failure(bus):
    failing = bus.on("after_run", lambda event: 1 / 0, offload="thread")

    @bus.on("after_train_iter", on_error="log")
    def outer(event):
        until(lambda: failing.stats.failed)
        bus.publish(BeforeRun(progress=Progress()))

    with capture_logs() as logs, bus:
        bus.publish(AfterRun(progress=Progress()))
        with pytest.raises(ZeroDivisionError):
            bus.publish(EVENT)
    assert [line["handler"].partition(":")[0] for line in logs] == ["lambda at test_routes.py"]


def test_replaced_routes_are_removed_from_linecache(bus):
    before = {name for name in linecache.cache if name.startswith("<trainbus")}
    for _ in range(20):
        with bus.on("after_train_iter", lambda event: None):
            bus.publish(EVENT)
    assert len({name for name in linecache.cache if name.startswith("<trainbus")} - before) <= 1
