import functools
import pickle

import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Hook, Progress, SubscribeError, mount
from trainbus.eventloop.events import AfterRun, AfterTrainIter

from ..failing import fails

EVENT = AfterTrainIter(progress=Progress())


def ready_made(event):
    """A handler at module level, which pickle finds by its name."""


def test_as_a_decorator_on_returns_the_function_unchanged(bus):
    for events in (["after_train_iter"], [AfterTrainIter], ["after_train_iter", "after_val_iter", AfterTrainIter]):
        assert bus.on(*events, priority=3, every=2)(ready_made) is ready_made
    assert bus.subscriptions[-1].mount_points == ("after_train_iter", "after_val_iter")
    assert pickle.loads(pickle.dumps(ready_made)) is ready_made  # noqa: S301
    with pytest.raises(SubscribeError, match="None"):
        bus.on("after_train_iter", "after_val_iter", None)


def test_called_with_a_function_on_returns_its_subscription():
    subscription = Bus().on("after_train_iter", ready_made, priority="high")
    assert subscription.mount_point == "after_train_iter"
    assert subscription.handler is ready_made
    assert subscription.priority == 30
    assert subscription.active
    assert repr(subscription) == "<Subscription ready_made to after_train_iter, priority 30, inline>"


def test_cancel_ends_one_subscription_and_is_idempotent(bus):
    heard = []
    subscription, other = (bus.on("after_train_iter", heard.append) for _ in range(2))
    bus.publish(EVENT)
    subscription.cancel()
    subscription.cancel()
    bus.publish(EVENT)
    assert heard == [EVENT] * 3
    assert not subscription.active
    assert bus.subscriptions == (other,)


def test_a_subscription_ends_with_its_block_also_after_an_error(bus):
    with pytest.raises(KeyError), bus.on("after_train_iter", ready_made) as subscription:
        assert subscription.active
        raise KeyError
    assert bus.subscriptions == ()


def test_a_handler_may_be_any_callable_that_takes_the_event(bus):
    class Callee:
        def __init__(self):
            self.heard = []

        def __call__(self, event):
            self.heard.append(event)

        def method(self, event):
            self.heard.append(event)

    callee, heard = Callee(), []
    bus.on("after_train_iter", callee)
    bus.on("after_train_iter", callee.method)
    bus.on("after_train_iter", functools.partial(lambda prefix, event: heard.append(prefix), "p"))
    bus.on("after_train_iter", heard.append)
    bus.publish(EVENT)
    assert callee.heard == [EVENT, EVENT]
    assert heard == ["p", EVENT]
    labels = [subscription.label for subscription in bus.subscriptions]
    assert labels[:2] == ["Callee", "method"]
    assert labels[2].startswith("lambda at test_subscription.py:")
    assert labels[3] == "append"
    assert all("test_subscription.py:" in subscription.location for subscription in bus.subscriptions[:3])


async def asynchronous(event): ...


class AsyncCallee:
    async def __call__(self, event): ...


@pytest.mark.parametrize(
    "handler", [asynchronous, AsyncCallee(), functools.partial(asynchronous), functools.partial(AsyncCallee())]
)
def test_async_callables_are_offloaded_by_nature(handler):
    assert Bus().on("after_train_iter", handler).mode == "async"


def generator(event):
    yield event


async def async_generator(event):
    yield event


OFFLOADED = [("queue", 3), ("capture", bool), ("batch", 3), ("timeout", 1)]
OF_WRONG_VALUE = [
    *(("queue", 0), ("queue", True), ("batch", 0), ("full", "wait"), ("linger", -1), ("linger", float("nan")), ("capture", 3)),
    *((name, "3") for name in ("queue", "batch", "disable_after", "max_bytes", "timeout", "linger", "priority")),
]


