"""Make DataLoader workers ignore signals that are meant for the run.

A scheduler signals the whole process group, workers included. If a worker dies of it, torch raises ``DataLoader worker is
killed by signal`` inside the iteration that the run wants to finish.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from trainbus.eventloop import platform
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import contextmanager

log = get_logger()

_active: list[WorkerSignals] = []
platform.at_fork(in_child=_active.clear)


class WorkerSignals:
    """A ``worker_init_fn`` of loaders: their workers ignore ``signals`` between :meth:`ignore` and :meth:`restore`.

    The loaders that runs iterate need not be given it: :func:`starting_workers` does it for them.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self.signals = tuple(signals)
        self._told = False
        self._ignored = torch.zeros((), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]  # torch

    def ignore(self) -> None:
        """Make workers ignore the signals from now on, until the process exits at most."""
        self._ignored.fill_(True)
        _active.append(self)
        # Where Ctrl-C keeps a run from it: at the exit, multiprocessing ends daemonic children by SIGTERM, and waits for them
        # (https://docs.python.org/3/library/multiprocessing.html#multiprocessing.Process.daemon).
        atexit.register(self.restore)

    def restore(self) -> None:
        """Let the signals end workers again."""
        atexit.unregister(self.restore)
        if self in _active:  # not in a fork, which shares the flag
            _active.remove(self)
            self._ignored.fill_(False)

    def tell_of_fork_server(self) -> None:
        """Warn once that workers of a fork server do not outlive a signal to the process group."""
        # They end when their parent has ended (torch/utils/data/_utils/worker.py, ManagerWatchdog), which is the server.
        if not self._told:
            self._told = True
            log.warning(
                "a signal to the process group ends the fork server of the DataLoader's workers, and they end with it, before "
                'the iteration does; give DataLoader(multiprocessing_context="spawn"), or have only this process signalled',
                id="fork-server-ended",
            )

    def __call__(self, worker: int) -> None:
        """Handle the signals in a worker; torch has installed its own handlers before."""
        for number in self.signals:
            # A handler instead of SIG_IGN, which programs started by the dataset would inherit.
            platform.handle_signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._ignored:
            return
        if number == signal.SIGTERM:
            os._exit(0)  # as by torch's own handler: Python's exit terminates persistent workers, and torch reports a signal
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.raise_signal(number)


@contextmanager
def starting_workers(loader: Iterable[Any]) -> Iterator[None]:
    """Have the workers that a loader starts meanwhile ignore the signals of runs that are open."""
    held: Any = getattr(loader, "base_dataloader", loader)  # inside a wrapper
    if not _active or not getattr(held, "num_workers", 0) or not hasattr(held, "worker_init_fn"):
        yield
        return
    own, waiting = held.worker_init_fn, set[signal.Signals]()
    if (held.multiprocessing_context or multiprocessing).get_start_method() == "forkserver":
        _active[0].tell_of_fork_server()  # it would keep a mask for all processes that it will ever start
    else:  # a worker inherits the mask, so that a signal waits until its handler is there
        waiting = platform.block_signals({number for one in _active for number in one.signals})
    held.worker_init_fn = partial(_begin, [*_active], own, waiting)
    try:
        yield
    finally:
        platform.unblock_signals(waiting)
        held.worker_init_fn = own


def _begin(active: list[WorkerSignals], own: Any, waiting: set[signal.Signals], worker: int) -> None:
    for one in active:
        one(worker)
    platform.unblock_signals(waiting)
    if own is not None:
        own(worker)
