import gc
import os
import sys
import threading

import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, ConfigurationError, Event, Hook, Progress, UnknownEventError
from trainbus.eventloop.events import AfterIter, AfterTrainIter, BeforeRun

from ..handlers import publish_all
from ..waiting import meanwhile, on_threads

P = Progress()


def test_handlers_run_in_order_of_priority_and_of_registration_by_whatever_name_they_are_subscribed(bus):
    log: list[str] = []
    for name, event, priority in [
        *(("a", "after_train_iter", 50), ("b", Event, "LOWEST"), ("c", "event", 0), ("d", AfterIter, "normal")),
        *(("e", "after_iter", 10), ("f", AfterTrainIter, 10), ("other", "after_val_iter", 7)),
    ]:
        bus.on(event, lambda _, name=name: log.append(name), priority=priority)
    bus.publish(AfterTrainIter(progress=P))
    assert log == ["c", "e", "f", "a", "d", "b"]


def test_publishing_works_from_any_thread_while_others_subscribe(bus):
    heard, barrier = [], threading.Barrier(4)
    bus.on("after_train_iter", lambda event: heard.append(event.batch_idx))

    def come_and_go():
        with bus.on("after_train_iter", lambda event: None):
            pass

    def publish(start):
        barrier.wait()
        publish_all(bus, range(start, start + 300))

    with meanwhile(come_and_go), meanwhile(come_and_go):
        on_threads(publish, *range(0, 1200, 300))
    assert sorted(heard) == list(range(1200))
    assert [i for i in heard if i < 300] == list(range(300))
    assert len(bus.subscriptions) == 1


def test_wants_returns_whether_an_event_has_subscribers(bus):
    for event in (AfterTrainIter, "after_train_iter"):
        assert not bus.wants(event)
        with bus.on("after_iter", print):
            assert bus.wants(event)
            assert not bus.wants(BeforeRun)
        assert not bus.wants(event)
    with pytest.raises(UnknownEventError):
        bus.wants("after_trian_iter")
    with pytest.raises(TypeError):
        bus.wants(int)


@pytest.mark.parametrize(
    ("option", "value"),
    [("backend", "curio"), ("timing", 1), ("drain_timeout", "60"), ("abort_timeout", -1), ("drain_timeout", float("nan"))],
)
def test_an_option_of_the_wrong_kind_is_an_error(option, value):
    with pytest.raises(ConfigurationError, match=rf"{option}={value!r}"):
        Bus(**{option: value})


def test_a_flag_that_is_a_text_is_an_error_also_later(bus):
    with pytest.raises(ConfigurationError, match="timing='no'"):
        bus.timing = "no"
    with pytest.raises(ConfigurationError, match="stats='no'"):
        bus.describe(stats="no")
    with bus, pytest.raises(ConfigurationError, match="abort='no'"):
        bus.close(abort="no")


def test_state_of_hooks_that_are_missing_on_either_side_is_a_warning(bus):
    with capture_logs() as logs:
        bus.load_state_dict({"hooks": {"Gone": {}}, "publishes": {}})
    assert logs[0]["hooks"] == ["Gone"]
    assert logs[0]["log_level"] == "warning"


# ------------------------------------------------------------------------------------------- processes that end or fork


