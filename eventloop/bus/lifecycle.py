"""The states of a bus: idle, open, draining, idle again; and the errors of offloaded handlers that are still to be raised."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self

from trainbus.eventloop import platform
from trainbus.eventloop.bus.directory import Directory
from trainbus.eventloop.bus.internal import Internal, raise_all
from trainbus.eventloop.bus.routes import Route
from trainbus.eventloop.bus.subscription import serve
from trainbus.eventloop.checks import check_value
from trainbus.eventloop.errors import BusStateError, OffloadError
from trainbus.eventloop.locks import is_held, may_wait, new_lock
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload import ENDED, Backend, Deadline, DrainReport, HostLoop, Runtime, in_thread
from trainbus.eventloop.privates import before_executors_end

_CLOSER_POLL = 0.01  # seconds between checks whether the other thread has closed the bus

State = Literal["idle", "open", "draining"]

log = get_logger()


class _Known(dict[type, Any]):
    """Compiled routes. An event without one counts as wanted: its publish compiles it, or raises an error that waits."""

    def __missing__(self, event: type) -> bool:
        return True


class Lifecycle:
    """The part of a bus that opens, drains and closes."""

    # Bus defines these; called under the lock.
    _end_streams: Callable[[], None]
    internal: Internal
    _attach: Callable[[], None]  # attaches hooks to watched modules, or removes them, as the state requires

    def __init__(self, *, backend: Backend, drain_timeout: float, abort_timeout: float) -> None:
        self._lock = new_lock()
        self._later: deque[Callable[[], object]] = deque()  # what the lock must not be held for
        self._directory = Directory()
        self.state: State = "idle"
        """``"idle"``, ``"open"`` or ``"draining"``."""
        self._routes: dict[type, Route | None] = {}  # publishing an event without an entry compiles its route
        self._known = _Known()  # the same routes, for callers that ask before they make an event
        self._changes = 0  # of subscriptions and routes
        self._backend: Backend = backend
        self._runtime: Runtime | None = None
        self._inert = False  # in a forked child
        self._over = False  # closed, and not opened again
        self._closer = 0  # the thread that closes it
        self.drain_timeout = drain_timeout
        self.abort_timeout = abort_timeout
        _buses.add(self)

    def _forget_routes(self) -> None:
        """Compile all routes anew; called under the lock."""
        self._changes += 1
        self._known.clear()
        self._routes.clear()

    def open(self) -> None:
        """Start the consumers of offloaded handlers, as ``with bus:`` does; raises BusStateError if the bus is open already."""
        self._open(Runtime(self._backend, self.internal.interrupt))

    def close(self, *, abort: bool = False) -> None:
        """Deliver pending events and end the consumers. Idempotent.

        Args:
            abort: wait for ``abort_timeout`` only; log undelivered events and errors instead of raising them.

        Raises:
            BusStateError: this is an offloaded handler of the same bus, or it was opened by ``async with bus:``.
            OffloadError: events were not delivered within ``drain_timeout``.
            Exception: the error of an offloaded handler with ``on_error="raise"`` (an ExceptionGroup of several errors).
        """
        self._outside("close", blocks=True)
        self._close(_CloseDeadline(self, abort=abort), hosted=False)

    async def aclose(self, *, abort: bool = False) -> None:
        """Close without blocking the event loop, as ``async with bus:`` does. If cancelled, continue as with ``abort=True``."""
        if self._outside("aclose", blocks=False) is not None:
            deadline = _CloseDeadline(self, abort=abort)
            await in_thread(partial(self._close, deadline), "trainbus closes", cancelled=deadline.abort)

    def drain(self, timeout: float | None = None) -> DrainReport:
        """Wait until everything published before this call is delivered, dropped or failed.

        Args:
            timeout: seconds; None waits without a limit. The report has the number of ``pending`` events.

        Raises:
            BusStateError: the bus is not open, this is an offloaded handler of the same bus, or its event loop.
            Exception: the error of an offloaded handler with ``on_error="raise"``; while a run is open, on its thread only.
        """
        runtime, deadline = self._drainable("drain", blocks=True), Deadline(timeout)
        self.internal.wait_for_saves(deadline)
        report = runtime.drain(deadline)
        self.internal.raise_failures()
        return report

    async def adrain(self, timeout: float | None = None) -> DrainReport:  # noqa: ASYNC109 - reports, and does not cancel
        """Drain without blocking the event loop, also a bus that runs on its own thread."""
        runtime = self._drainable("adrain", blocks=False)
        deadline = Deadline(timeout)

        def drain() -> DrainReport:
            self.internal.wait_for_saves(deadline)
            return runtime.drain(deadline)

        report = await in_thread(drain, "trainbus drains", cancelled=partial(deadline.shorten, 0))
        self.internal.raise_failures()
        return report

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.close(abort=error is not None)

    async def __aenter__(self) -> Self:
        await self._aopen()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        await self.aclose(abort=error is not None)

    def _become_inert(self) -> None:
        """Disable this copy of a bus in a forked child: it has no consumers, and its locks may be held for ever."""
        self._inert = self._over = True
        self._lock = new_lock()
        self._later.clear()
        if (training := self.internal.training) is not None:
            training.forked(self._refuse_in_fork)
        self.internal.training, self.internal.failures = None, {}
        self._runtime = None
        self.state = "idle"
        self._forget_routes()
        for subscription in self._directory.ordered():
            subscription.become_inert()

    # -------------------------------------------------------------------------------------------------- internals

    def _unlocked(self) -> None:
        """Do what the lock must not be held for, such as to log or to start threads.

        Called after each change. Where an outer call still holds the lock, that one does it.
        """
        if is_held(self._lock):
            return
        while self._later:
            with suppress(IndexError):  # another thread does it
                self._later.popleft()()
        if (runtime := self._runtime) is not None:
            runtime.start(self._interrupted)

    def _refuse_in_fork(self) -> None:
        raise BusStateError(
            "this bus was created before the process was forked, and its copy in the child calls no handler (nothing would be "
            "updated, saved or logged). Create bus, hooks and loop in the process that trains, or start that process "
            'by multiprocessing.get_context("spawn")'
        )

    def _drainable(self, call: str, *, blocks: bool) -> Runtime:
        runtime = self._outside(call, blocks=blocks)
        if runtime is None:
            raise BusStateError("only an open bus can be drained: use `with bus:` or `async with bus:`")
        if runtime.ended:
            raise BusStateError(f"this bus cannot be drained: {ENDED}")
        return runtime

    def _outside(self, call: str, *, blocks: bool) -> Runtime | None:
        """Return the runtime, if any; raise BusStateError on a thread that ``call`` must not wait on."""
        runtime = self._runtime
        if runtime is not None and self._interrupted():
            raise BusStateError(
                f"bus.{call}() was called by the handler of a signal, in the middle of another call on this bus, for which it "
                "would wait: have the handler set a flag, and call it outside of the handler"
            )
        if runtime is not None and runtime.inside:
            raise BusStateError(f"bus.{call}() was called from an offloaded handler of the same bus: it would wait for itself")
        if runtime is not None and blocks and runtime.in_host_loop:
            raise BusStateError(f"bus.{call}() would block the event loop that this bus runs in: use `await bus.a{call}()`")
        return runtime

    def _interrupted(self) -> bool:
        """Return True if this thread holds a lock of the bus: it runs the handler of a signal, or a finalizer."""
        if is_held(self._lock) or ((runtime := self._runtime) is not None and runtime.is_held()):
            return True
        return any(one.lane is not None and one.lane.is_held() for one in self._directory.copy())

    async def _aopen(self, *, if_idle: bool = False) -> bool:
        host = HostLoop(self.abort_timeout)
        runtime = Runtime(host, self.internal.interrupt)
        opened = False
        try:
            await host.begun.wait()  # so that nothing waits for the host's loop while it holds the lock
            work = partial(self._open, runtime, if_idle=if_idle)
            opened = await in_thread(work, "trainbus opens", cancelled=lambda: None)  # it ends at once
        except BaseException:
            if self._runtime is runtime:  # cancelled meanwhile
                await self.aclose(abort=True)
            raise
        finally:
            if not opened:
                host.stop(0)
        return opened

    def _open(self, runtime: Runtime, *, if_idle: bool = False) -> bool:
        try:
            with self._lock:
                if self._inert:
                    self._refuse_in_fork()
                if self._runtime is not None:
                    if if_idle:
                        return False
                    self._refuse_open(self._runtime)
                self.internal.failures = {}  # of an earlier session
                self._runtime = runtime  # first: what the handler of a signal subscribes in here starts its own consumer
                serve(runtime, self._directory.ordered())
                self.state = "open"
                self._over = False
                self._attach()
            self._unlocked()
        except BaseException:
            if self._runtime is runtime:
                self._shut(runtime, 1.0, abandon=True)
            raise
        return True

    def _refuse_open(self, runtime: Runtime) -> None:
        if runtime.ended:
            raise BusStateError(f"this bus is {self.state} already, but {ENDED}")
        where = " in an event loop by `async with bus:`" if runtime.hosted else ""
        raise BusStateError(f"this bus is {self.state}{where} already; the code that opened it closes it")

    def _close(self, deadline: _CloseDeadline, *, hosted: bool = True) -> None:
        closes = False
        try:
            with self._lock:
                runtime = self._runtime
                if runtime is None or self.state == "idle":  # idle: the handler of a signal, while this thread opens it
                    return
                if not hosted and runtime.hosted and not runtime.ended:
                    raise BusStateError("this bus was opened by `async with bus:`, which closes it when its block ends")
                # Without a closer, a draining bus is what Ctrl-C has left of an earlier close.
                closes = self.state == "open" or not self._closer
                if closes:
                    self.state, self._closer = "draining", threading.get_ident()
            if closes:
                self._end(runtime, deadline)
                return
            # Another thread closes it. The handler of a signal within this close must not wait for itself.
            may_wait("another thread that closes the bus")
            while self._runtime is runtime and threading.get_ident() != self._closer and deadline.left:
                time.sleep(min(_CLOSER_POLL, deadline.left))
        finally:
            if closes:
                # No call, which another Ctrl-C could skip
                # (https://docs.python.org/3/library/signal.html#note-on-signal-handlers-and-exceptions).
                self._closer = 0

    def _end(self, runtime: Runtime, deadline: _CloseDeadline) -> None:
        quiet = False
        try:
            quiet = runtime.drain_until_quiet(deadline)
        finally:
            left = self._shut(runtime, 5.0 if quiet else 1.0, abandon=not quiet)
            failures = self.internal.take_failures()
        if deadline.aborted:
            if left := {**left, **runtime.lost}:
                log.warning("events were not delivered before the bus closed", id="events-left-by-bus", events=left)
            return
        if runtime.lost:
            missed = _counts(runtime.lost)
            failures.append(
                BusStateError(f"the event loop of this bus ended, and the bus was not closed; events lost: {missed}")
            )
        if left:
            failures.append(
                OffloadError(
                    f"the bus closed with events undelivered after drain_timeout={self.drain_timeout:g} s: {_counts(left)}. "
                    "Give Bus a longer drain_timeout=, or reduce the work of these handlers"
                )
            )
        raise_all(failures)

    def _shut(self, runtime: Runtime, grace: float, *, abandon: bool) -> dict[str, int]:
        reason = "the bus has closed: events are published inside `with bus:` (or `async with bus:`)"
        try:
            return runtime.close(grace, reason, abandon=abandon)
        except BaseException:  # Ctrl-C: end the consumers that are still running
            runtime.close(0, reason, abandon=True)
            raise
        finally:
            with self._lock:
                self._end_streams()
                self._runtime = None
                self.state = "idle"
                self._over = True
                self._attach()
            self._unlocked()


class _CloseDeadline(Deadline):
    """The deadline until which closing waits for handlers. Another thread may abort it later."""

    def __init__(self, bus: Lifecycle, *, abort: bool) -> None:
        check_value("abort", abort, bool)
        super().__init__(bus.abort_timeout if abort else bus.drain_timeout)
        self._abort_timeout = bus.abort_timeout
        self.aborted = abort

    def abort(self) -> None:
        self.aborted = True
        self.shorten(self._abort_timeout)


def _counts(events: Mapping[str, int]) -> str:
    return ", ".join(f"{number} for {label}" for label, number in events.items())


_buses: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def forget_routes() -> None:
    """Have all buses compile their routes anew."""
    for bus in list(_buses):
        with bus._lock:
            bus._forget_routes()


def _stop_training(bus: Lifecycle) -> None:
    """End a run that a daemon thread still trains when the program ends, in order, instead of in the middle of torch's code."""
    training = bus.internal.training
    if training is None or training.ident == threading.get_ident():
        return
    log.warning(
        "the program ends while a daemon thread trains: this run is stopped; join() the thread to wait for it",
        id="daemon-thread-trains",
        run=training.run,
        iter=training.progress().iter,
    )
    training.forked(sys.exit)  # SystemExit ends a thread without a traceback
    deadline = Deadline(bus.abort_timeout)
    while bus.internal.training is training and deadline.left:
        time.sleep(_CLOSER_POLL)
    for thread in threading.enumerate():
        if thread.ident == training.ident:
            thread.join(deadline.left)


def _close_at_exit(*modes: str) -> None:
    """Close buses that are open; with ``modes``, those with a handler in one of these."""
    for bus in list(_buses):
        if modes and not any(one.mode in modes for one in bus._directory.copy()):
            continue
        _stop_training(bus)
        if bus.state != "idle":
            log.warning(
                "the interpreter exits while a bus is open; use `with bus:` so that nothing is lost", id="bus-open-at-exit"
            )
            bus._close(_CloseDeadline(bus, abort=True))


def _inert_after_fork() -> None:
    for bus in list(_buses):
        bus._become_inert()


atexit.register(_close_at_exit)
before_executors_end(partial(_close_at_exit, "process"))
platform.at_fork(in_child=_inert_after_fork)
