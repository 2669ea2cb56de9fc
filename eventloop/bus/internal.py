"""``bus.internal``: what runs, bridges, subscriptions and observers use of a bus, and its users do not."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from trainbus.eventloop.bus.hook import Hook
from trainbus.eventloop.bus.hosts import Attachment
from trainbus.eventloop.bus.priority import PriorityLike
from trainbus.eventloop.bus.routes import caller
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.eventloop.errors import BusStateError, LaneFullError
from trainbus.eventloop.events import Event, Progress
from trainbus.eventloop.events.event import resolve
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload import Backend, Deadline, HookLanes, Runtime

log = get_logger()

_joined = itertools.count(1)  # runs with other ranks; equal on all of them


class _TrainingThread(NamedTuple):
    """A thread with an open run."""

    ident: int
    run: str
    interrupt: Callable[[], object]
    forked: Callable[[Callable[[], object]], object]
    progress: Callable[[], Progress]
    saved: Callable[[float], object]
    patience: Callable[[], Deadline]


class _Bus(Protocol):
    """The members of a bus that its internal part shares with it; the lock guards them."""

    _later: deque[Callable[[], object]]
    _backend: Backend
    _runtime: Runtime | None
    _recorder: Any
    _rank: int
    _world_size: int
    _joined: int
    drain_timeout: float

    @property
    def _lock(self) -> AbstractContextManager[Any]: ...
    @property
    def subscriptions(self) -> tuple[Subscription, ...]: ...
    def _open(self, runtime: Runtime, *, if_idle: bool = False) -> bool: ...
    async def _aopen(self, *, if_idle: bool = False) -> bool: ...
    def _add(self, chosen: Iterable[tuple[object, PriorityLike | None]]) -> None: ...
    def _remove(self, *subscriptions: Subscription) -> None: ...
    def _subscribers_of(self, event_type: type[Event]) -> Sequence[Subscription]: ...
    def _join_ranks(self) -> None: ...
    def _forget_routes(self) -> None: ...
    def _unlocked(self) -> None: ...


class Internal:
    """The part of a bus for the rest of trainbus."""

    def __init__(self, bus: _Bus, route_of: Callable[[type], object]) -> None:
        self._bus = bus
        self.training: _TrainingThread | None = None
        """The thread of the open run, on which failures are raised."""
        self.failures: dict[object, BaseException] = {}
        """The first errors that are not raised yet, by their sources."""
        self.route_of = route_of
        """``route_of(AfterForward)`` is falsy if a publish does nothing: :meth:`Bus.wants` at the cost of a dictionary."""
        self.steps: dict[str, Callable[..., Any]] = {}
        """The step functions of the open run by name, such as ``{"step": train}``, where a loop calls them."""
        self.bridges: tuple[Attachment, ...] = ()

    # -------------------------------------------------------------------------------------------------------- runs

    def join(self) -> bool:
        """Open the bus if it is idle, and return whether this call did."""
        bus = self._bus
        return bus._open(Runtime(bus._backend, self.interrupt), if_idle=True)

    async def ajoin(self) -> bool:
        """Open the bus in this event loop if it is idle, and return whether this call did."""
        return await self._bus._aopen(if_idle=True)

    @property
    def hosted_here(self) -> bool:
        """True on the thread whose event loop ``async with bus:`` uses, which must not block."""
        runtime = self._bus._runtime
        return runtime is not None and runtime.in_host_loop

    def adopt_thread(
        self,
        run: str,
        interrupt: Callable[[], object],
        forked: Callable[[Callable[[], object]], object],
        progress: Callable[[], Progress],
        saved: Callable[[float], object],
        patience: Callable[[], Deadline],
    ) -> None:
        """Raise errors of offloaded handlers on this thread: a run is open on it.

        Args:
            run: name of the run, for the error.
            interrupt: called when the thread is about to wait for a slot in a lane; may raise an error instead.
            forked: called in a forked child, and as the program ends, where the run must not continue, with a function that
                raises an error.
            progress: returns the progress of the run; called on any thread.
            saved: waits until the checkpoints of the run are written, for at most that many seconds.
            patience: returns the deadline until which the run, as it ends, waits for the lanes of hooks.

        Raises:
            BusStateError: another run is open on this bus.
        """
        with self._bus._lock:
            if (other := self.training) is not None:
                threads = {one.ident: one.name for one in threading.enumerate()}
                raise BusStateError(
                    f"run {run!r} cannot begin, because run {other.run!r} is open on the same bus (thread "
                    f"{threads.get(other.ident, 'of the past')!r}), and each hook would hear both. Give each run its own Bus() "
                    f"with its own hooks, or first end run {other.run!r}: leave its `with` block, or call its drive.end_run()"
                )
            self.training = _TrainingThread(threading.get_ident(), run, interrupt, forked, progress, saved, patience)

    def release_thread(self, interrupt: Callable[[], object]) -> None:
        """Undo :meth:`adopt_thread` with the same ``interrupt``."""
        with self._bus._lock:
            if self.training is not None and self.training.interrupt == interrupt:
                self.training = None

    @property
    def progress(self) -> Progress | None:
        """The progress of the open run; None if no run is open."""
        training = self.training
        return None if training is None else training.progress()

    def interrupt(self) -> None:
        """Call the ``interrupt`` of the run that is open on this thread, if one is."""
        training = self.training
        if training is not None and training.ident == threading.get_ident():
            training.interrupt()

    def wait_for_saves(self, deadline: Deadline) -> None:
        """Wait until the open run, if any, has written its checkpoints."""
        training = self.training
        if training is not None:
            training.saved(deadline.left)

    def set_rank(self, rank: int, world_size: int) -> None:
        """Set the rank of this process, as a run does. The bus does not call handlers for other ranks."""
        bus = self._bus
        with bus._lock:
            if (rank, world_size) != (bus._rank, bus._world_size):
                bus._rank, bus._world_size = rank, world_size
                bus._forget_routes()
            if world_size > 1:
                bus._joined = next(_joined)
                bus._later.append(bus._join_ranks)
        bus._unlocked()

    def may_change_state(self, event: type[Event] | str, *, but: tuple[type[Hook], ...] = ()) -> bool:
        """Return True if an inline handler of ``event`` may change the state of a run (see :class:`Hook`'s ``observes``).

        Hooks of the classes ``but`` do not count.
        """
        found = [one for one in self._bus._subscribers_of(resolve(event)) if not isinstance(one.hook, but)]
        return any(one.mode == "inline" and not (one.hook is not None and one.hook.observes) for one in found)

    # ---------------------------------------------------------------------------------------------------- failures

    def fail(self, source: object, error: BaseException) -> None:
        """Raise ``error`` at the next publish or drain on the training thread, or at close.

        The training thread is the thread with an open run; without a run, any thread but the bus's own. The first error of a
        source (a subscription, the writer of checkpoints) is kept.
        """
        with self._bus._lock:
            self.failures.setdefault(source, error)
            # Without routes, the next publish of any event calls raise_failures, so that a publish need not check.
            self._bus._forget_routes()

    def raise_failures(self) -> None:
        """Raise the errors of offloaded handlers, if this is the thread to raise them on; the next publish would, too."""
        if self.raises_here():
            raise_all(self.take_failures())

    def raises_here(self) -> bool:
        """Return True if errors of offloaded handlers are to be raised on this thread."""
        if not self.failures:
            return False
        if (training := self.training) is not None:
            return threading.get_ident() == training.ident
        runtime = self._bus._runtime
        return runtime is None or not runtime.inside

    def take_failures(self) -> list[BaseException]:
        """Return the errors that are still to be raised, and forget them."""
        with self._bus._lock:
            failures, self.failures = list(self.failures.values()), {}
            return failures

    # ------------------------------------------------------------------------------------------------------- lanes

    def patience(self) -> Deadline:
        """Return the deadline until which the last calls of a hook wait for its lanes."""
        training = self.training
        return Deadline(self._bus.drain_timeout) if training is None else training.patience()

    def wait_for_lanes(self, lanes: HookLanes) -> None:
        """Wait until the lanes of a hook are empty, on a thread that may wait."""
        if (runtime := self._bus._runtime) is not None:
            wait_for(lanes, runtime, self.patience(), self.interrupt)

    def behind_lanes(self, undo: Callable[[], object]) -> Callable[[], object]:
        """Return a function that calls ``undo``, if a hook's method calls this, when the lanes of the hook are empty."""
        found = calling_hook(self._bus)
        if found is None or found.siblings is None or not callable(undo):
            return undo
        return Last(partial(self.wait_for_lanes, found.siblings), undo)

    # ----------------------------------------------------------------------------------------------- subscriptions

    def add_chosen(self, chosen: Iterable[tuple[object, PriorityLike | None]]) -> None:
        """Add hooks with a priority each (None for the hook's own): all hooks, or none if one is invalid."""
        self._bus._add(chosen)

    def remove(self, *subscriptions: Subscription) -> None:
        """End subscriptions that are still active."""
        self._bus._remove(*subscriptions)

    def add_bridge(self, bridge: Attachment) -> None:
        """Pass all present and later subscriptions to a bridge."""
        with self._bus._lock:
            self.bridges = (*self.bridges, bridge)
            self._bus._later.append(partial(bridge.warn_of_missing, self._bus.subscriptions))
        self._bus._unlocked()

    def remove_bridge(self, bridge: Attachment) -> None:
        """Undo :meth:`add_bridge`."""
        with self._bus._lock:
            self.bridges = tuple(one for one in self.bridges if one is not bridge)

    # ------------------------------------------------------------------------------------------------ measurements

    @property
    def recorder(self) -> Any:
        """The :class:`trainbus.observe.BusRecorder` while calls are measured, else None."""
        return self._bus._recorder

    def count_calls(self) -> None:
        """Bring the counts of calls of all subscriptions up to date."""
        if (recorder := self._bus._recorder) is not None:
            recorder.drain()


def raise_all(failures: list[BaseException]) -> None:
    """Raise one error as it is, several as a group; return if there is none."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup("several offloaded handlers failed", failures)


class Last:
    """A deferred function of a hook with lanes. It waits for them once: what Ctrl-C interrupts is called again."""

    def __init__(self, wait: Callable[[], object], undo: Callable[[], object]) -> None:
        self._wait = wait
        self._undo = undo
        self._waits = True
        self.__qualname__ = getattr(undo, "__qualname__", repr(undo))

    def __call__(self) -> object:
        """Wait, unless an earlier call has begun to, and call the function."""
        waits, self._waits = self._waits, False
        if waits:
            self._wait()
        return self._undo()


def calling_hook(bus: object) -> Subscription | None:
    """Return the subscription of a hook with lanes on this bus whose method calls this, if one does."""
    found = caller()
    return found if found is not None and found.siblings is not None and found.is_on(bus) else None


def wait_for(lanes: HookLanes, runtime: Runtime, deadline: Deadline, interrupt: Callable[[], object]) -> None:
    """Wait until the lanes are empty. Log what is left where this thread must not wait, or the deadline comes first."""
    if runtime.inside or runtime.in_host_loop:
        why = "this thread runs handlers of the bus, and they would wait for each other: train on another, as loop.arun() does"
    else:
        with suppress(LaneFullError):  # the run that ends after an exception has waited long enough
            if lanes.wait(deadline, interrupt):
                return
        why = "they took longer than drain_timeout= (after an exception, abort_timeout=) of the bus"
    if left := lanes.pending():
        log.warning(
            f"a hook ends before its offloaded methods have handled all events, because {why}",
            id="hook-ends-early",
            handler=lanes.label,
            events=dict(left),
        )