@pytest.mark.parametrize(
    ("handler", "options", "named"),
    [
        (asynchronous, {"offload": "inline"}, "inline"),
        (asynchronous, {"offload": "thread"}, 'offload="thread"'),
        (ready_made, {"offload": "gpu"}, "offload='gpu'"),
        (generator, {}, "yield"),
        (async_generator, {}, "yield"),
        (lambda: None, {}, "the event"),
        (lambda event, more: None, {}, "event, more"),
        (lambda *, event: None, {}, "event"),
        (functools.partial(lambda event: None, 1), {}, "the event"),
        (lambda: None, {"offload": "thread", "batch": 3}, "a list of events"),
        (3, {}, "__call__"),
        (ready_made(EVENT), {}, r"bus.on\(..., f\)"),
        *((ready_made, {name: value}, f"{name}=") for name, value in OFFLOADED),
        (ready_made, {"full": "raise"}, 'offload="thread"'),
        *((ready_made, {"offload": "thread", name: value}, f"{name}={value!r}") for name, value in OF_WRONG_VALUE),
        (ready_made, {"offload": "thread", "capture": asynchronous}, "capture="),
        (ready_made, {"offload": "thread", "capture": generator}, "capture="),
        (ready_made, {"offload": "thread", "capture": lambda event, run: event}, r"capture= .*\(event, run\)"),
        (ready_made, {"offload": "thread", "max_bytes": 1000}, "max_bytes="),
        *((ready_made, {"offload": "thread", "capture": len, "max_bytes": size}, "max_bytes=") for size in (0, -1, True, 1.5)),
        *(
            (ready_made, {"offload": "thread", "timeout": seconds}, "timeout=")
            for seconds in (0, -1, True, float("nan"), float("inf"))
        ),
        (ready_made, {"on_error": "ignore"}, "on_error='ignore'"),
        (ready_made, {"disable_after": 0}, "disable_after=0"),
        (ready_made, {"disable_after": 2, "on_error": "raise"}, "disable_after="),
        (ready_made, {"priority": 101}, "priority=101"),
    ],
)
def test_a_subscription_that_cannot_work_is_an_error_that_names_the_cause(handler, options, named):
    with pytest.raises(SubscribeError, match=named):
        Bus().on("after_train_iter", handler, **options)


@pytest.mark.parametrize(("options", "calls"), [({"on_error": "log"}, 10), ({"disable_after": 3}, 3)])
def test_log_isolates_a_handler_and_counts_its_errors_and_disable_after_retires_it(bus, options, calls):
    heard = []

    def flaky(event):
        raise ValueError("flaky")

    subscription = bus.on("after_train_iter", flaky, **options)
    other = bus.on("after_train_iter", heard.append)
    with capture_logs() as logs:
        for _ in range(10):
            bus.publish(EVENT)
    assert len(heard) == 10
    assert subscription.stats.failed == calls
    failures = [entry for entry in logs if entry.get("id") == "handler-failed"]
    assert [entry["handler"] for entry in failures] == ["flaky"] * calls
    assert isinstance(failures[0]["exc_info"], ValueError)
    assert "in flaky (inline" in failures[0]["exc_info"].__notes__[0]
    assert subscription.active == (calls == 10)
    assert bus.subscriptions == ((subscription, other) if calls == 10 else (other,))
    assert (logs[-1].get("id") == "handler-retired") == (calls == 3)


def test_only_exceptions_are_isolated(bus):
    bus.on("after_train_iter", fails(SystemExit(3)), on_error="log")
    with pytest.raises(SystemExit):
        bus.publish(EVENT)


def test_off_takes_every_subscription_of_a_function_or_bound_method():
    class Callee:
        def method(self, event): ...

    bus, callee = Bus(), Callee()
    for handler in (ready_made, callee.method):
        bus.on("after_train_iter", handler)
        bus.on("after_run", handler)
    bus.on("after_run", print)
    bus.off(ready_made)
    bus.off(callee.method)
    assert [subscription.handler for subscription in bus.subscriptions] == [print]
    with pytest.raises(SubscribeError, match=r"ready_made"):
        bus.off(ready_made)


class HookWithAVeryLongNameThatLeavesNoRoomForFigures(Hook):
    @mount(offload="thread")
    def after_run(self, event): ...

    def before_run(self, event): ...


def test_the_stats_print_as_a_table_of_80_columns():
    bus = Bus(HookWithAVeryLongNameThatLeavesNoRoomForFigures())
    with bus:
        bus.publish(AfterRun(progress=Progress()))
    lines = str(bus.stats()).splitlines()
    assert lines[1].split() == ["handler", "delivered", "failed", "dropped", "pending"]
    at = lines.index("HookWithAVeryLongNameThatLeavesNoRoomForFigures, after_run")
    assert lines[at + 1].split() == ["1", "0", "0", "0"]
    assert lines[-1] == "inline handlers not counted (Bus(timing=True) counts their calls): 1"
    assert max(map(len, lines)) <= 80


def test_with_timing_the_table_of_stats_has_inline_handlers_and_their_seconds():
    bus = Bus(timing=True)
    bus.on("after_run", ready_made)
    bus.publish(AfterRun(progress=Progress()))
    [row] = [line.split() for line in str(bus.stats()).splitlines() if line.startswith("ready_made, after_run ")]
    assert row[2:6] == ["1", "0", "0", "0"]
    assert float(row[6]) >= 0
