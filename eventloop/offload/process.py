"""A worker process for the handlers of one consumer, by an executor: started at the first event, replaced when it dies.

What handlers get goes through an unnamed file, which ends with its processes: the executor's pipe takes five times as long.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from tempfile import TemporaryFile
from typing import Any, Final

import torch

from trainbus.eventloop import platform
from trainbus.eventloop.checks import check_returned
from trainbus.eventloop.errors import HandlerTimeoutError, OffloadError, WorkerDiedError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload.callers import Caller, timed_out
from trainbus.eventloop.offload.delivery import Delivery
from trainbus.eventloop.offload.importable import check_not_daemonic
from trainbus.eventloop.offload.snapshot import Pickler
from trainbus.eventloop.privates import process_of
from trainbus.eventloop.seams import Seam
from trainbus.eventloop.user_errors import add_note, text_of

_END = 3.0  # seconds for an idle worker to end in order (its atexit functions, its open files), before it is killed
CONTEXT: Final[Seam[BaseContext]] = Seam(multiprocessing.get_context("spawn"))
"""How worker processes are started."""
# Signals to the program, which its children get too (Ctrl-C, a scheduler's SIGTERM): the program decides when workers end.
_SIGNALS = platform.signals("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGBREAK")
_no_fork = threading.RLock()  # while a worker starts: a fork would hold the pipe whose end tells the executor of its death
platform.at_fork(before=_no_fork.acquire, in_parent=_no_fork.release, in_child=_no_fork.release)

log = get_logger()


class ProcessCaller(Caller):
    """Call handlers in a spawned process; ``timeout`` does not count the start of the process."""

    def __init__(self, label: str, deliveries: Sequence[Delivery]) -> None:
        super().__init__(label, deliveries)
        check_not_daemonic(label)
        self._handlers = {one.lane: one.handler for one in deliveries}
        self._lock = threading.Lock()  # between the thread of the lanes and interrupt()
        self._busy = self._refuses = False
        self._grace = _END
        self._process: Any = None

    def call(self, delivery: Delivery, what: Any) -> None:
        """Call the handler in the worker; start a worker if there is none."""
        if self._process is not None and wait([self._process.sentinel], 0):
            self._replace()
        with self._lock:
            if self._refuses:
                raise WorkerDiedError(f"{delivery.lane.label} was not called: the bus has closed")
            if starts := self._process is None:
                self._start()
            pid, self._busy = self._process.pid, True
        try:
            if starts:
                self._run(delivery)
            self._file.seek(0)
            Pickler(self._file, 5).dump(what)
            self._file.truncate()
            self._file.flush()
            answer = self._run(delivery, [*self._handlers].index(delivery.lane))
        finally:
            with self._lock:
                self._busy = False
        if answer is None:
            self._replace()
            self.call(delivery, what)
            return
        began, ended, error, pickled = answer
        if (meter := delivery.lane.meter) is not None:
            meter.record_work(pid, began, ended)
        if error is not None:
            with suppress(Exception):  # nothing was pickled, or its class exists in the worker only
                again = pickle.loads(pickled)  # noqa: S301 - from our own worker
                error = again if str(_described(again)) == str(error) else error
            raise error

    def interrupt(self, *, now: bool) -> None:
        """Kill the worker if it is at work (with ``now`` in any case); called when the bus closes."""
        with self._lock:
            self._refuses = True
            self._grace = 0.0 if now else self._grace
            if self._process is not None and (self._busy or now):
                self._process.kill()

    def stop(self) -> None:
        """End the worker, in order if it does so within a few seconds."""
        if self._process is not None and self._lose() == platform.KILLED and self._grace:
            log.warning("a worker process did not end in time and was killed", id="worker-killed", handler=self._label)

    def _start(self) -> None:
        handlers = pickle.dumps([*self._handlers.values()])  # first: fails where a name leads nowhere
        self._file = TemporaryFile()  # noqa: SIM115 - until the worker ends
        inherited = platform.inheritable(self._file.fileno())
        self._shared = inherited is not None
        self._executor = ProcessPoolExecutor(1, CONTEXT.value, _begin, (inherited, handlers))
        waiting = platform.block_signals(_SIGNALS)  # in the worker, until _begin
        try:
            with _no_fork:
                self._executor.submit(int)
        finally:
            platform.unblock_signals(waiting)
        self._process = process_of(self._executor)

    def _replace(self) -> None:
        log.warning(
            "a worker process ended between two events and is replaced",
            id="worker-replaced",
            handler=self._label,
            how=_how(self._lose()),
        )

    def _run(self, delivery: Delivery, number: int | None = None) -> Any:
        """Call the handler with this number in the worker; without one, wait until the worker has started.

        Return None if the worker had ended before, and got nothing. Its executor may know that while its sentinel does not
        tell any more: that of a fork server is read once.
        """
        try:
            if number is None:
                return self._executor.submit(int).result()
            try:
                future = self._executor.submit(_call, number, None if self._shared else self._content())
            except BrokenExecutor:
                return None
            return future.result(delivery.timeout)
        except TimeoutError:
            self._process.kill()
            self._lose()
            raise HandlerTimeoutError(timed_out(delivery, "its worker process was killed")) from None
        except BrokenExecutor:
            died = f"the worker process of {self._label} died ({_how(self._lose())})"
            if number is None:
                died += ", before it took any event: stderr says why. A script that uses worker processes is imported by them: "
                died += 'it must start its work under `if __name__ == "__main__":`'
            raise WorkerDiedError(died, started=number is not None) from None

    def _content(self) -> bytes:
        self._file.seek(0)
        return self._file.read()

    def _lose(self) -> int:
        """End the worker, kill it if that takes too long, and return its exit code."""
        with self._lock:
            process, self._process = self._process, None
        timer = threading.Timer(self._grace, process.kill)
        timer.start()
        self._executor.shutdown()
        timer.cancel()
        self._file.close()
        return int(process.exitcode)


def _how(code: int) -> str:
    return next((one.name for one in signal.Signals if one == -code), f"status {code}")


def _described(error: BaseException) -> OffloadError:
    return OffloadError(f"{type(error).__module__}.{type(error).__qualname__}: {text_of(error)}")


# ---------------------------------------------------------------------------------------------- in the worker process

_mine: list[Any] = []  # the descriptor of the file, and the handlers


def _begin(file: Connection | None, handlers: bytes) -> None:
    _mine[:] = file, pickle.loads(handlers)  # noqa: S301 - from the program
    for number in _SIGNALS:
        # A handler that does nothing, and not SIG_IGN, which programs started by the user's handler would inherit.
        platform.handle_signal(number, lambda *_: None)
    platform.unblock_signals(_SIGNALS)
    torch.set_num_threads(1)  # the training needs the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()  # killed, it tells its executor nothing, of whose pipe this process holds both ends
    os._exit(1)


def _call(number: int, sent: bytes | None) -> tuple[int, int, Exception | None, bytes]:
    file, handlers = _mine
    began, error, pickled = time.perf_counter_ns(), None, b""
    try:
        with BytesIO(sent) if sent is not None else open(file.fileno(), "rb", closefd=False) as data:
            data.seek(0)
            what = pickle.load(data)  # noqa: S301 - from the program
        check_returned(handlers[number](what))
    except BaseException as raised:  # noqa: BLE001 - also SystemExit, which the executor would raise in the program
        note = f"in the worker process {os.getpid()}:\n{''.join(traceback.format_exception(raised))}"
        error = _described(raised)
        for one in (raised, error):
            add_note(one, note)
        with suppress(Exception):
            pickled = pickle.dumps(raised) if isinstance(raised, Exception) else b""
    return began, time.perf_counter_ns(), error, pickled
