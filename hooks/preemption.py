"""``PreemptionHook``: on a signal, save and end the run cleanly. ``SignalDoor``: pass signals to runs on other threads."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta

from trainbus.eventloop import (
    CheckpointError,
    ConfigurationError,
    Hook,
    Priority,
    RunPreempted,
    check_options,
    get_logger,
    mount,
)
from trainbus.eventloop.checkpoint import AnyPath, as_path, remove_whole
from trainbus.eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    BeforeRun,
    BeforeSaveCheckpoint,
    BeforeTrain,
    CheckpointCommitted,
    RunView,
)
from trainbus.eventloop.platform import signals as signals_named
from trainbus.eventloop.registry import register
from trainbus.eventloop.training import WorkerSignals
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.retention import KEPT, SUFFIX

_SIGNAL = "preempted_by"  # key of a checkpoint that was saved because of a signal, with its name
_ONE_REQUEST = 1.0  # seconds within which a repeated signal is ignored

log = get_logger()


class SignalDoor:
    """Pass the signals of this process to the :class:`PreemptionHook` of each run, on whatever thread it is.

    Open it on the main thread, around the application: ``with SignalDoor():``. Python calls signal handlers only there. While
    no run takes a signal, it acts as without the door. If a library in the application installs handlers of its own, have
    them call :meth:`deliver`.

    Args:
        signals: signals to handle, such as ``(signal.SIGTERM, signal.SIGUSR1)``, or their names.

    Raises:
        ConfigurationError: no signal is given, or one cannot be caught. Later: it is opened on another thread, or while another
            is open.
    """

    current: ClassVar[SignalDoor | None] = None
    """The open door of this process."""

    def __init__(self, signals: Iterable[int | str] = (signal.SIGTERM,)) -> None:
        self.signals = _checked(signals)
        self._previous: dict[signal.Signals, Any] = {}
        # A tuple: the handler of a signal may interrupt any change of it.
        self._listeners: tuple[Callable[[signal.Signals], bool], ...] = ()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(f"open SignalDoor on the main thread, not on {threading.current_thread().name!r}")
        if SignalDoor.current is not None:
            raise ConfigurationError("a SignalDoor is open in this process; one is enough for all runs")
        self.install()
        SignalDoor.current = self
        return self

    def __exit__(self, *error: object) -> None:
        SignalDoor.current = None
        self.restore()

    def install(self) -> None:
        """Install the handlers."""
        try:
            for number in self.signals:
                before = signal.getsignal(number)
                signal.signal(number, self._handle)
                self._previous[number] = signal.SIG_DFL if isinstance(before, _Ending) else before
        except (OSError, ValueError) as error:
            self.restore()
            raise ConfigurationError(f"{signal.Signals(number).name} cannot be handled here: {error}") from None

    def restore(self) -> None:
        """Restore the handlers from before."""
        while self._previous:
            number, handler = self._previous.popitem()
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def listen(self, listener: Callable[[signal.Signals], bool]) -> Callable[[], None]:
        """Call ``listener`` for each signal, which returns whether it takes it; return the function that ends it."""
        self._listeners = (*self._listeners, listener)

        def end() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return end

    def deliver(self, number: int) -> bool:
        """Pass a signal to all runs; return False if none has a hook that takes it.

        It may be called in a handler of the signal, which may have interrupted anything.
        """
        taken = [listener(signal.Signals(number)) for listener in self._listeners]
        return any(taken)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.deliver(number) and self._previous.get(signal.Signals(number)) is not signal.SIG_IGN:
            self.pass_on(signal.Signals(number))

    def pass_on(self, number: signal.Signals) -> None:
        """Call the handler from before, or do what the system does by default if that was none, or ignored the signal."""
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, None)
            return
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


class _Ending:
    """Handle signals to a process whose run was preempted: all ranks stop when one gets a signal, and others get theirs later.

    The process ends at once, as without a handler, but with the status that the run asks for.
    """

    def __init__(self, exit_code: int) -> None:
        self._exit_code, self._process = exit_code, os.getpid()

    def install(self, signals: Iterable[signal.Signals]) -> None:
        """Handle those of ``signals`` that have no handler, until the process ends."""
        mine = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]
        for number in mine:
            signal.signal(number, self)
        atexit.register(self._ignore, mine)

    def _ignore(self, signals: Iterable[signal.Signals]) -> None:
        # The interpreter takes its handlers away before it has ended (_PySignal_Fini), which takes torch a
        # second; SIG_IGN stays.
        for number in signals:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            raise RunPreempted(self._exit_code)
        signal.signal(number, signal.SIG_DFL)  # in a forked process
        signal.raise_signal(number)


@register
class PreemptionHook(CopiedAnew, Hook):
    """End a run cleanly when the process gets a signal, as schedulers send before they take a machine away.

    - The run finishes the present iteration (or accumulation window), and saves as by ``run.checkpoints.save()``. Training ends
      with ``after_train`` and ``after_run``, and offloaded handlers finish.
    - Then ``loop.run()``, or the end of ``with Run(...)``, raises :class:`trainbus.eventloop.RunPreempted`, a ``SystemExit``.
    So the
      process exits with the status ``exit_code``, which tells a scheduler that it has neither finished (0) nor failed (1). In
      another trainer ``trainer.fit()`` returns: call ``sys.exit(75)`` if :attr:`received` is not None.
    - ``run.info["stop_reason"]`` and :attr:`received` name the signal.
    - During a validation the run stops in the same way; a resumed run repeats that validation from its start.
    - Without a :class:`CheckpointHook`, which counts these files among its own, the next one replaces the file that the run
      was resumed from, if that is of an earlier signal. So several signals leave one file.
    - A run that has no work dir or does not train (``loop.test()``) only ends, with a warning.
    - A second signal acts as without the hook: usually it ends the process at once. The same signal within a second is
      ignored, because a process gets it twice if the scheduler signals each process and ``torchrun`` forwards it.
    - A signal after a preempted run ends the process at once with the status ``exit_code``, unless there is an earlier handler.

    On the main thread the hook installs its handlers, and the earlier ones come back when the run ends, also by an exception.
    A run on another thread (``await loop.arun()``) gets the signals through a :class:`SignalDoor`, which the application opens.

    The workers of DataLoaders that the run iterates ignore these signals during the run, because a signal to the process group
    also reaches them. Loaders that another trainer iterates, and persistent workers that started before the run, are not
    covered: give them ``DataLoader(..., worker_init_fn=hook.worker_init_fn)``, or have the scheduler signal this process only.
    Workers of a fork server (Python's default from 3.14 on) end with the server, which the log tells: use ``"spawn"``.
    Other processes that are forked during the run keep the handlers from before the run.

    Args:
        signals: signals to handle, such as ``(signal.SIGTERM, signal.SIGUSR1)``, or their names.
        exit_code: exit status of a process whose run was ended, from 1 to 255; None to go on behind ``loop.run()``.

    Raises:
        ConfigurationError: no signal is given, or one cannot be caught. Later: the run is not on the main thread, and there is
            no door for its signals.
    """

    priority = Priority.HIGHEST
    observes = True
    of_run: ClassVar = {"worker_init_fn": None, "_door": None, "_former": None}

    @check_options
    def __init__(
        self, signals: Iterable[int | str] = (signal.SIGTERM,), *, exit_code: Annotated[int, Meta(ge=1, le=255)] | None = 75
    ) -> None:
        self.signals = _checked(signals)
        self.exit_code = exit_code
        self.received: signal.Signals | None = None
        """The signal that ended the present or last run, or None."""
        self._received_at = 0.0
        self.worker_init_fn = WorkerSignals(self.signals)
        """For loaders that the run does not iterate: their workers ignore the signals during the run, too."""
        self._door: SignalDoor | None = None
        self._former: AnyPath | None = None

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self.worker_init_fn = WorkerSignals(self.signals)

    def before_run(self, event: BeforeRun) -> None:
        door = SignalDoor.current
        if door is None or not set(self.signals) <= set(door.signals):
            door = self._own_door(event.run)
        self.received = self._former = None
        self._process = os.getpid()
        # First: this also undoes a part of the installation if a signal cannot be handled.
        event.run.defer(self.worker_init_fn.restore)
        self.worker_init_fn.ignore()
        self._door = door
        event.run.defer(door.listen(partial(self._on_signal, event.run)))

    def _own_door(self, run: RunView) -> SignalDoor:
        if (thread := threading.current_thread()) is not threading.main_thread():
            names = ", ".join(repr(one.name) for one in self.signals)
            raise ConfigurationError(
                f"{self.label} needs signal handlers, which Python allows on the main thread only, and this run is on "
                f"{thread.name!r}. Open `with SignalDoor(({names},)):` on the main thread, around your application"
            )
        door = SignalDoor(self.signals)
        run.defer(partial(self._close, run, door))
        door.install()
        return door

    def _close(self, run: RunView, door: SignalDoor) -> None:
        door.restore()
        if run.exit_code:
            _Ending(run.exit_code).install(self.signals)

    def before_save_checkpoint(self, event: BeforeSaveCheckpoint) -> None:
        if self.received is not None:
            event.checkpoint[_SIGNAL] = self.received.name

    def after_load_checkpoint(self, event: AfterLoadCheckpoint) -> None:
        run = event.run
        if event.checkpoint.pop(_SIGNAL, None) and event.path and not run.rank and run.checkpoints.suffix == SUFFIX:
            path = as_path(event.path)
            self._former = path if path.parent == run.checkpoints.directory else None

    def before_train(self, event: BeforeTrain) -> None:
        if event.run.shared.get(KEPT):
            self._former = None  # it has a retention

    def checkpoint_committed(self, event: CheckpointCommitted) -> None:
        former = self._former
        if former is None or self.received is None or str(former) in event.names:
            return
        self._former = None
        try:
            remove_whole(former)
            log.info("removed the checkpoint of an earlier signal", path=str(former))
        except CheckpointError as error:
            log.warning(
                "cannot remove the checkpoint of an earlier signal",
                id="signal-checkpoint-left",
                path=str(former),
                error=str(error),
            )

    @mount(priority=Priority.LOWEST)
    def after_run(self, event: AfterRun) -> None:
        if self.received is not None:
            why = {"reason": "the run has no work_dir"} if event.run.work_dir is None else {}
            log.warning(
                "a signal ended the run",
                id="run-ended-by-signal",
                signal=self.received.name,
                saved=self._saved,
                iter=event.progress.iter,
                **why,
            )

    def _on_signal(self, run: RunView, number: signal.Signals) -> bool:
        # Python calls this between any two instructions of the main thread, which may hold any lock: never lock, log or
        # change a shared collection here.
        now = time.monotonic()
        if number not in self.signals:
            return False  # of a door that handles more
        if os.getpid() == self._process and number == self.received and now - self._received_at < _ONE_REQUEST:
            return True
        if self.received is not None or os.getpid() != self._process:
            assert self._door is not None  # noqa: S101 - the run has begun
            self._door.pass_on(number)
            return True
        self._received_at = now  # first: the same signal may come again between the two lines
        self.received = number
        self._saved = run.training and run.work_dir is not None
        if self._saved:
            run.checkpoints.save()
        run.stop(f"signal {number.name}", exit_code=self.exit_code or 0)
        return True


def _checked(signals: Iterable[int | str]) -> tuple[signal.Signals, ...]:
    try:
        named = (signal.Signals[one] if isinstance(one, str) else signal.Signals(one) for one in signals)
        chosen = tuple(dict.fromkeys(named))
    except (TypeError, ValueError, KeyError):
        raise ConfigurationError(f"signals={signals!r}: give a tuple of signals, such as (signal.SIGTERM,)") from None
    if not chosen:
        raise ConfigurationError("signals=(): give at least one signal, such as signal.SIGTERM, or remove the hook")
    for number in {*signals_named("SIGKILL", "SIGSTOP")} & set(chosen):
        raise ConfigurationError(f"{number.name} cannot be caught; give the signal that is sent before it, such as SIGTERM")
    return chosen
