"""``LoggerHook``: scalars to the terminal, to JSON lines and to writers of the user's own, off the training thread.

How it keeps its order. Every subscription has a lane and a thread of its own, so handlers of ``after_train_iter`` and
``after_val_epoch`` that were offloaded one by one could overtake each other: a validation's line before the last training
line, closing before the last write. So one method hears everything on one lane, first in, first out: the training iterations
themselves, and a record (:class:`LogEvent`) of whatever else there is to write. The methods that run inline only publish
such records. On the way to the lane events are detached, so the training thread never waits for a device or a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import msgspec

from eventloop import ConfigurationError, Hook, Priority, Progress, check_options, get_logger, mount, register
from eventloop.config import registered
from eventloop.events import (
    AfterRun,
    AfterTestEpoch,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    BeforeTrainEpoch,
    CheckpointStaged,
    ImageReported,
    OnException,
    RunView,
    Slot,
)
from hooks.evaluate import Evaluated
from hooks.options import PositiveInt
from hooks.smoothing import Smoother
from hooks.writers.base import RunFacts, Where, Writer
from hooks.writers.console import ConsoleWriter
from hooks.writers.fanout import Fanout
from hooks.writers.json_lines import JSONLinesWriter
from hooks.writers.outbox import check_out, checked_suffixes, send
from hooks.writers.records import LogClosed, LogEpochBegan, LogEpochEnded, LogEvent, LogLine, LogMetrics, LogOpened

log = get_logger()

_Heard = AfterTrainIter | LogEvent | ImageReported | Evaluated | CheckpointStaged

_Writers = Annotated[
    Sequence[Writer], msgspec.Meta(description="writer objects in a list, such as [ConsoleWriter(), TensorBoardWriter()]")
]

_tokens = count(1)
_NUMBERS = frozenset((int, float))


@register
class LoggerHook(Hook):
    """Hands every scalar to writers: of iterations what was reported in ``outputs``, of validations and tests the metrics.

    Training scalars are written when the number of the batch within its epoch is a multiple of the interval, with the
    step ``iter + 1``; keys that match ``mean_pattern`` as the mean of the last ``window_size`` iterations (a resumed run
    begins its windows anew). A writer with an interval of 1 gets the values as they are.

    Metrics are written with the epochs done as their step: 0 where there was no training, and iterations in
    iteration-based runs, where the epoch never moves. Names begin with their stage: ``train/loss``, ``val/accuracy``. Images
    (``run.report_image``) go to the writers that take them, with the steps of their stage. Results of an ``EvaluateHook``
    (events ``evaluated``) are written as ``eval/<name>`` with the iterations done.

    All of it happens on one thread. A writer that fails is reported, does not end the run and is tried again; what it has lost
    in the end is told. A checkpoint is committed when the lines of its iterations are on disk, so that a resumed run has no
    gap: lines of iterations that are made again come twice. While one hangs (a network disk,
    say), training goes on until 1024 events wait, and then waits for it; after three times :attr:`timeout` it goes on
    without this logger.

    Args:
        interval: iterations between lines, of writers that have no interval of their own.
        ignore_last: leave out the line at the end of an epoch whose length is no multiple of the interval. An epoch that is
            no longer than the interval gets its line all the same.
        interval_exp_name: iterations between lines with the experiment's name.
        out_dir: where files of the work dir are copied to after the run, into a folder named like the work dir.
        out_suffix: ends of the names of files to copy.
        keep_local: False deletes files of the work dir once they are copied.
        log_metric_by_epoch: False takes iterations as the step of metrics.
        window_size: iterations to average over.
        mean_pattern: regular expression; scalars in whose names it is found are averaged.
        custom_cfg: further windows; see :class:`hooks.smoothing.Smoother`.
        writers: where to; by default the terminal and ``scalars.jsonl`` in the work dir.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    priority = Priority.BELOW_NORMAL
    observes = True
    ranks = "rank0"
    timeout: float = 600.0
    """Seconds that writing a batch of events may take before that is an error."""

    @check_options
    def __init__(
        self,
        interval: PositiveInt = 10,
        ignore_last: bool = True,
        interval_exp_name: PositiveInt = 1000,
        out_dir: str | Path | None = None,
        out_suffix: str | Sequence[str] = (".json", ".jsonl", ".csv", ".log", ".py", "yaml"),
        keep_local: bool = True,
        log_metric_by_epoch: bool = True,
        *,
        window_size: PositiveInt = 10,
        mean_pattern: str = r"loss|time|data_time|grad_norm",
        custom_cfg: Sequence[Mapping[str, Any]] = (),
        writers: _Writers | None = None,
    ) -> None:
        check_out(out_dir, keep_local=keep_local)
        self._out_dir = None if out_dir is None else Path(out_dir)
        self._out_suffix = checked_suffixes(out_suffix)
        self._keep_local = keep_local
        self._by_epoch = log_metric_by_epoch
        Smoother(window_size, mean_pattern, custom_cfg)  # says now what it cannot use
        self._fanout = Fanout(
            _checked_writers(writers),
            interval=interval,
            ignore_last=ignore_last,
            interval_exp_name=interval_exp_name,
            new_smoother=lambda: Smoother(window_size, mean_pattern, custom_cfg),
        )
        self._token = next(_tokens)
        # Whoever has it writes. A thread that was left behind as it hung may go on one day: then it ends its batch first.
        self._writing = Lock()
        # Of the lane's thread, as is the fanout.
        self._epoch_length: int | None = None
        self._facts: RunFacts | None = None

    # --------------------------------------------------------------------------------- inline: on the training thread

    def before_run(self, event: BeforeRun) -> None:
        """Tell the writers who runs."""
        run = event.run
        work_dir = None if run.work_dir is None else str(run.work_dir)
        config = _plain(run.config)
        run.shared[LOGGER] = self
        run.publish(LogOpened, logger=self._token, name=run.name, work_dir=work_dir, seed=run.seed, config=config)

    def before_train_epoch(self, event: BeforeTrainEpoch) -> None:
        """Tell how long the epoch is."""
        event.run.publish(LogEpochBegan, logger=self._token, epoch_length=event.run.epoch_length)

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        """Have the last line written, if it is wanted."""
        event.run.publish(LogEpochEnded, logger=self._token)

    def after_val_epoch(self, event: AfterValEpoch) -> None:
        """Hand the metrics over."""
        self._publish_metrics(event)

    def after_test_epoch(self, event: AfterTestEpoch) -> None:
        """Hand the metrics over."""
        self._publish_metrics(event)

    def on_exception(self, event: OnException) -> None:
        """Have everything written and closed."""
        event.run.publish(LogClosed, logger=self._token, finished=False)

    def after_run(self, event: AfterRun) -> None:
        """Have everything written, closed and copied."""
        event.run.publish(LogClosed, logger=self._token)

    def tell(self, run: RunView, line: str, **facts: Any) -> None:
        """Log a line behind the scalars of all that was before it; for hooks that find this one in ``run.shared[LOGGER]``."""
        run.publish(LogLine, logger=self._token, line=line, facts=facts)

    def _publish_metrics(self, event: AfterValEpoch | AfterTestEpoch) -> None:
        stage, info = event.progress.stage, event.run.info
        times = {name: info[f"{stage}/{name}"] for name in ("time", "data_time") if f"{stage}/{name}" in info}
        event.run.publish(LogMetrics, logger=self._token, outputs={**event.metrics, **times})

    # --------------------------------------------------------------------------------------- on the thread of the lane

    # Errors are logged, not raised: three weeks of training are worth more than a log line. Only here, not above: what an
    # inline method publishes may raise an error that some other offloaded handler left for the training thread.
    # A long linger, as the work of this thread is taken from the training (one GIL): many lines at once cost a third each.
    @mount(
        AfterTrainIter,
        LogEvent,
        ImageReported,
        Evaluated,
        CheckpointStaged,
        offload="thread",
        batch=256,
        linger=0.1,
        timeout=attrgetter("timeout"),
        on_error="log",
    )
    def write(self, events: list[_Heard]) -> None:
        """Write what is there: scalars in the ``outputs`` of iterations, images, results, and the records made for it."""
        with self._writing:
            self._write(events)

    def _write(self, events: list[_Heard]) -> None:
        durable = False
        for event in events:
            if isinstance(event, AfterTrainIter):
                where = _where(event.progress, event.batch_idx + 1, self._epoch_length)
                self._fanout.train(_numbers(event.outputs), where)
            elif isinstance(event, ImageReported):
                where = _where(event.progress)
                self._fanout.image(event.name, event.image, self._step(where), where)
            elif isinstance(event, Evaluated):
                where = msgspec.structs.replace(_where(event.progress), stage="eval", epoch=event.epoch, iter=event.iter)
                self._fanout.evaluated(event.metrics, event.iter, where)
            elif isinstance(event, CheckpointStaged):
                durable = True  # it is committed once this method has returned
            elif event.logger == self._token:
                self._write_one(event)
        if self._facts is not None:
            self._fanout.flush(durable=durable)

    def _write_one(self, event: LogEvent) -> None:
        match event:
            case LogEpochBegan():
                self._epoch_length = event.epoch_length
            case LogEpochEnded():
                self._fanout.end_epoch()
            case LogMetrics():
                where = _where(event.progress)
                self._fanout.evaluated(_numbers(event.outputs), self._step(where), where)
            case LogLine():
                self._fanout.flush()
                log.info(event.line, **event.facts)
            case LogOpened():
                self._open(event)
            case LogClosed():
                self._close(event)

    def _step(self, where: Where) -> int:
        by_epoch = where.stage != "train" and self._by_epoch and where.max_iters is None
        return where.epoch if by_epoch else where.iter

    def _open(self, event: LogOpened) -> None:
        work_dir = None if event.work_dir is None else Path(event.work_dir)
        self._facts = RunFacts(event.name, work_dir, event.seed, event.config)
        self._fanout.open(self._facts)

    def _close(self, event: LogClosed) -> None:
        facts, self._facts = self._facts, None
        if facts is None:
            return  # the run ended before it had begun
        self._fanout.close(finished=event.finished)
        if event.finished and self._out_dir is not None and facts.work_dir is not None:
            copies = send(facts.work_dir, self._out_dir, self._out_suffix, keep_local=self._keep_local)
            log.info("files copied", out_dir=str(self._out_dir), files=len(copies))