@pytest.mark.long
def test_a_bus_that_is_open_at_interpreter_exit_delivers_warns_and_does_not_hang(script):
    """Nor does a handler that never returns."""
    done = script("""
        import threading
        from trainbus.eventloop import Bus, Progress
        from trainbus.eventloop.events import AfterRun
        bus, hanging, started = Bus(), Bus(abort_timeout=0.05), threading.Event()
        bus.on("after_run", lambda event: print("thread heard"), offload="thread")
        @bus.on("after_run")
        async def handler(event): print("task heard")
        hanging.on("after_run", lambda event: (started.set(), threading.Event().wait()), offload="thread")
        for one in (bus, hanging):
            one.open()
            one.publish(AfterRun(progress=Progress()))
        started.wait()
    """)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    for words in ("thread heard", "task heard", "the interpreter exits while a bus is open", "abandoned"):
        assert words in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_after_a_fork_the_childs_copy_is_inert(script):
    done = script("""
        import os, sys
        from trainbus.eventloop import Bus, Progress
        from trainbus.eventloop.events import AfterRun, BeforeRun
        P = Progress()
        bus = Bus()
        bus.on("after_run", lambda event: print("inline", flush=True))
        offloaded = bus.on("after_run", lambda event: print("offloaded", flush=True), offload="thread")
        with bus:
            bus.publish(BeforeRun(progress=P))
            lane, publish = offloaded.lane, bus.publish
            lane._lock.acquire()  # as a publisher on another thread might hold it
            pid = os.fork()
            if pid == 0:
                bus.publish(AfterRun(progress=P))
                publish(AfterRun(progress=P))
                assert not bus.wants(AfterRun)
                assert bus.state == "idle"
                offloaded.cancel()
                bus.close()
                print("child done", flush=True)
                sys.exit(0)
            lane._lock.release()
            _, status = os.waitpid(pid, 0)
            assert status == 0, status
            print("parent", flush=True)
            bus.publish(AfterRun(progress=P))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["child done", "parent"]
    assert done.stdout.count("inline") == 1
    assert done.stdout.count("offloaded") == 1
    assert "warn" not in done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_run_in_a_forked_process_warns_that_its_bus_is_inert(script):
    done = script("""
        import asyncio, os, sys
        from trainbus.eventloop import Bus, BusStateError, Run
        from tests.hooks.conftest import batches, make_loop, small_model

        def refused(call):
            try:
                call()
            except BusStateError as error:
                assert "spawn" in str(error), error
            else:
                raise AssertionError(call)

        def in_a_child(*calls):
            if (pid := os.fork()) == 0:
                status = 1
                try:
                    for call in calls:
                        refused(call)
                    status = 0
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0

        loop, model = make_loop(val_data=batches(1)), small_model()
        run = Run(loop.bus, model=model)
        in_a_child(loop.bus.open, loop.run, loop.validate, lambda: asyncio.run(loop.arun()), run.__enter__)
        assert loop.counters.iter == 0

        with Run(Bus(), model=model) as run:
            batches, epochs = iter(run.train([1, 2, 3])), run.epochs(2)
            next(epochs), next(batches)
            in_a_child(lambda: next(batches), lambda: next(epochs), lambda: list(run.validate([1])))
            assert next(batches) == 2
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["one definition", "lambdas", "objects", "hooks"])
def test_one_more_subscription_costs_the_same_among_many(name):
    """A bus of an application has thousands of them, and each that is made, cancelled or removed is looked for."""

    def made():
        def handler(event): ...

        handler = {"objects": Handler(), "lambdas": lambda event: None}.get(name, handler)
        handler.__module__ = "__main__"  # where a definition is looked for that this one replaces
        return handler

    class Handler:
        __module__ = "__main__"

        def __call__(self, event): ...

    class Told(Hook):
        __module__ = "__main__"

        def after_train_iter(self, event): ...

    def change():
        if name == "hooks":
            bus.off(bus.add(hook := Told()) or hook)
            return
        bus.on("after_train_iter", made()).cancel()
        bus.on("after_train_iter", handler := made())
        bus.off(handler)

    def calls():
        counted = []
        gc.disable()  # it calls finalizers of other tests' objects
        sys.setprofile(lambda frame, event, argument: counted.append(event))
        try:
            change()
        finally:
            sys.setprofile(None)
            gc.enable()
        return len(counted)

    bus = Bus()
    add = {"hooks": lambda: bus.add(type("Other", (Told,), {})())}.get(name, lambda: bus.on("after_train_iter", made()))
    add()
    change()
    few = calls()
    for _ in range(100):
        add()
    # Of hooks it is a look at each, and not at each pair.
    assert calls() == few if name != "hooks" else calls() < few + 100 * 100
    assert len(bus.subscriptions) == 101
