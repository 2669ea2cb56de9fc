"""``LoggerHook``: write scalars to the terminal, to JSON lines and to the user's writers, off the training thread.

One method gets everything from one lane, in large batches: training iterations, and a :class:`LogRecord` where a mount point
needs facts that only the run has, which the inline methods publish. The lane detaches events, so the training thread never
waits for a device or a disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, groupby
from operator import attrgetter
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, events, get_logger, mount
from trainbus.eventloop.events import (
    AfterRun,
    AfterTrainEpoch,
    AfterTrainIter,
    CheckpointStaged,
    HistogramReported,
    ImageReported,
    OnException,
    Slot,
    TextReported,
)
from trainbus.eventloop.plain import encodable, plain_config, without_secrets
from trainbus.eventloop.registry import register, registered
from trainbus.hooks import log_state
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.evaluate import Evaluated
from trainbus.hooks.options import PositiveInt, one_or_more
from trainbus.hooks.smoothing import MEASURED, Smoother
from trainbus.hooks.writers.base import RunFacts, Where, Writer
from trainbus.hooks.writers.console import ConsoleWriter
from trainbus.hooks.writers.fanout import Fanout
from trainbus.hooks.writers.files import FileWriter, claim
from trainbus.hooks.writers.json_lines import JSONLinesWriter
from trainbus.hooks.writers.outbox import send

log = get_logger()

_Writers = Annotated[
    Sequence[Writer], msgspec.Meta(description="writer objects in a list, such as [ConsoleWriter(), TensorBoardWriter()]")
]

_tokens = count(1)
_WINDOWS = "logger_windows"  # key in checkpoints


class LogRecord(events.RunEvent, kw_only=True):
    """A task for a logger, in order with the scalars. ``logger`` identifies one of several loggers on a bus."""

    logger: int
    kind: Literal["open", "begin_epoch", "metrics", "line"]
    facts: dict[str, Any]
    outputs: events.Scalars


_REPORTED = (ImageReported, HistogramReported, TextReported)
_LOGGED = (AfterTrainIter, AfterTrainEpoch, AfterRun, OnException, LogRecord, *_REPORTED, Evaluated, CheckpointStaged)


@register
class LoggerHook(CopiedAnew, Hook):
    """Pass all scalars to writers: the reported ``outputs`` of iterations, and the metrics of validations and tests.

    - Training scalars are written when the batch number within the epoch is a multiple of the interval, with the step
      ``iter + 1``. The step of metrics is the number of finished epochs (of iterations in iteration-based runs).
    - All measurements of a line are means over the same last ``window_size`` iterations. States are current: learning rates,
      momenta, ``weight_decay``, ``loss_scale``, ``eta``. A writer with an interval of 1 gets the raw values. This holds for all
      writers: the terminal, JSON lines, TensorBoard.
    - A scalar that leaves out iterations, such as the return of an episode, is in no mean: each of its values is written, with
      the iteration that reported it. One that each optimizer step reports, within an accumulation, leaves out none.
    - Checkpoints hold the windows, so the lines of a resumed run are those of an uninterrupted one.
    - Names begin with their stage: ``train/loss``, ``val/accuracy``, and ``eval/<name>`` for results of an ``EvaluateHook``.
    - Images, figures, histograms and texts (:mod:`trainbus.media`) go to the writers that take them.

    One thread calls all writers. A failing writer is logged and tried again, and does not end the run; lost calls are counted
    and logged. A checkpoint is committed when the lines of its iterations are on disk. A resumed run therefore has no gap, but
    repeated iterations have two lines. While a writer hangs, training continues until 1024 events wait, and then waits for the
    writer. After three times :attr:`timeout` training continues without this logger.

    Args:
        interval: iterations between lines, for writers without an interval of their own.
        ignore_last: write no line at the end of an epoch; an epoch that is not longer than the interval still has one.
        interval_exp_name: iterations between lines with the experiment's name.
        out_dir: after the run, copy the work dir's files into a subfolder of this folder with the name of the work dir.
        out_suffix: suffixes of the files to copy.
        keep_local: False deletes the files of the writers after they are copied. Other files are copied and stay.
        log_metric_by_epoch: False uses iterations as the step of metrics.
        window_size: number of iterations to average over.
        mean_pattern: regular expression; scalars whose names contain a match are averaged, others are current. By default all
            but the states above. ``"loss|time|data_time|grad_norm"`` is MMEngine's choice.
        custom_cfg: further windows; see :class:`trainbus.hooks.smoothing.Smoother`.
        writers: writer objects; by default the terminal and ``scalars.jsonl`` in the work dir.

    Raises:
        ConfigurationError: an option does not fit, or ``keep_local=False`` comes without ``out_dir``.
    """

    priority = Priority.BELOW_NORMAL
    observes = True
    ranks = "rank0"
    of_run: ClassVar = {
        "_writing": Lock,
        "_token": partial(next, _tokens),
        "_unwritten": log_state.Unwritten,
        **dict.fromkeys(("_restored", "_epoch_length", "_facts"), NoneType),
        **dict.fromkeys(("_begun", "_at"), int),
        "_opens": bool,
    }
    timeout: float = 600.0
    """Seconds that writing a batch of events may take; more is an error."""

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
        mean_pattern: str = MEASURED,
        custom_cfg: Sequence[Mapping[str, Any]] = (),
        writers: _Writers | None = None,
    ) -> None:
        if out_dir is None and not keep_local:
            raise ConfigurationError(
                "keep_local=False deletes the writers' files after copying them to out_dir=; give out_dir=, too"
            )
        self._out_dir = None if out_dir is None else Path(out_dir).expanduser()
        self._out_suffix = one_or_more("out_suffix", out_suffix, 'a suffix of file names or several, such as (".json", ".log")')
        self._keep_local = keep_local
        self._by_epoch = log_metric_by_epoch
        self._fanout = Fanout(
            _checked([ConsoleWriter(), JSONLinesWriter()] if writers is None else writers),
            interval=interval,
            ignore_last=ignore_last,
            interval_exp_name=interval_exp_name,
            smoother=Smoother(window_size, mean_pattern, custom_cfg),
        )
        self._idle_without_work_dir = [type(writer).__name__ for writer in writers or () if writer.needs_work_dir]
        self._token = next(_tokens)
        self._unwritten = log_state.Unwritten()
        self._restored: dict[str, Any] | None = None  # until the thread of the lane takes it
        self._opens = False  # until the first stage of a run
        self._begun = 0  # how often the windows began anew or with those of a checkpoint
        # A thread that was abandoned in a hanging writer may wake up later: it ends its batch before the next thread begins.
        self._writing = Lock()
        # Used only by the lane's thread, like the fanout.
        self._epoch_length: int | None = None
        self._facts: RunFacts | None = None
        self._at = 0  # how far this thread has come with `_begun`

    def in_check(self) -> Hook:
        """Copy no files, and leave out writers that write elsewhere."""
        self._out_dir, self._keep_local = None, True
        kept = [writer for writer in self._fanout.writers if writer.in_check() is not None]
        if out := [type(one).__name__ for one in self._fanout.writers if one not in kept]:
            log.warning(f"{', '.join(out)} was left out, because it writes outside of the work dir", id="writer-left-out")
        self._fanout.writers = kept
        return self

    def files_of_run(self, work_dir: Path) -> Collection[Any]:
        return [work_dir / name for writer in self._fanout.writers for name in writer.files()]

    # --------------------------------------------------------------------------------- inline: on the training thread

    def before_run(self, event: events.BeforeRun) -> None:
        run = event.run
        run.shared[LOGGER] = self
        for writer in self._fanout.writers if run.work_dir is not None else ():
            claim(run, f"{type(writer).__name__} of {self.label}", writer.files())
        if run.work_dir is None and self._idle_without_work_dir:
            writers = ", ".join(self._idle_without_work_dir)
            log.warning(
                f"these writers write nothing, as the run has no work dir: {run.work_dir_advice}",
                id="writers-without-work-dir",
                writers=writers,
            )
        self._begun, self._restored = self._begun + 1, None
        self._opens = True

    @mount("before_train", "before_val", "before_test", priority=Priority.HIGHEST)
    def open_writers(self, event: events.BeforeTrain | events.BeforeVal | events.BeforeTest) -> None:
        """Open the writers, once the run knows whether it resumes."""
        run = event.run
        opens, self._opens = self._opens, False
        if opens:
            work_dir = None if run.work_dir is None else str(run.work_dir)
            config = without_secrets(plain_config(run.config))
            self._record(run, "open", begun=self._begun, name=run.name, work_dir=work_dir, seed=run.seed, config=config)

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        state, self._restored = self._restored, None
        self._begun += state is not None
        self._record(event.run, "begin_epoch", begun=self._begun, epoch_length=event.run.data.epoch_length, state=state)

    def before_save_checkpoint(self, event: events.BeforeSaveCheckpoint) -> None:
        own = next((one for one in event.run.bus.subscriptions if one.hook is self and one.lane is not None), None)
        if own is None:  # it was retired, and has no lines to continue
            return
        reach = self._fanout.reach
        # Before the windows: an iteration may be in both, but must not be in neither.
        unfinished = [] if reach == 0 else own.waiting()
        at, length, skipped = self._at, self._epoch_length, 0
        windows: Mapping[str, Any] | None
        windows, done = self._fanout.state_dict()
        restored: list[log_state.Waiting] = []
        later: list[tuple[AfterTrainIter, log_state.Late, int | None]] = []
        for one, late in unfinished:
            if isinstance(one, AfterTrainIter) and one.progress.iter >= done:
                later.append((one, late, length))
            elif isinstance(one, LogRecord) and one.logger == self._token and "begun" in one.facts:
                length = one.facts.get("epoch_length")
                if one.facts["begun"] > at:
                    at = one.facts["begun"]
                    (windows, skipped, restored), done, later = log_state.parts(one.facts.get("state")), 0, []
        needed = later if reach is None else later[-reach:]
        new = [log_state.Waiting(one.outputs, Where.of(one.progress, one.batch_idx + 1, of), late) for one, late, of in needed]
        state = self._unwritten.pack(windows, skipped + len(later) - len(needed), [*restored, *new], reach)
        event.checkpoint.setdefault(_WINDOWS, {})[self._place(event.run)] = state

    def after_load_checkpoint(self, event: events.AfterLoadCheckpoint) -> None:
        state = event.checkpoint.get(_WINDOWS, {}).get(self._place(event.run))  # 0.2 saved none
        self._restored = None if state is None else log_state.read(state)

    def _place(self, run: events.RunView) -> str:
        """Return the key of this logger among those on the bus, which may have one name."""
        return str([hook for hook in run.bus.hooks if isinstance(hook, LoggerHook)].index(self))

    @mount("after_val_epoch", "after_test_epoch")
    def evaluated(self, event: events.AfterValEpoch | events.AfterTestEpoch) -> None:
        stage, info = event.progress.stage, event.run.info
        times = {name: info[f"{stage}/{name}"] for name in ("time", "data_time") if f"{stage}/{name}" in info}
        self._record(event.run, "metrics", {**event.metrics, **times})

    def log_line(self, run: events.RunView, line: str, **facts: Any) -> None:
        """Log a line below all scalars so far, for hooks that find this logger in ``run.shared[LOGGER]``."""
        self._record(run, "line", line=line, facts=facts)

    def _record(self, run: events.RunView, kind: str, outputs: Mapping[str, Any] | None = None, **facts: Any) -> None:
        run.publish(LogRecord, logger=self._token, kind=kind, facts=facts, outputs=outputs or {})

    # --------------------------------------------------------------------------------------- on the thread of the lane

    # on_error="log" only here: when an inline method publishes, it may raise the error of another offloaded handler.
    # Large batches, because each wake-up of this thread costs the training about 0.3 ms: the GIL changes hands, and caches are
    # cold. A lane that is half full wakes it earlier, and what waits for lines (a drain, a commit, the end) wakes it at once.
    @mount(*_LOGGED, offload="thread", batch=1024, linger=0.25, timeout=attrgetter("timeout"), on_error="log")
    def write(self, batch: list[events.Event]) -> None:
        with self._writing:
            durable = False
            for kind, group in groupby(batch, type):
                if issubclass(kind, AfterTrainIter):
                    self._fanout.train(cast("Iterator[AfterTrainIter]", group), self._epoch_length)
                    continue
                for event in group:
                    self._write_one(event)
                    durable |= isinstance(event, CheckpointStaged)  # it is committed after this method returns
            self._fanout.flush(durable=durable)

    def _write_one(self, event: events.Event) -> None:
        if isinstance(event, LogRecord):
            if event.logger == self._token:
                self._write_record(event, **event.facts)
        elif isinstance(event, _REPORTED):
            self._write_reported(event, Where.of(event.progress))
        elif isinstance(event, Evaluated):
            where = msgspec.structs.replace(Where.of(event.progress), stage="eval", epoch=event.epoch, iter=event.iter)
            self._fanout.evaluated(event.metrics, event.iter, where)
        elif isinstance(event, AfterTrainEpoch):
            self._fanout.end_epoch()
        elif isinstance(event, AfterRun | OnException):
            self._close(finished=isinstance(event, AfterRun))

    def _write_reported(self, event: events.RunEvent, where: Where) -> None:
        match event:
            case ImageReported(name=name, image=image):
                self._fanout.image(name, image, self._step(where), where)
            case HistogramReported(name=name, values=values, bins=bins):
                self._fanout.histogram(name, values, bins, self._step(where), where)
            case TextReported(name=name, text=text):
                self._fanout.text(name, text, self._step(where), where)

    def _write_record(self, event: LogRecord, **facts: Any) -> None:
        match event.kind:
            case "begin_epoch":
                self._epoch_length = facts["epoch_length"]
                if facts["state"] is not None:
                    self._fanout.load_state_dict(*log_state.parts(facts["state"]))
                self._at = facts["begun"]
            case "metrics":
                where = Where.of(event.progress)
                numbers = {name: value for name, value in event.outputs.items() if isinstance(value, int | float)}
                self._fanout.evaluated(numbers, self._step(where), where)
            case "line":
                self._fanout.flush()
                log.info(facts["line"], **facts["facts"])
            case "open":
                work_dir = None if facts["work_dir"] is None else Path(facts["work_dir"])
                name, config = encodable([facts["name"], facts["config"]])
                self._facts = RunFacts(name, work_dir, facts["seed"], config)
                self._fanout.open(self._facts)
                self._at = facts["begun"]

    def _step(self, where: Where) -> int:
        by_epoch = where.stage != "train" and self._by_epoch and where.max_iters is None
        return where.epoch if by_epoch else where.iter

    def _close(self, *, finished: bool) -> None:
        facts, self._facts = self._facts, None
        self._fanout.close(finished=finished)
        if finished and facts is not None and self._out_dir is not None and facts.work_dir is not None:
            own = [facts.work_dir / writer.filename for writer in self._fanout.writers if isinstance(writer, FileWriter)]
            copies = send(facts.work_dir, self._out_dir, self._out_suffix, moved=() if self._keep_local else own)
            log.info("files copied", out_dir=str(self._out_dir), files=len(copies))


LOGGER = Slot("logger", LoggerHook)


def _checked(writers: Sequence[Any]) -> Sequence[Writer]:
    for writer in writers:
        if not isinstance(writer, Writer):
            text = writer.__name__ if isinstance(writer, type) else str(writer)
            names = [f"{one.name}()" for one in registered("writer") if text and one.name.lower().startswith(text.lower())]
            advice = f"give {' or '.join(names)}" if names else "derive its class from hooks.writers.Writer"
            raise ConfigurationError(f"writers: {writer!r} is not a writer object; {advice}")
    return writers