LOGGER = Slot("logger", LoggerHook, weak=True)


def _where(progress: Progress, batch: int = 0, epoch_length: int | None = None) -> Where:
    now = progress.stage == "train"  # the iteration that the event is of is not counted in its progress yet
    return Where(
        stage=progress.stage,
        epoch=progress.epoch + now,
        iter=progress.iter + now,
        batch=batch,
        epoch_length=epoch_length,
        max_epochs=progress.max_epochs,
        max_iters=progress.max_iters,
    )


def _numbers(outputs: Mapping[str, Any]) -> Mapping[str, float]:
    if _NUMBERS.issuperset(map(type, outputs.values())):
        return outputs
    return {name: value for name, value in outputs.items() if isinstance(value, int | float)}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it; what is no mapping, list, number or string is told by its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else repr(value)


def _checked_writers(writers: Sequence[Writer] | None) -> list[Writer]:
    found = [ConsoleWriter(), JSONLinesWriter()] if writers is None else list(writers)
    for writer in found:
        if not isinstance(writer, Writer):
            raise ConfigurationError(f"writers: {writer!r} is not a writer object; {_meant(writer)}")
    return found


def _meant(writer: object) -> str:
    """Return what to write instead of a class, or of a name such as ``"tensorboard"``."""
    text = writer.__name__ if isinstance(writer, type) else writer if isinstance(writer, str) else ""
    names = [one.name for one in registered("writer") if text and one.name.lower().startswith(text.lower())]
    if not names:
        return "derive its class from hooks.writers.Writer"
    return f"give {' or '.join(f'{name}()' for name in names)}"
