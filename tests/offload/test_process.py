import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, HandlerTimeoutError, OffloadError, Progress, SubscribeError, Subscription
from trainbus.eventloop.errors import WorkerDiedError
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.offload import Owned

from ..handlers import publish_all
from ..waiting import until
from . import workers

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.usefixtures("no_worker_is_left", "quick_workers")


def deed(name: str, i: int = 0) -> AfterTrainIter:
    return AfterTrainIter(progress=Progress(iter=i), batch_idx=i, outputs={"do": float(workers.DEEDS.index(name))})


def acting(**options) -> tuple[Bus, Subscription]:
    """A bus with a worker that does what its events say."""
    bus = Bus()
    return bus, bus.on("after_train_iter", workers.act, offload="process", **options)


def error_of(deed_name: str) -> Exception:
    """Have a worker do something, and return the error that its bus raises."""
    bus, _ = acting()
    with capture_logs(), pytest.raises(Exception) as caught, bus:
        bus.publish(deed(deed_name))
    return caught.value


# ------------------------------------------------------------------------------------------------------------ spawned


SCRIPT = """
import multiprocessing, os, signal, sys, time, torch
from trainbus.eventloop import Bus, Progress
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.offload import Owned

class Mine(Exception): ...

def handler(values):
    print("worker", float(values["weight"].sum()), __name__, flush=True)
    if values["weight"][0] == 2:
        raise Mine("from the worker")

def main():
    bus = Bus()
    bus.on("after_train_iter", handler, offload="process", on_error="log", capture=lambda event: {"weight": event.run})
    caught = bus.on("after_run", print)
    with bus:
        for i in range(3):
            bus.publish(AfterTrainIter(run=torch.full((1000,), float(i)), progress=Progress()))
        STRIKE
        bus.drain()
        if child := os.fork():  # what a DataLoader does: the child must not end the parent's worker
            assert os.waitpid(child, 0)[1] == 0
        else:
            sys.exit()
        bus.publish(AfterTrainIter(run=torch.full((1000,), 3.0), progress=Progress()))
    print("end", [s.stats.delivered for s in bus.subscriptions], flush=True)

GUARD
"""


STRIKE = """while not (started := multiprocessing.active_children()):
            time.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(started[0].pid, number)  # before it takes an event
"""


@pytest.mark.long
def test_a_script_with_a_main_guard_uses_worker_processes_and_leaves_nothing_on_stderr(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("STRIKE", STRIKE).replace("GUARD", 'if __name__ == "__main__":\n    main()'))
    command = [sys.executable, "-W", "ignore", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*(f"worker {1000.0 * number} __mp_main__" for number in range(4)), "end [3, 0]"]
    assert "__main__.Mine: from the worker" in done.stderr.replace("__mp_main__", "__main__")
    for word in ("resource_tracker", "leaked", "BrokenPipe", "KeyError", "AssertionError"):
        assert word not in done.stderr


