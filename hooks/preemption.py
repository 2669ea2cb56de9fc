"""``PreemptionHook``: a run that gets a signal saves, and ends cleanly."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any

from eventloop import ConfigurationError, Hook, Priority, get_logger, mount, register
from eventloop.events import AfterRun, BeforeRun, RunView
from eventloop.training import WorkerSignals

_ONE_REQUEST = 1.0  # seconds in which the same signal counts once

log = get_logger()


@register
class PreemptionHook(Hook):
    """Ends a run cleanly when the process gets a signal, as schedulers send before they take a machine away.

    The present iteration (or accumulation window) is finished, a checkpoint is saved as by ``run.checkpoint_now()``, training
    ends with ``after_train`` and ``after_run``, everything offloaded is delivered, and ``loop.run()`` returns.
    ``run.info["stop_reason"]`` and :attr:`received` name the signal. A signal during a validation does the same; a resumed
    run begins that validation anew. A run without a work dir only ends, with a warning, and so does one that does not train
    (``loop.test()``). A second signal has the effect that it would have had without the hook: as a rule it ends the process
    at once. The same signal within a second counts once, because a process gets it twice where the scheduler signals each
    process of a job and ``torchrun`` hands it on.

    Handlers are installed when a run begins, and the earlier ones come back when it ends, however it ends. Python calls
    signal handlers on the main thread only, so the run must be there. Where training runs on another thread
    (``await loop.arun()``), the host application hears signals and calls ``loop.checkpoint_now()`` and ``loop.stop()``.

    A signal to the whole process group also reaches the workers of DataLoaders, which ignore it while the run lasts. (Workers
    of an iteration that was under way when the run began need a ``worker_init_fn`` that ignores it.) Other processes that are
    forked during the run take it as before the run.

    Args:
        signals: to listen to, such as ``(signal.SIGTERM, signal.SIGUSR1)``, or their names.

    Raises:
        ConfigurationError: no signal, one that cannot be caught, or (later) a run outside of the main thread.
    """

    priority = Priority.HIGHEST
    observes = True

    def __init__(self, signals: Iterable[int | str] = (signal.SIGTERM,)) -> None:
        self.signals = _checked(signals)
        self.received: signal.Signals | None = None
        """The signal that ended the present run, or the last one."""
        self._received_at = 0.0
        self._workers = WorkerSignals(self.signals)
        self._process = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}
        self._saved = False

    def before_run(self, event: BeforeRun) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                f"{self.label} installs signal handlers, which Python allows on the main thread only, and this run is on "
                f"the thread {threading.current_thread().name!r}. Remove the hook and call loop.checkpoint_now() and "
                "loop.stop() where the host application hears signals (anyio.open_signal_receiver, say)"
            )
        self.received = None
        self._process = os.getpid()
        event.run.defer(self._undo)  # before the first handler is there: an error at the second one undoes it
        self._workers.ignore()
        for number in self.signals:
            self._previous[number] = signal.getsignal(number)
            signal.signal(number, partial(self._heard, event.run))

    @mount(priority=Priority.LOWEST)
    def after_run(self, event: AfterRun) -> None:
        """Log the signal, and wait for the last checkpoint while the handlers are there: a late signal does not cost it."""
        if self.received is not None:
            why = {"reason": "the run has no work_dir"} if event.run.work_dir is None else {}
            log.warning("ended by a signal", signal=self.received.name, saved=self._saved, iter=event.progress.iter, **why)
        event.run.wait_for_saves()

    def _heard(self, run: RunView, number: int, frame: FrameType | None) -> None:
        # Python calls this between any two steps of the main thread, which may hold any lock and be writing a log line:
        # nothing here may lock, log or change a collection that other code iterates over.
        now = time.monotonic()
        if os.getpid() == self._process and number == self.received and now - self._received_at < _ONE_REQUEST:
            return
        if self.received is not None or os.getpid() != self._process:
            self._end_at_once(signal.Signals(number))
            return
        self._received_at = now  # first: this signal may strike again between the two
        self.received = signal.Signals(number)
        self._saved = run.training and run.work_dir is not None
        if self._saved:
            run.checkpoint_now()
        run.stop(f"signal {self.received.name}")

    def _end_at_once(self, number: signal.Signals) -> None:
        """Let the signal have the effect that it had before the run; one that was ignored has its default one."""
        previous = self._previous.get(number)
        self._restore_handlers()
        if previous in (signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _undo(self) -> None:
        self._restore_handlers()
        self._workers.heed()

    def _restore_handlers(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: it was not installed from Python, which then cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _checked(signals: Iterable[int | str]) -> tuple[signal.Signals, ...]:
    try:
        named = (signal.Signals[one] if isinstance(one, str) else signal.Signals(one) for one in signals)
        chosen = tuple(dict.fromkeys(named))
    except (TypeError, ValueError, KeyError):
        raise ConfigurationError(f"signals={signals!r}: give a tuple of signals, such as (signal.SIGTERM,)") from None
    if not chosen:
        raise ConfigurationError("signals=(): give at least one, such as signal.SIGTERM, or leave the hook out")
    for number in {signal.SIGKILL, signal.SIGSTOP} & set(chosen):
        raise ConfigurationError(f"{number.name} cannot be caught by any process; listen to the one that comes before it")
    return chosen
