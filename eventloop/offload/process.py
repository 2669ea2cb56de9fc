"""A worker process for the handlers of one consumer: started at its first event, replaced when it dies or is killed.

It has both sides: the :class:`ProcessCaller` of the lane's thread, and :func:`serve`, the program of the worker.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import msgspec
import torch

from trainbus.eventloop.checks import check_returned
from trainbus.eventloop.errors import HandlerTimeoutError, OffloadError, SubscribeError, WorkerDiedError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload.callers import Caller, timed_out
from trainbus.eventloop.offload.delivery import Delivery
from trainbus.eventloop.offload.importable import Importable
from trainbus.eventloop.offload.parcel import SharedSegment, pack, unpack
from trainbus.eventloop.user_errors import add_note, contextmanager

_START = 300.0  # seconds for a worker to import its handler, on a busy machine
_END = 3.0  # seconds for an idle worker to end in order (its atexit functions, its open files), before it is killed
_spawn = multiprocessing.get_context("spawn")
# Signals to the program, which its children get too (Ctrl-C, a scheduler's SIGTERM): the program decides when workers end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

log = get_logger()


class ProcessCaller(Caller):
    """Call handlers in a spawned process; ``timeout`` does not count the start of the process."""

    def __init__(self, label: str, deliveries: Sequence[Delivery]) -> None:
        super().__init__(label, deliveries)
        _check_process(label)
        self._handlers = [(one.handler, cast("Importable", one.target), one.batch is not None) for one in deliveries]
        self._numbers = {one.lane: number for number, one in enumerate(deliveries)}
        self._lock = threading.Lock()  # between the thread of the lanes and interrupt()
        self._busy = False
        self._refuses = False
        self._end = _END
        self._process: _Process | None = None

    def call(self, delivery: Delivery, what: Any) -> None:
        """Call the handler in the worker; start a worker if there is none."""
        number = self._numbers[delivery.lane]
        with self._lock:
            if self._refuses:
                raise WorkerDiedError(f"{delivery.lane.label} was not called: the bus has closed")
            process, starts = self._process, False
            if process is None:
                for handler, target, _ in self._handlers:
                    target.check(handler)
                targets = [(target, batched) for _, target, batched in self._handlers]
                process = self._process = _Process(targets, f"trainbus {self._label}")
                starts = True
            self._busy = True
        try:
            if starts:
                self._wait_for_start(process)
            ticket = pack([what] if delivery.batch is None else what, process.segment)
            _send(process.pipe, msgspec.msgpack.encode((number, ticket)))
            reply = self._receive(process, delivery)
        finally:
            with self._lock:
                self._busy = False
        if (meter := delivery.lane.meter) is not None:
            meter.record_work(process.pid, reply.begun, reply.ended)
        if reply.kind:
            raise _error(reply, process.pid)

    def interrupt(self, *, now: bool) -> None:
        """Kill the worker if it is at work (with ``now`` in any case); called when the bus closes."""
        with self._lock:
            self._refuses = True
            if now:
                self._end = 0.0
            if self._process is not None and (self._busy or now):
                self._process.kill()

    def stop(self) -> None:
        """End the worker, in order if it does so within a few seconds."""
        process = self._process
        if process is not None and not self._lose(process, self._end) and self._end:
            log.warning("a worker process did not end in time and was killed", handler=self._label, pid=process.pid)

    def _wait_for_start(self, process: _Process) -> None:
        try:
            reply = self._receive(process)
        except WorkerDiedError as error:
            raise WorkerDiedError(
                f"{error}, before it took any event. A script that uses worker processes is imported by them: it must start "
                'its work under `if __name__ == "__main__":`. For another reason, see stderr',
                started=False,
            ) from None
        if reply.kind:
            self._lose(process)
            failure = WorkerDiedError(
                f"the worker process of {self._label} could not import its handler: {reply.kind}: {reply.message}",
                started=False,
            )
            add_note(failure, reply.traceback)
            raise failure

    def _receive(self, process: _Process, delivery: Delivery | None = None) -> Reply:
        """Return the reply to a call of a handler, or that the process has started."""
        ready = wait([process.pipe, process.death], _START if delivery is None else delivery.timeout)
        if not ready:
            self._lose(process, 0)
            late = f"the worker process of {self._label} did not start within {_START:g} s"
            raise HandlerTimeoutError(late if delivery is None else timed_out(delivery, "its worker process was killed"))
        data = _receive(process.pipe) if process.pipe in ready else b""
        if not data:
            self._lose(process)
            raise WorkerDiedError(f"the worker process of {self._label} died ({_how(process.code)})")
        return msgspec.msgpack.decode(data, type=Reply)

    def _lose(self, process: _Process, grace: float = _END) -> bool:
        with self._lock:
            self._process = None  # so that interrupt() finds none that is closed
        return process.end(grace)


def _check_process(label: str) -> None:
    """Raise SubscribeError if this process may not start another one."""
    here = multiprocessing.current_process()
    if here.daemon:
        raise SubscribeError(
            f'offload="process" of {label}: a daemonic process ({here.name}, as of a Pool or of Celery) may not start others. '
            'Give offload="thread", or train in a process that is not daemonic, such as one of '
            "concurrent.futures.ProcessPoolExecutor or of Celery's --pool=solo"
        )


class _Process:
    """A process that runs :func:`serve`, the pipe and the memory to talk to it."""

    def __init__(self, targets: list[Target], name: str) -> None:
        self.segment = SharedSegment()
        self.code = 0
        self.pipe, other = _spawn.Pipe()
        # A daemon, so that multiprocessing's own exit handler cannot wait for it.
        self._process = _spawn.Process(target=serve, args=(other, self.segment, targets), name=name, daemon=True)
        try:
            with blocked_in_children(SIGNALS, _spawn):  # until it is ready to take them; no signal goes to this thread anyway
                self._process.start()
        except BaseException:
            self.pipe.close()
            self.segment.close()
            raise
        finally:
            other.close()
        self.pid = int(self._process.pid or 0)
        # Not the sentinel, nor the end of the pipe: a process forked while this one started holds their other ends as well.
        self.death = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else os.dup(self._process.sentinel)
        _processes.add(self)

    def kill(self) -> None:
        self._process.kill()

    def end(self, grace: float) -> bool:
        """End the worker in order within ``grace`` seconds, else kill it; return False if it was killed."""
        _send(self.pipe, b"")
        in_order = bool(wait([self.death], grace))
        if not in_order:
            self._process.kill()
        self._process.join()
        _processes.discard(self)
        self.code = self._process.exitcode or 0
        self._process.close()
        self.pipe.close()
        os.close(self.death)
        self.segment.close()
        return in_order


def _error(reply: Reply, pid: int) -> Exception:
    error: Exception = OffloadError(f"{reply.kind}: {reply.message}")
    if reply.error:
        with suppress(Exception):  # its module may exist in the worker only
            error = pickle.loads(reply.error)  # noqa: S301 - from our own worker
    add_note(error, f"in the worker process {pid}:\n{reply.traceback}")
    return error


def _how(code: int) -> str:
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"


@contextmanager
def blocked_in_children(signals: Collection[signal.Signals], context: Any) -> Iterator[set[int | signal.Signals]]:
    """Block signals on this thread, and so in the processes that it forks or spawns meanwhile.

    Yields the signals that were blocked before, and are again afterwards.

    Args:
        signals: the signals to block.
        context: ``multiprocessing`` itself, or one of its contexts, by which the processes are started.
    """
    method = context.get_start_method()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # first: when that starts its process, it unblocks SIGINT and SIGTERM
        if method == "forkserver":
            forkserver.ensure_running()  # first: it would block them for good, and in all that it ever forks
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


Target = tuple[Importable, bool]
"""How a worker finds a handler, and whether it gets lists."""

_processes: set[_Process] = set()  # that may be running


def _forget_after_fork() -> None:
    for process in list(_processes):
        # It is not a child of the forked process, which must not end it when it exits.
        multiprocessing.process._children.discard(process._process)  # type: ignore[attr-defined]
    _processes.clear()


def _kill_at_exit() -> None:
    """Kill the workers of buses that Ctrl-C kept from closing: they ignore SIGTERM, by which multiprocessing ends them."""
    for process in list(_processes):
        with suppress(ValueError):  # it is closed already
            process.kill()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_kill_at_exit)  # called before what multiprocessing.util has registered, and after buses are closed at exit


# ---------------------------------------------------------------------------------------------- in the worker process


class Reply(msgspec.Struct, array_like=True):
    """The outcome of a call: class and text of its error, and the error itself if it can be pickled and unpickled."""

    kind: str = ""  # empty: it returned
    message: str = ""
    traceback: str = ""
    error: bytes = b""
    begun: int = 0  # in nanoseconds of perf_counter_ns, which all processes of a machine share
    ended: int = 0


def serve(pipe: Connection, segment: SharedSegment, targets: list[Target]) -> None:
    """Import the handlers, and call one for each parcel until the other side sends an empty message or ends."""
    for number in SIGNALS:
        # A handler that does nothing, and not SIG_IGN, which programs started by the user's handler would inherit.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # a read in the handler's C code continues
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the parent until now
    torch.set_num_threads(1)  # the training needs the others
    _send(pipe, _outcome(lambda: [target.load() for target, _ in targets]))
    while message := _receive(pipe):
        _send(pipe, _outcome(partial(_call, targets, message, segment)))


def _call(targets: list[Target], message: bytes, segment: SharedSegment) -> None:
    number, ticket = msgspec.msgpack.decode(message)
    target, batched = targets[number]
    items = unpack(ticket, segment)
    check_returned(target.load()(items if batched else items[0]))


def _outcome(work: Callable[[], object]) -> bytes:
    reply = Reply()
    begun = time.perf_counter_ns()
    try:
        work()
    except Exception as error:  # noqa: BLE001 - sent to the other process
        kind, text = type(error), "".join(traceback.format_exception(error))
        reply = Reply(f"{kind.__module__}.{kind.__qualname__}", str(error), text, _pickled(error))
    reply.begun, reply.ended = begun, time.perf_counter_ns()
    return msgspec.msgpack.encode(reply)


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        again = pickle.loads(data)  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - an exception may be made of anything; its name and text are sent anyway
        return b""
    # Some come back as another: those whose __init__ makes the message, from arguments that args does not hold.
    return data if type(again) is type(error) and str(again) == str(error) else b""


def _receive(pipe: Connection) -> bytes:
    """Return the next message; an empty one if the other side has ended."""
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return b""


def _send(pipe: Connection, message: bytes) -> None:
    """Send a message. Ignored if the other side has ended, which the next :func:`_receive` reports."""
    with suppress(OSError):
        pipe.send_bytes(message)
