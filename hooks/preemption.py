"""``PreemptionHook``: on a signal, save and end the run cleanly."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from types import FrameType
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from eventloop import ConfigurationError, Hook, Priority, check_options, get_logger, mount, register
from eventloop.events import AfterRun, BeforeRun, RunView
from eventloop.training import WorkerSignals
from hooks.copies import CopiedAnew

_ONE_REQUEST = 1.0  # seconds within which a repeated signal is ignored

log = get_logger()


@register
class PreemptionHook(CopiedAnew, Hook):
    """End a run cleanly when the process gets a signal, as schedulers send before they take a machine away.

    - The run finishes the present iteration (or accumulation window), and saves as by ``run.checkpoint_now()``. Training ends
      with ``after_train`` and ``after_run``, and offloaded handlers finish.
    - Then ``loop.run()``, or the end of ``with Run(...)``, raises :class:`eventloop.RunPreempted`, a ``SystemExit``. So the
      process exits with the status ``exit_code``, which tells a scheduler that it has neither finished (0) nor failed (1). In
      another trainer ``trainer.fit()`` returns: call ``sys.exit(75)`` if :attr:`received` is not None.
    - ``run.info["stop_reason"]`` and :attr:`received` name the signal.
    - During a validation the run stops in the same way; a resumed run repeats that validation from its start.
    - A run that has no work dir or does not train (``loop.test()``) only ends, with a warning.
    - A second signal acts as without the hook: usually it ends the process at once. The same signal within a second is
      ignored, because a process gets it twice if the scheduler signals each process and ``torchrun`` forwards it.

    The run must be on the main thread, because Python calls signal handlers only there. If training runs on another thread
    (``await loop.arun()``), the application must handle signals and call ``loop.checkpoint_now()`` and ``loop.stop()``. The
    earlier handlers come back when the run ends, also by an exception.

    The workers of DataLoaders ignore these signals during the run, because a signal to the process group also reaches them.
    Workers that started before the run need a ``worker_init_fn`` that ignores the signals. Other processes that are forked
    during the run keep the handlers from before the run.

    Args:
        signals: signals to handle, such as ``(signal.SIGTERM, signal.SIGUSR1)``, or their names.
        exit_code: exit status of a process whose run was ended, from 1 to 255; None to go on behind ``loop.run()``.

    Raises:
        ConfigurationError: no signal is given, or one cannot be caught. Later: the run is not on the main thread.
    """

    priority = Priority.HIGHEST
    observes = True
    of_run: ClassVar = {"_workers": None, "_previous": dict}

    @check_options
    def __init__(
        self, signals: Iterable[int | str] = (signal.SIGTERM,), *, exit_code: Annotated[int, Meta(ge=1, le=255)] | None = 75
    ) -> None:
        self.signals = _checked(signals)
        self.exit_code = exit_code
        self.received: signal.Signals | None = None
        """The signal that ended the present or last run, or None."""
        self._received_at = 0.0
        self._workers = WorkerSignals(self.signals)
        self._previous: dict[signal.Signals, Any] = {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._workers = WorkerSignals(self.signals)

    def before_run(self, event: BeforeRun) -> None:
        if threading.current_thread() is not threading.main_thread():
            thread = threading.current_thread().name
            raise ConfigurationError(
                f"{self.label} installs signal handlers, which Python allows on the main thread only, not on {thread!r}. "
                "Remove the hook, and call loop.checkpoint_now() and loop.stop() where your application handles signals"
            )
        self.received = None
        self._process = os.getpid()
        # First: this also undoes a part of the installation if a signal cannot be handled.
        event.run.defer(self._workers.restore)
        event.run.defer(self._restore_handlers)
        self._workers.ignore()
        for number in self.signals:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, partial(self._on_signal, event.run))

    @mount(priority=Priority.LOWEST)
    def after_run(self, event: AfterRun) -> None:
        if self.received is not None:
            why = {"reason": "the run has no work_dir"} if event.run.work_dir is None else {}
            log.warning("a signal ended the run", signal=self.received.name, saved=self._saved, iter=event.progress.iter, **why)
        event.run.wait_for_saves()

    def _on_signal(self, run: RunView, number: int, frame: FrameType | None) -> None:
        # Python calls this between any two instructions of the main thread, which may hold any lock: never lock, log or
        # change a shared collection here.
        now = time.monotonic()
        if os.getpid() == self._process and number == self.received and now - self._received_at < _ONE_REQUEST:
            return
        if self.received is not None or os.getpid() != self._process:
            self._end_at_once(signal.Signals(number))
            return
        self._received_at = now  # first: the same signal may come again between the two lines
        self.received = signal.Signals(number)
        self._saved = run.training and run.work_dir is not None
        if self._saved:
            run.checkpoint_now()
        run.stop(f"signal {self.received.name}", exit_code=self.exit_code or 0)

    def _end_at_once(self, number: signal.Signals) -> None:
        """Send the signal to the handler from before the run, or to the default one if it was ignored then."""
        previous = self._previous.get(number)
        self._restore_handlers()
        if previous in (signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _restore_handlers(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _checked(signals: Iterable[int | str]) -> tuple[signal.Signals, ...]:
    try:
        named = (signal.Signals[one] if isinstance(one, str) else signal.Signals(one) for one in signals)
        chosen = tuple(dict.fromkeys(named))
    except (TypeError, ValueError, KeyError):
        raise ConfigurationError(f"signals={signals!r}: give a tuple of signals, such as (signal.SIGTERM,)") from None
    if not chosen:
        raise ConfigurationError("signals=(): give at least one signal, such as signal.SIGTERM, or remove the hook")
    for number in {signal.SIGKILL, signal.SIGSTOP} & set(chosen):
        raise ConfigurationError(f"{number.name} cannot be caught; give the signal that is sent before it, such as SIGTERM")
    return chosen
