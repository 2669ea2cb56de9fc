"""What ``publish`` does: the first publish of an event compiles its route, the following ones look it up."""

import copy
import gc
import pickle
import threading
import traceback
import weakref

import pytest

from trainbus.eventloop import Bus, Event, Progress
from trainbus.eventloop.events import AfterRun, AfterTrainIter, AfterValIter, BeforeRun

from ..waiting import until

P = Progress(epoch=1, iter=7)
EVENT = AfterTrainIter(progress=P)
KINDS = (BeforeRun, AfterTrainIter, AfterValIter, AfterRun)


def recorder(log: list[str], name: str):
    return lambda event: log.append(name)


def warm(bus: Bus, event: Event = EVENT) -> None:
    for _ in range(3):
        bus.publish(event)


@pytest.mark.parametrize("numbers", [(1, 2, 3, 4), (4, 3, 2, 1), (0, 3, 3, 0)])
def test_every_event_reaches_its_own_handlers_however_many_each_has_and_those_of_its_group(bus, numbers):
    log: list[str] = []
    own = {kind: [f"{kind.__name__} {index}" for index in range(number)] for kind, number in zip(KINDS, numbers, strict=True)}
    for kind in KINDS:
        for name in own[kind]:
            bus.on(kind, recorder(log, name))

    def check(*more: str) -> None:
        for kind in KINDS * 3:
            log.clear()
            bus.publish(kind(progress=P))
            assert log == [*own[kind], *more]

    check()
    with bus.on(Event, recorder(log, "all"), priority="LOWEST"):
        check("all")
    check()


def test_publishing_what_is_no_event_is_an_error_and_of_a_class_it_shows_the_call(bus):
    bus.on(Event, lambda event: None)
    for _ in range(3):
        with pytest.raises(TypeError, match=r"Bus.publish\(\).*'progress'"):
            bus.publish(AfterTrainIter, progress=P)
        with pytest.raises(TypeError, match=r"publish\(AfterTrainIter\("):
            bus.publish(AfterTrainIter)
        for what in (3, "after_run", AfterRun, None):
            with pytest.raises(TypeError):
                bus.publish(what)
        warm(bus)


def test_a_stored_bound_publish_uses_new_subscriptions(bus):
    log: list[str] = []
    held = [bus.publish]
    for name in "abc":
        bus.on("after_train_iter", recorder(log, name))
        held.append(bus.publish)
        warm(bus)
        held.append(bus.publish)
    bus.off(bus.subscriptions[0])
    for publish in held:
        log.clear()
        publish(EVENT)
        assert log == ["b", "c"]
        publish(AfterRun(progress=P))


@pytest.mark.parametrize("options", [{}, {"every": 8, "on_error": "raise"}, {"when": bool}, {"every_seconds": 1e-9}])
@pytest.mark.parametrize("timing", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_an_error_is_noted_and_leads_to_the_users_line(options, timing, first):
    error = KeyError("mine")
    failing: list[bool] = []

    def broken(event):
        if failing:
            raise error  # the user's line

    calls: list[str] = []
    bus = Bus(timing=timing)
    bus.on("after_train_iter", recorder(calls, "before"), every=4)
    bus.on("after_train_iter", broken, **options)
    bus.on("after_train_iter", recorder(calls, "behind"), on_error="log")
    if not first:
        warm(bus)
    calls.clear()
    failing.append(True)
    with pytest.raises(KeyError) as caught:
        bus.publish(EVENT)
    assert calls == ["before"]
    assert caught.value is error
    (note,) = error.__notes__
    assert note.startswith("in broken (inline, priority 50, bus/test_publish.py:")
    assert note.endswith("at after_train_iter, epoch 2, iteration 8")
    assert error.__context__ is None
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__)]
    assert lines[-1].endswith("# the user's line")
    assert any("broken_1(event)  # 50 NORMAL: broken, bus/test_publish.py:" in line for line in lines)


def test_an_offloaded_failure_is_raised_by_the_next_publish_before_its_handlers(bus):
    log: list[str] = []
    failing = threading.Event()

    def broken(event):
        if failing.is_set():
            raise ValueError("offloaded")

    bus.on("after_train_iter", broken, offload="thread")
    bus.on("after_train_iter", recorder(log, "inline"), priority="LOW")
    with bus:
        warm(bus)
        bus.drain()
        failing.set()
        bus.publish(EVENT)
        until(lambda: bus.wants(BeforeRun))  # without subscribers: publishing still raises the stored error
        log.clear()
        with pytest.raises(ValueError, match="offloaded") as caught:
            bus.publish(EVENT)
        assert caught.value.__context__ is None
        assert log == []
        failing.clear()
        warm(bus)
        assert log == ["inline"] * 3


def test_two_buses_keep_their_handlers_to_themselves_when_both_have_published():
    log: list[str] = []
    one, other = Bus(), Bus()
    one.on("after_train_iter", recorder(log, "one"))
    other.on("after_train_iter", recorder(log, "other"))
    warm(one)
    warm(other)
    log.clear()
    one.publish(EVENT)
    other.publish(EVENT)
    Bus.publish(one, EVENT)
    assert log == ["one", "other", "one"]


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_or_pickling_a_bus_is_an_error(take):
    with pytest.raises(TypeError):
        take(Bus())


def test_a_subclass_may_override_publish():
    log: list[object] = []

    class Loud(Bus):
        def publish(self, event):
            log.append(event)
            super().publish(event)

    bus = Loud(timing=False)
    bus.on("after_train_iter", log.append)
    warm(bus)
    assert log == [EVENT, EVENT] * 3


def test_publish_may_be_patched_on_a_bus_and_back_again(bus, monkeypatch):
    log: list[str] = []
    bus.on("after_train_iter", recorder(log, "heard"))
    warm(bus)
    for target in (Bus, bus):
        with monkeypatch.context() as patch:
            patch.setattr(target, "publish", lambda *arguments: log.append("patched"))
            log.clear()
            bus.publish(EVENT)
            bus.on("after_train_iter", recorder(log, "second"))
            bus.wants("after_train_iter")
            bus.publish(EVENT)
            assert log == ["patched"] * 2
        bus.off(bus.subscriptions[-1])
        log.clear()
        warm(bus)
        assert log == ["heard"] * 3


# ------------------------------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("timing", [False, True])
def test_a_dropped_bus_is_collected(opened, timing):
    class Model: ...

    def use() -> list[weakref.ref]:
        model, bus = Model(), Bus(timing=timing)
        bus.on("after_train_iter", lambda event: (model, bus))
        if opened:
            bus.on("after_train_iter", lambda event: (model, bus), offload="thread")

            @bus.on("after_train_iter")
            async def handler(event, held=(model, bus)): ...

            with bus:
                warm(bus)
        else:
            warm(bus)
        if timing:
            bus.costs()
        return [weakref.ref(model), weakref.ref(bus)]

    left = use()
    gc.collect()
    assert [one() for one in left] == [None] * 2


def test_a_cancelled_handler_is_released_immediately(bus):
    class Handler:
        def __call__(self, event): ...

    handler = Handler()
    bus.on("after_train_iter", handler)
    warm(bus)
    gc.disable()
    try:
        bus.off(handler)
        left = weakref.ref(handler)
        del handler
        assert left() is None
    finally:
        gc.enable()