@pytest.mark.long
def test_a_script_without_a_main_guard_is_an_error_with_advice(tmp_path, script):
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT.replace("STRIKE", "").replace("GUARD", "main()").replace('on_error="log", ', "").replace("range(3)", "range(1)")
    )
    done = script(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')")
    assert done.returncode == 1
    assert "worker" not in done.stdout
    assert "WorkerDiedError" in done.stderr
    assert 'must start its work under `if __name__ == "__main__":`' in done.stderr


DAEMONIC = """
import multiprocessing
from trainbus.eventloop import Bus
from tests.offload import workers

def train(when):
    bus = Bus()
    try:
        if when == "before":
            bus.on("after_train_iter", workers.act, offload="process")
        with bus:
            if when == "after":
                bus.on("after_train_iter", workers.act, offload="process", on_error="log")
        print(when, "fine", flush=True)
    except Exception as error:
        print(when, type(error).__name__, error, flush=True)

for when in ("before", "after", "never"):
    process = multiprocessing.get_context("fork").Process(target=train, args=(when,), daemon=True, name="pool's")
    process.start()
    process.join()
"""


def test_a_daemonic_process_is_told_when_the_bus_opens_that_it_can_have_no_worker(script):
    before, after, never = script(DAEMONIC).stdout.splitlines()
    for line, when in ((before, "before"), (after, "after")):
        assert line.startswith(f'{when} SubscribeError offload="process" of act (after_train_iter): '), line
        assert "pool's" in line
        assert 'offload="thread"' in line
    assert never == "never fine"


# ---------------------------------------------------------------------------------------------- of a fork server


def test_an_error_in_the_worker_keeps_type_message_and_traceback():
    error = error_of("raise")
    assert type(error) is ZeroDivisionError
    assert str(error) == "in the worker"
    notes = "\n".join(error.__notes__)
    assert "workers.py" in notes
    assert "in do\n" in notes
    assert "in the offloaded (process) handler act of after_train_iter" in notes


def test_an_unpicklable_error_is_reported_by_name():
    error = error_of("raise something unpicklable")
    assert type(error) is OffloadError
    assert str(error).endswith("workers.UnpicklableError: this and that")
    assert "Traceback" in error.__notes__[0]


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ("exit", WorkerDiedError, "3"),
        ("kill", WorkerDiedError, "SIGKILL"),
        ("crash", WorkerDiedError, "SIGSEGV"),
        ("leave", OffloadError, "SystemExit: 5"),
        ("hang", HandlerTimeoutError, "timeout=0.3 s"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_reported_replaced_and_its_event_counted_as_failed(how, error, named):
    bus, subscription = acting(on_error="log", **{"timeout": 0.3} if how == "hang" else {})
    with capture_logs() as logs, bus:
        for i, what in enumerate(["nothing", how, "nothing", "nothing"]):
            bus.publish(deed(what, i))
    stats = subscription.stats
    assert (stats.published, stats.delivered, stats.failed) == (4, 3, 1)
    [found] = [entry["exc_info"] for entry in logs if "exc_info" in entry]
    assert type(found) is error
    assert "act" in str(found) + "".join(found.__notes__)
    assert named in str(found)


def test_a_worker_that_is_killed_between_two_events_costs_none():
    bus, subscription = acting(on_error="log")
    with capture_logs() as logs, bus:
        bus.publish(deed("nothing", 0))
        bus.drain()
        [worker] = multiprocessing.active_children()
        worker.kill()
        wait([worker.sentinel])
        bus.publish(deed("nothing", 1))
    assert [one.get("how", one) for one in logs] == ["SIGKILL"]
    assert subscription.stats.delivered == 2


def test_an_exit_by_exception_kills_a_worker_at_work():
    bus, subscription = acting()
    bus.abort_timeout = 0.05
    began = time.monotonic()
    with capture_logs(), pytest.raises(KeyError), bus:
        publish_all(bus, range(3), functools.partial(deed, "hang"))
        raise KeyError
    assert time.monotonic() - began < 60  # it hangs for ten minutes
    stats = subscription.stats
    assert stats.published == stats.failed + stats.dropped == 3


def test_a_cancelled_handler_gets_earlier_events_before_its_worker_ends(bus):
    with bus:
        with bus.on("after_train_iter", workers.act, offload="process") as subscription:
            publish_all(bus, range(10), functools.partial(deed, "nothing"))
        bus.drain()
        until(lambda: not multiprocessing.active_children())
    assert subscription.stats.delivered == 10


def test_a_bus_that_opens_again_starts_another_worker():
    bus, subscription = acting()
    for _ in range(2):
        with bus:
            bus.publish(deed("nothing", 0))  # in the same worker it would come twice, which is an error there
    assert subscription.stats.delivered == 2


def test_signals_for_the_program_do_not_end_a_worker():
    bus, subscription = acting()
    with bus:
        bus.publish(deed("nothing", 0))
        bus.drain()
        [worker] = multiprocessing.active_children()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU):
            os.kill(worker.pid, number)
        bus.publish(deed("nothing", 1))
    assert subscription.stats.delivered == 2


ENDS = """
import multiprocessing, os, signal, sys, warnings
from trainbus.eventloop.offload import process
from tests.offload.test_process import acting, deed
from tests.waiting import until

process.CONTEXT.value = multiprocessing.get_context("fork")  # which is quick
bus, subscription = acting(on_error="log")
bus.abort_timeout = 0.1
bus.open()
bus.publish(deed("nothing", 0))
bus.drain()
[worker] = multiprocessing.active_children()
print(worker.pid, flush=True)
"""


@pytest.mark.long
def test_a_worker_ends_with_a_program_that_is_killed(script):
    done = script(ENDS + "os.kill(os.getpid(), signal.SIGKILL)", cwd=ROOT)
    until(lambda: not Path(f"/proc/{done.stdout.strip()}").exists())


def test_a_program_that_leaves_its_bus_open_ends_although_a_handler_hangs(script):
    done = script(ENDS + 'bus.publish(deed("hang", 1)); until(lambda: subscription.stats.pending == 1)', cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
    assert "use `with bus:`" in done.stdout + done.stderr


def test_a_fork_of_the_program_neither_ends_nor_waits_for_the_worker(script):
    done = script(
        ENDS
        + """
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of a fork in a program with threads
if child := os.fork():
    _, status = os.waitpid(child, 0)
    bus.publish(deed("nothing", 1))
    bus.close()
    print(status, subscription.stats.delivered)
else:
    sys.exit()
""",
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout.splitlines()[1:], done.stderr) == (0, ["0 2"], "")


@pytest.mark.long
def test_forks_that_are_made_while_a_worker_starts_do_not_hide_its_death(script):
    done = script(
        """
        import os, signal, time
        from tests.offload.test_process import acting, deed
        from tests.waiting import meanwhile

        children = []

        def fork():  # as a DataLoader does for its workers
            if len(children) == 150:
                return time.sleep(0.01)
            if not (child := os.fork()):
                signal.pause()
            children.append(child)

        bus, subscription = acting(on_error="log")
        with bus:
            with meanwhile(fork):
                bus.publish(deed("nothing", 0))
                bus.drain()
            bus.publish(deed("kill", 1))
            print(bus.drain(20).pending, subscription.stats.failed, flush=True)
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        """,
        cwd=ROOT,
    )
    assert done.stdout == "0 1\n", done.stderr


def test_tensors_and_integers_of_any_size_arrive_as_they_were(bus):
    bus.on("after_train_iter", workers.check_values, offload="process", capture=lambda event: workers.values())
    bus.on("after_train_iter", workers.check_outputs, offload="process")
    with bus:
        for i in range(2):
            bus.publish(AfterTrainIter(progress=Progress(iter=i), outputs=workers.OUTPUTS))
    assert [one.stats.delivered for one in bus.subscriptions] == [2, 2]


def test_a_value_that_cannot_be_pickled_fails_its_event_and_no_other(bus, logs):
    captured = iter([[torch.ones(100_000), threading.Lock()], [torch.ones(1)]])
    subscription = bus.on(
        "after_train_iter", workers.is_one, offload="process", on_error="log", capture=lambda event: Owned(next(captured))
    )
    with bus:
        publish_all(bus, range(2), functools.partial(deed, "nothing"))
    assert (subscription.stats.failed, subscription.stats.delivered) == (1, 1)
    assert "lock" in str(logs[0]["exc_info"])


@pytest.mark.long
@pytest.mark.parametrize("closes_again", [False, True])
@pytest.mark.parametrize("where", ["drain_until_quiet", "close"])
def test_a_program_ends_after_ctrl_c_in_the_close_of_its_bus_and_may_close_it_again(script, where, closes_again):
    """Two of them: the second strikes in the first function that is called to clean up after the first."""
    done = script(
        f"""
        import multiprocessing, sys
        from trainbus.eventloop.offload import Runtime, process
        from tests.offload.test_process import acting, deed

        process.CONTEXT.value = multiprocessing.get_context("fork")  # which is quick

        def strike_again(frame, what, _):
            if what == "call" and "eventloop" in frame.f_code.co_filename:
                raise KeyboardInterrupt

        def struck(runtime, *arguments, **options):
            sys.setprofile(strike_again)
            raise KeyboardInterrupt

        bus, subscription = acting()
        bus.open()
        bus.publish(deed("nothing"))
        bus.drain()
        real = Runtime.{where}
        Runtime.{where} = struck
        try:
            bus.close()
        except KeyboardInterrupt:
            print("interrupted")
        Runtime.{where} = real
        if {closes_again}:
            bus.close()
        print(bus.state == "idle" or not {closes_again}, subscription.stats.delivered)
        """,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\nTrue 1\n"), done.stderr


def test_a_handler_whose_name_leads_nowhere_is_an_error_that_names_it(bus, monkeypatch, logs):
    subscription = bus.on("after_train_iter", workers.not_importable, offload="process", on_error="log")
    monkeypatch.delattr(workers, "not_importable")
    with bus:
        publish_all(bus, range(2), functools.partial(deed, "nothing"))
    assert "not_importable" in str(logs[0]["exc_info"])
    assert subscription.stats.failed == 2


def test_static_methods_of_hooks_run_in_workers(bus):
    bus.add(workers.ProcessHook())
    with bus:
        bus.publish(deed("nothing", 0))
    assert [one.label for one in bus.subscriptions] == ["ProcessHook.after_train_iter", "ProcessHook.after_run"]
    assert {one.mode for one in bus.subscriptions} == {"process"}
    assert bus.subscriptions[0].stats.delivered == 1


# --------------------------------------------------------------------------------------------------------- subscribing


class Callee:
    def __call__(self, event): ...

    def method(self, event): ...


@functools.cache
def decorated(event): ...


async def asynchronous(event): ...


def refused():
    def inner(event): ...

    yield (lambda event: None), "lambda"
    yield inner, "function"
    yield Callee().method, "@staticmethod"
    yield Callee(), "Callee"
    yield functools.partial(workers.act), "functools.partial"
    yield [].append, "method"
    yield decorated.__wrapped__, r"test_process\.decorated"
    yield asynchronous, "async"


@pytest.mark.parametrize(("handler", "named"), list(refused()))
def test_handlers_that_a_worker_cannot_import_are_refused_with_advice(handler, named):
    with pytest.raises(SubscribeError, match=named):
        Bus().on("after_run", handler, offload="process")


def test_a_function_of_an_interactive_session_is_refused(monkeypatch):
    session = types.ModuleType("__main__")
    exec("def handler(event): ...", vars(session))  # noqa: S102
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(SubscribeError):
        Bus().on("after_run", session.handler, offload="process")


def test_a_method_of_a_hook_must_be_static():
    with pytest.raises(SubscribeError, match=r"BoundHook.after_run.*@staticmethod"):
        Bus().add(workers.BoundHook())


def test_as_a_decorator_it_is_checked_before_its_name_is_bound():
    assert late_bound.__name__ == "late_bound"


bus_of_the_module = Bus()


@bus_of_the_module.on("after_run", offload="process")
def late_bound(event): ...


def test_describe_names_mode_queue_policy_budget_and_timeout(bus):
    options = {"queue": 8, "full": "drop_old", "timeout": 2.5, "max_bytes": 64_000_000, "capture": len}
    bus.on("after_run", workers.act, offload="process", **options)
    row = bus.describe().rows[0]
    assert row.mode == "offloaded: process"
    assert row.lane == "8 drop_old, 64.0 MB, 2.5 s"
    assert "process 8 drop_old, 64.0 MB, 2.5 s" in str(bus.describe())
