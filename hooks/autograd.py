"""Hooks that debug the backward pass and profile single iterations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options
from trainbus.eventloop.device import devices
from trainbus.eventloop.events import AfterTrainIter, BeforeTrain, BeforeTrainIter
from trainbus.eventloop.registry import register
from trainbus.hooks.options import Name
from trainbus.hooks.profiler import ProfilerSession, in_work_dir


@register
class AutogradAnomalyDetectHook(Hook):
    """Check every gradient for NaN during training, and name the forward operation that caused it.

    Use it for debugging only: autograd keeps a traceback of each operation, and each check waits for the device. The earlier
    setting comes back when training ends, also by an exception.

    Args:
        mode: False switches the check off during training if the program has switched it on.
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
    """Profile chosen training iterations, and write one trace for chrome://tracing or Perfetto per iteration.

    The files are ``profiler-trace-iter{n}.json``, n counted from 1. Each covers forward, backward, step, and the handlers
    with a priority below 90. Leave out the first iterations: they are slower than the rest. An iteration that ends by an
    exception has no file.

    Args:
        enable_predicate: takes the ``before_train_iter`` event and returns True to profile the iteration:
            ``lambda event: 10 <= event.progress.iter < 20``.
        output_dir: folder of the files, relative to the work dir if the run has one; by default the work dir.
        use_cuda: also profile the accelerator; None does so if there is one.

    Raises:
        ConfigurationError: later: the run has no folder for the files, or another hook is profiling.
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
        if use_cuda and not devices():
            raise ConfigurationError("use_cuda=True: torch finds no accelerator on this machine; leave it out")
        self._enable_predicate = enable_predicate
        self._output_dir = output_dir
        self._activities = [ProfilerActivity.CPU] if use_cuda is False else None  # None: all that torch can profile
        self._session: ProfilerSession | None = None

    def in_check(self) -> Hook:
        self._output_dir = None
        return self

    def before_train(self, event: BeforeTrain) -> None:
        if event.run.work_dir is None and self._output_dir is None:
            raise ConfigurationError(
                f"{self.label} has no folder for its files: give it output_dir=; or {event.run.work_dir_advice}"
            )

    def before_train_iter(self, event: BeforeTrainIter) -> None:
        if self._enable_predicate(event):
            path = in_work_dir(self._output_dir or "", event.run) / f"profiler-trace-iter{event.progress.iter + 1}.json"
            self._session = session = ProfilerSession(self.label, json_path=path, activities=self._activities)
            event.run.defer(lambda: session.close(write=False))  # for an iteration that fails
            session.start()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        if self._session is not None:
            self._session.close()
