"""``LoggerHook``: scalars to the terminal, to JSON lines and to writers of the user's own, off the training thread.

Every subscription has a lane and a thread of its own, so handlers of ``after_train_iter`` and ``after_val_epoch`` that were
offloaded one by one could overtake each other: a validation's line before the last training line, closing before the last
write. So one method hears everything on one lane, first in, first out: the training iterations themselves, and a
:class:`LogRecord` for each of the other mount points, which the inline methods publish. Events are detached on the way to the
lane, so the training thread never waits for a device or a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal

import msgspec

from eventloop import ConfigurationError, Hook, Priority, Progress, Scalars, check_options, events, get_logger, mount, register
from eventloop.config import registered
from eventloop.events import AfterTrainIter, CheckpointStaged, ImageReported, RunEvent, RunView, Slot
from hooks.evaluate import Evaluated
from hooks.options import PositiveInt, one_or_more
from hooks.smoothing import Smoother
from hooks.writers.base import RunFacts, Where, Writer
from hooks.writers.console import ConsoleWriter
from hooks.writers.fanout import Fanout
from hooks.writers.json_lines import JSONLinesWriter
from hooks.writers.outbox import send

log = get_logger()

_Writers = Annotated[
    Sequence[Writer], msgspec.Meta(description="writer objects in a list, such as [ConsoleWriter(), TensorBoardWriter()]")
]

_tokens = count(1)


class LogRecord(RunEvent, kw_only=True):
    """Work for a logger, in the order of the scalars. ``logger`` identifies one of several loggers on a bus."""

    logger: int
    kind: Literal["open", "begin_epoch", "end_epoch", "metrics", "line", "close"]
    facts: dict[str, Any]
    outputs: Scalars


@register
class LoggerHook(Hook):
    """Hands every scalar to writers: of iterations the reported ``outputs``, of validations and tests the metrics.

    Training scalars are written when the number of the batch within its epoch is a multiple of the interval, with the
    step ``iter + 1``. Keys that match ``mean_pattern`` are the mean of the last ``window_size`` iterations (since the last
    resume); a writer with an interval of 1 gets the values as they are. The step of metrics is the number of finished epochs:
    0 without training, iterations in iteration-based runs. Names begin with their stage: ``train/loss``, ``val/accuracy``,
    and ``eval/<name>`` for results of an ``EvaluateHook``. Images (``run.report_image``) go to the writers that take them.

    All of it happens on one thread. A writer that fails is reported, does not end the run and is tried again; lost calls are
    counted and logged. A checkpoint is committed when the lines of its iterations are on disk, so a resumed run has no gap,
    but repeated iterations have two lines. While a writer hangs, training goes on until 1024 events wait, and then waits for
    it; after three times :attr:`timeout` it goes on without this logger.

    Args:
        interval: iterations between lines, of writers that have no interval of their own.
        ignore_last: leave out the line at the end of an epoch whose length is no multiple of the interval. An epoch that is
            no longer than the interval gets its line all the same.
        interval_exp_name: iterations between lines with the experiment's name.
        out_dir: folder that gets copies of the work dir's files after the run, in a folder named like the work dir.
        out_suffix: ends of the names of files to copy.
        keep_local: False deletes files of the work dir once they are copied.
        log_metric_by_epoch: False takes iterations as the step of metrics.
        window_size: iterations to average over.
        mean_pattern: regular expression; scalars whose names contain a match are averaged.
        custom_cfg: further windows; see :class:`hooks.smoothing.Smoother`.
        writers: writer objects; by default the terminal and ``scalars.jsonl`` in the work dir.

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
        if out_dir is None and not keep_local:
            raise ConfigurationError("keep_local=False deletes files once they are copied to out_dir=; give one, or keep them")
        self._out_dir = None if out_dir is None else Path(out_dir)
        self._out_suffix = one_or_more("out_suffix", out_suffix, 'an end of file names or several, such as (".json", ".log")')
        self._keep_local = keep_local
        self._by_epoch = log_metric_by_epoch
        self._fanout = Fanout(
            _checked([ConsoleWriter(), JSONLinesWriter()] if writers is None else writers),
            interval=interval,
            ignore_last=ignore_last,
            interval_exp_name=interval_exp_name,
            smoother=Smoother(window_size, mean_pattern, custom_cfg),
        )
        self._token = next(_tokens)
        # A thread that was left behind as it hung may go on one day: it ends its batch before the next thread begins one.
        self._writing = Lock()
        # Of the lane's thread, as is the fanout.
        self._epoch_length: int | None = None
        self._facts: RunFacts | None = None

    # --------------------------------------------------------------------------------- inline: on the training thread

    def before_run(self, event: events.BeforeRun) -> None:
        run = event.run
        run.shared[LOGGER] = self
        work_dir = None if run.work_dir is None else str(run.work_dir)
        self._record(run, "open", name=run.name, work_dir=work_dir, seed=run.seed, config=_plain(run.config))

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        self._record(event.run, "begin_epoch", epoch_length=event.run.epoch_length)

    def after_train_epoch(self, event: events.AfterTrainEpoch) -> None:
        self._record(event.run, "end_epoch")

    def after_val_epoch(self, event: events.AfterValEpoch) -> None:
        self._record_metrics(event)

    def after_test_epoch(self, event: events.AfterTestEpoch) -> None:
        self._record_metrics(event)

    def on_exception(self, event: events.OnException) -> None:
        self._record(event.run, "close", finished=False)

    def after_run(self, event: events.AfterRun) -> None:
        self._record(event.run, "close", finished=True)

    def log_line(self, run: RunView, line: str, **facts: Any) -> None:
        """Log a line below the scalars of everything before it; for hooks that find this one in ``run.shared[LOGGER]``."""
        self._record(run, "line", line=line, facts=facts)

    def _record_metrics(self, event: events.AfterValEpoch | events.AfterTestEpoch) -> None:
        stage, info = event.progress.stage, event.run.info
        times = {name: info[f"{stage}/{name}"] for name in ("time", "data_time") if f"{stage}/{name}" in info}
        self._record(event.run, "metrics", {**event.metrics, **times})

    def _record(self, run: RunView, kind: str, outputs: Mapping[str, Any] | None = None, **facts: Any) -> None:
        run.publish(LogRecord, logger=self._token, kind=kind, facts=facts, outputs=outputs or {})

    # --------------------------------------------------------------------------------------- on the thread of the lane

    # Errors are logged, not raised: three weeks of training are worth more than a log line. Only here, not above: when an
    # inline method publishes, it may raise an error that another offloaded handler left for the training thread.
    # A long linger, as the work of this thread is taken from the training (one GIL): many lines at once cost a third each.
    @mount(
        AfterTrainIter,
        LogRecord,
        ImageReported,
        Evaluated,
        CheckpointStaged,
        offload="thread",
        batch=256,
        linger=0.1,
        timeout=attrgetter("timeout"),
        on_error="log",
    )
    def write(self, events: list[AfterTrainIter | LogRecord | ImageReported | Evaluated | CheckpointStaged]) -> None:
        """Write the scalars of iterations, images, results, and the records."""
        with self._writing:
            durable = False
            for event in events:
                if isinstance(event, AfterTrainIter):
                    self._fanout.train(_numbers(event.outputs), _where(event.progress, event.batch_idx + 1, self._epoch_length))
                elif isinstance(event, LogRecord):
                    if event.logger == self._token:
                        self._write_record(event, **event.facts)
                elif isinstance(event, ImageReported):
                    where = _where(event.progress)
                    self._fanout.image(event.name, event.image, self._step(where), where)
                elif isinstance(event, Evaluated):
                    where = msgspec.structs.replace(_where(event.progress), stage="eval", epoch=event.epoch, iter=event.iter)
                    self._fanout.evaluated(event.metrics, event.iter, where)
                else:
                    durable = True  # the checkpoint is committed once this method has returned
            if self._facts is not None:
                self._fanout.flush(durable=durable)

    def _write_record(self, event: LogRecord, **facts: Any) -> None:
        match event.kind:
            case "begin_epoch":
                self._epoch_length = facts["epoch_length"]
            case "end_epoch":
                self._fanout.end_epoch()
            case "metrics":
                where = _where(event.progress)
                self._fanout.evaluated(_numbers(event.outputs), self._step(where), where)
            case "line":
                self._fanout.flush()
                log.info(facts["line"], **facts["facts"])
            case "open":
                work_dir = None if facts["work_dir"] is None else Path(facts["work_dir"])
                self._facts = RunFacts(facts["name"], work_dir, facts["seed"], facts["config"])
                self._fanout.open(self._facts)
            case "close":
                self._close(finished=facts["finished"])

    def _step(self, where: Where) -> int:
        by_epoch = where.stage != "train" and self._by_epoch and where.max_iters is None
        return where.epoch if by_epoch else where.iter

    def _close(self, *, finished: bool) -> None:
        facts, self._facts = self._facts, None
        if facts is None:
            return  # the run ended before it had begun
        self._fanout.close(finished=finished)
        if finished and self._out_dir is not None and facts.work_dir is not None:
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
    return {name: value for name, value in outputs.items() if isinstance(value, int | float)}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it; another object becomes its repr."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else repr(value)


def _checked(writers: Sequence[Any]) -> Sequence[Writer]:
    for writer in writers:
        if not isinstance(writer, Writer):
            text = writer.__name__ if isinstance(writer, type) else str(writer)
            names = [f"{one.name}()" for one in registered("writer") if text and one.name.lower().startswith(text.lower())]
            advice = f"give {' or '.join(names)}" if names else "derive its class from hooks.writers.Writer"
            raise ConfigurationError(f"writers: {writer!r} is not a writer object; {advice}")
    return writers
