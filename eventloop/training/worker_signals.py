"""Make DataLoader workers ignore signals that are meant for the run.

A scheduler signals the whole process group, workers included. If a worker dies of it, torch raises ``DataLoader worker is
killed by signal`` inside the iteration that the run wants to finish.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainbus.eventloop.offload.process import blocked_in_children
from trainbus.eventloop.privates import GET_ITERATOR, forget_workers, workers_of
from trainbus.eventloop.training.loaders import start_persistent_workers
from trainbus.eventloop.training.rng import has_workers


class WorkerSignals:
    """Make the workers that DataLoaders start after :meth:`ignore` ignore ``signals`` until :meth:`restore`.

    It covers every ``DataLoader`` of this process (subclasses and wrapped ones too) and all start methods. The next iteration
    of a loader replaces persistent workers that were started earlier; an iteration under way keeps its workers.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self._process = 0  # that starts the workers
        self._ignored: torch.Tensor | None = None  # in shared memory: persistent workers must see restore()
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._originals = ExitStack()

    def ignore(self) -> None:
        """Make workers ignore the signals from now on, until the process exits at most."""
        if self._process != os.getpid():
            self._ignored, self._process = None, os.getpid()  # a forked process shares the flag, and not the workers
        atexit.register(self.restore)  # where Ctrl-C keeps a run from it: Python's exit ends workers by SIGTERM, and waits
        if self._ignored is not None:
            self._ignored.fill_(True)
        # Loaders start their workers in this method; torchdata's loader overrides it.
        kinds: list[type] = [DataLoader]
        for kind in kinds:  # which grows
            kinds += kind.__subclasses__()
            if original := vars(kind).get(GET_ITERATOR):
                self._replace(kind, GET_ITERATOR, self._making(original))
        self._replace(DataLoader, "__iter__", self._iterating(DataLoader.__iter__))

    def restore(self) -> None:
        """Let the signals end workers again."""
        if self._ignored is not None and self._process == os.getpid():
            self._ignored.fill_(False)
        self._originals.close()
        atexit.unregister(self.restore)

    def _replace(self, kind: type, name: str, method: Any) -> None:
        self._originals.callback(setattr, kind, name, vars(kind)[name])
        setattr(kind, name, method)

    def _making(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def get_iterator(loader: DataLoader[Any]) -> Any:
            own = loader.worker_init_fn
            in_fork = self._process != os.getpid()  # of which restore() is not called
            if not loader.num_workers or isinstance(own, _Ignore) or in_fork:  # _Ignore: called by a subclass's method
                return original(loader)
            if self._ignored is None:
                self._ignored = torch.ones((), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]  # torch
            with blocked_in_children(self._signals, loader.multiprocessing_context or multiprocessing) as before:
                try:
                    loader.worker_init_fn = _Ignore(self._signals, self._signals - before, self._ignored, own)
                    iterator = original(loader)
                finally:
                    loader.worker_init_fn = own
            self._iterators.add(iterator)
            return iterator

        return get_iterator

    def _iterating(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def iterate(loader: DataLoader[Any]) -> Any:
            if loader.persistent_workers and has_workers(loader) and workers_of(loader) not in self._iterators:
                forget_workers(loader)
                start_persistent_workers(loader)
            return original(loader)

        return iterate


@dataclass
class _Ignore:
    """A ``worker_init_fn``: the worker calls it after torch has installed its own handlers."""

    signals: Collection[signal.Signals]
    blocked: Collection[signal.Signals]
    ignored: torch.Tensor
    own: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        for number in self.signals:
            # A handler instead of SIG_IGN, which programs started by the dataset would inherit.
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)  # do not interrupt reads in C code
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.blocked)
        if self.own is not None:
            self.own(worker)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.ignored:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            # Python's exit terminates persistent workers. torch's own handler, which this one replaces, also ends them
            # without an error: else each such exit shows a traceback, "DataLoader worker is killed by signal".
            os._exit(0)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
