"""The logger's side behind the lane: smoothing, who gets what when, and keeping a broken writer from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eventloop import get_logger
from hooks.smoothing import Smoother
from hooks.writers.base import RunFacts, Where, Writer
from hooks.writers.images import as_image

log = get_logger()

_MOST_FAILURES = 3


class Fanout:
    """Passes what happens in a run on to writers. Used by one thread at a time.

    Args:
        writers: in the order in which they are called.
        interval: of writers without one of their own.
        ignore_last: write nothing at the end of an epoch, unless the epoch is no longer than the interval.
        interval_exp_name: iterations between writing the experiment's name.
        new_smoother: makes the smoother of a run.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        *,
        interval: int,
        ignore_last: bool,
        interval_exp_name: int,
        new_smoother: Callable[[], Smoother],
    ) -> None:
        self._targets = [_Target(writer, interval) for writer in writers]
        self._names = _Names()
        self._ignore_last = ignore_last
        self._interval_exp_name = interval_exp_name
        self._new_smoother = new_smoother
        self._smoother = new_smoother()
        # Who writes every iteration gets the values as they are: they can be smoothed later, means cannot be taken apart.
        custom = self._smoother.customised
        self._raw = [target for target in self._targets if target.interval == 1 and not custom]
        self._smoothed = [target for target in self._targets if target.interval > 1 or custom]
        self._run = RunFacts("run")
        self._warned = False
        self._last = Where("train", 0, 0)

    def open(self, run: RunFacts) -> None:
        """Open all writers for a run."""
        self._run = run
        self._smoother = self._new_smoother()
        self._last = Where("train", 0, 0)
        for target in self._targets:
            target.reopen()
            target.call(lambda writer: writer.open(run))
            target.call(lambda writer: writer.write_config(run.config))

    def train(self, scalars: Mapping[str, float], where: Where) -> None:
        """Take the scalars of a training iteration."""
        if where.epoch != self._last.epoch:
            self._smoother.begin_epoch()
        self._last = where
        if self._raw:
            named = self._named(scalars)
            for target in self._raw:
                target.write(named, where.iter, where)
        # This thread shares the GIL with the training, so what nobody reads is not kept.
        if self._smoothed:
            self._smoother.push(scalars)
            for target in self._smoothed:
                if where.batch % target.interval == 0:
                    self._write_train(target)
        if where.iter % self._interval_exp_name == 0:
            for target in self._targets:
                target.call(lambda writer: writer.write_text("experiment", self._run.name, where))

    def end_epoch(self) -> None:
        """Take the news that a training epoch has ended: its last iterations may be left to write."""
        for target in self._targets:
            left = target.written < self._smoother.count
            if left and (not self._ignore_last or self._last.batch <= target.interval):
                self._write_train(target)

    def evaluated(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        """Take the metrics of a validation or test."""
        named = {f"{where.stage}/{name}": value for name, value in scalars.items()}
        for target in self._targets:
            target.write(named, step, where)

    def image(self, name: str, image: Any, step: int, where: Where) -> None:
        """Take an image that was reported."""
        takers = [target for target in self._targets if target.takes_images]
        if not takers and not self._warned:
            self._warned = True
            log.warning("an image was reported, and none of the writers takes images; TensorBoardWriter does", image=name)
        for target in takers:
            target.call(lambda writer: writer.write_image(f"{where.stage}/{name}", as_image(image), step))

    def flush(self) -> None:
        """Flush all writers."""
        for target in self._targets:
            target.call(lambda writer: writer.flush())

    def close(self, *, finished: bool = True) -> None:
        """Flush and close all writers; ``finished`` is False if an exception has ended the run."""
        self.flush()
        for target in self._targets:
            if not finished:
                target.call(lambda writer: writer.aborted())
            target.call(lambda writer: writer.close())

    def _write_train(self, target: _Target) -> None:
        values = self._smoother.read(target.written, smooth=target.interval > 1)
        target.written = self._smoother.count
        named = self._named(values)
        target.write(named, self._last.iter, self._last)

    def _named(self, values: Mapping[str, float]) -> dict[str, float]:
        names = self._names
        return {names[name]: value for name, value in values.items()}


class _Names(dict[str, str]):
    """Names of training scalars with their stage, each made once."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, f"train/{name}")


class _Target:
    """One writer, and how it is doing."""

    def __init__(self, writer: Writer, interval: int) -> None:
        self.interval = writer.interval or interval
        self.takes_images = type(writer).write_image is not Writer.write_image
        self.written = 0
        self._writer = writer
        self._failures = 0

    def reopen(self) -> None:
        self.written = 0
        self._failures = 0

    def call(self, do: Callable[[Writer], object]) -> None:
        if self._failures >= _MOST_FAILURES:
            return
        try:
            do(self._writer)
        except Exception:  # noqa: BLE001 - logged
            self._count_failure()
        else:
            self._failures = 0

    def write(self, scalars: Mapping[str, float], step: int, where: Where) -> None:
        # call(), written out: once an iteration, on a thread that takes the GIL from the training.
        if self._failures >= _MOST_FAILURES:
            return
        try:
            self._writer.write_scalars(scalars, step, where)
        except Exception:  # noqa: BLE001 - logged
            self._count_failure()
        else:
            self._failures = 0

    def _count_failure(self) -> None:
        self._failures += 1
        retired = self._failures == _MOST_FAILURES
        log.exception(
            "a writer failed" + " and is left alone until the next run" * retired,
            writer=type(self._writer).__name__,
            failures=self._failures,
        )
