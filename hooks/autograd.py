"""Debugging of the backward pass, and profiles of single iterations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd.profiler import profile

from eventloop import ConfigurationError, Hook, Priority, check_options, register
from eventloop.events import AfterTrainIter, BeforeTrain, BeforeTrainIter
from hooks.options import Name
from hooks.profiling import ProfilerSession


@register
class AutogradAnomalyDetectHook(Hook):
    """Has autograd look for NaN in every gradient while training, and name the forward operation that it comes from.

    Each operation's traceback is kept and each gradient is checked, which waits for the device: for debugging only. The
    earlier setting comes back when training ends, however it ends.

    Args:
        mode: False switches the check off for the training, where it is on in the program.

    Raises:
        ConfigurationError: ``mode`` is neither True nor False.
    """

    @check_options
    def __init__(self, mode: bool = True) -> None:
        self.mode = mode

    def before_train(self, event: BeforeTrain) -> None:
        before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        event.run.defer(lambda: torch.autograd.set_detect_anomaly(*before))
        torch.autograd.set_detect_anomaly(self.mode)


@register
class AutogradProfilerHook(Hook):
    """Profiles chosen training iterations, and writes a trace for chrome://tracing or Perfetto of each.

    The files are ``profiler-trace-iter{n}.json``, n counted from 1. Each holds the iteration from the last handler of
    ``before_train_iter`` to this hook's turn in ``after_train_iter``: forward, backward and step, and handlers below
    priority 90. Leave out the first iterations: they are slower than the rest. An iteration that ends by an exception
    has no file.

    Args:
        enable_predicate: gets the event of ``before_train_iter`` and returns whether to profile the iteration:
            ``lambda event: 10 <= event.progress.iter < 20``.
        output_dir: folder of the files; a relative path is relative to the work dir, if the run has one, and None is the work
            dir.
        use_cuda: also profile the run's accelerator; None does if there is one.

    Raises:
        ConfigurationError: an option that cannot work; or later, a run without a folder for the files, or another hook is
            profiling.
    """

    priority = Priority.VERY_LOW
    ranks = "rank0"

    @check_options
    def __init__(
        self,
        enable_predicate: Callable[[BeforeTrainIter], object],
        output_dir: Name | Path | None = None,
        *,
        use_cuda: bool | None = None,
    ) -> None:
        if use_cuda and not torch.accelerator.is_available():
            raise ConfigurationError("use_cuda=True: torch finds no accelerator on this machine; leave it out")
        self._enable_predicate = enable_predicate
        self._output_dir = output_dir
        self._use_device = use_cuda
        self._directory = Path()
        self._device: str | None = None
        self._session: ProfilerSession | None = None

    def before_train(self, event: BeforeTrain) -> None:
        run = event.run
        if run.work_dir is None and self._output_dir is None:
            raise ConfigurationError(f"{self.label} has no folder for its files: give it output_dir=, or the run a work_dir")
        self._directory = (run.work_dir or Path()) / (self._output_dir or Path())
        device = torch.accelerator.current_accelerator() if self._use_device else run.device
        on_host = device is None or device.type == "cpu" or self._use_device is False
        self._device = None if on_host or device is None else device.type

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        if self._enable_predicate(event):
            path = self._directory / f"profiler-trace-iter{event.progress.iter + 1}.json"
            self._session = ProfilerSession(self.label, lambda _: profile(use_device=self._device), json_path=path)
            event.run.defer(lambda: self._close(write=False))  # of an iteration that did not end in order
            self._session.start()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        self._close(write=True)

    def _close(self, *, write: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(write=write)
