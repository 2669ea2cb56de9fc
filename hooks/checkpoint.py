"""When to save, under which names, and which files stay. The run gathers and writes (``run.request_save``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eventloop import CheckpointError, ConfigurationError, Hook, Priority, check_options, get_logger, register
from eventloop.checkpoint import (
    AnyPath,
    Busy,
    Staging,
    as_path,
    is_sharded,
    store_of,
    sweep_shards,
)
from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    BeforeTrain,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    RunView,
)
from hooks.best import Best, names
from hooks.checkpoint_options import SUFFIX, MetricNames, check_count, checked_template, warn_of_late_begin
from hooks.kept import KEPT, Kept
from hooks.options import NonNegativeInt
from hooks.publishing import keys_to_publish, publish_checkpoint, sweep
from hooks.rules import Rule, check_validated, warn_unvalidated
from hooks.schedule import KEY as SCHEDULES

log = get_logger()

OPTIMIZER = "optimizer"
"""Where a checkpoint holds the states of optimizers."""


@register
class CheckpointHook(Hook):
    """Saves checkpoints: every ``interval`` epochs or iterations, at the end, and when a metric is the best so far.

    With n = epoch + 1 (or iteration + 1), it saves when n ≥ ``save_begin`` and (n − ``save_begin``) % ``interval`` == 0: with
    ``save_begin=5, interval=2`` at 5, 7, 9 … Files are ``epoch_{n}.safetensors`` or ``iter_{n}.safetensors``, and
    ``best_{metric}_{epoch|iter}_{n}.safetensors`` with ``/`` in the metric's name as ``_``. A save that is due within an
    accumulation window waits for the window's step. A state is written once: a best checkpoint is another name (a hard
    link, where the file system has them) of the file that was written after the same iteration. If a handler of a mount point
    in between may have changed the state, it is a file of its own (see ``observes`` of :class:`eventloop.Hook`). All of them
    resume.

    Nothing is deleted before its successor is durable, and nothing that another hook of the run keeps. ``last_checkpoint``,
    in the directory and in the work dir, names the newest. A value in the state of the run that no checkpoint can hold is an
    error at the first update.

    Args:
        interval: epochs or iterations between saves; -1 for none.
        by_epoch: count epochs, else iterations.
        save_optimizer: False leaves optimizers out; such a file cannot resume a run exactly.
        save_param_scheduler: False leaves schedules out.
        out_dir: where to: a directory, or a URL such as ``"s3://bucket/runs"`` that fsspec reaches (``pip install
            "trainbus[remote]"``, and the package for the protocol). Files go into a folder in it that is named like the work
            dir, so that several runs can have one ``out_dir``; without a work dir, into ``out_dir`` itself. The work dir by
            default, which learns of the newest checkpoint wherever that is. ``resume="auto"`` looks in both.
        max_keep_ckpts: how many of the regular files stay; -1 for all.
        save_last: also save at the end of training, however it was stopped (not by an exception). A run that was stopped in
            the middle of an epoch saves under ``iter_{n}``.
        save_best: name or names of metrics of which the best checkpoint stays; ``"auto"`` for the first metric of the
            first validation (of what the step returns only where there is no metric).
        rule: ``"greater"`` or ``"less"`` is better, for all of ``save_best``, or a list with one for each. By default it is
            inferred, see :func:`hooks.rules.find_rule`.
        greater_keys: instead of the names of metrics of which more is better.
        less_keys: instead of the names of metrics of which less is better.
        filename_tmpl: other names, such as ``"model_{}.safetensors"``, and ``best_{metric}_model_{n}.safetensors``.
        published_keys: keys of the checkpoint (``"state_dict"``) of which to write a stripped copy after training, named with
            the first 8 hex digits of its SHA-256: of the best if ``save_best``, and of the last if ``save_last``.
        save_begin: epoch or iteration to begin at.
        on_error: ``"raise"`` ends the run when a file cannot be written, published or removed, ``"log"`` goes on.
        staging: ``"block"`` copies the state while the training waits. ``"overlap"`` copies what only optimizers change
            (weights, their own state) on a thread during the next forward and backward pass, and the next ``optimizer.step``
            waits for it; the rest is copied at once, and in a validation or test all of it. A tensor that something
            else changes meanwhile makes the save fail. See :mod:`eventloop.checkpoint.overlap` for what this cannot see.
        busy: what a save does that is due while another is being written: ``"wait"`` for it, ``"skip"`` (this save is left
            out), or ``"replace"`` (it takes the place of the one that waits, not of the one that is being written, and
            needs staging memory twice). What is left out is published as ``checkpoint_skipped``. The last save of a
            training always waits.
        name: of this hook in checkpoints, where there are several of its kind.

    Raises:
        ConfigurationError: an option that cannot work, a run without a directory, or a URL whose package is not installed.
    """

    priority = Priority.VERY_LOW
    observes = True

    @check_options
    def __init__(
        self,
        interval: int = -1,
        *,
        by_epoch: bool = True,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | Path | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | MetricNames | None = None,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Iterable[str] | None = None,
        less_keys: str | Iterable[str] | None = None,
        filename_tmpl: str | None = None,
        published_keys: str | Iterable[str] | None = None,
        save_begin: NonNegativeInt = 0,
        on_error: Literal["raise", "log"] = "raise",
        staging: Staging = "block",
        busy: Busy = "wait",
        name: str = "",
    ) -> None:
        check_count("interval", interval, "the epochs or iterations between saves, or -1 for none")
        check_count("max_keep_ckpts", max_keep_ckpts, "how many files stay, or -1 for all")
        self.name = name
        self.interval = interval
        self.by_epoch = by_epoch
        self.save_begin = save_begin
        self.save_last = save_last
        self.on_error: Literal["raise", "log"] = on_error
        self._out_dir = None if out_dir is None else as_path(out_dir)
        self._options: dict[str, Any] = {
            "leave_out": [key for key, saved in ((OPTIMIZER, save_optimizer), (SCHEDULES, save_param_scheduler)) if not saved],
            "on_error": on_error,
            "staging": staging,
            "busy": busy,
        }
        self._template = checked_template(filename_tmpl or f"{'epoch' if by_epoch else 'iter'}_{{}}{SUFFIX}")
        # Iteration-based training validates within its one epoch: there the best files count iterations.
        self._best_by_iter = checked_template(filename_tmpl or f"iter_{{}}{SUFFIX}")
        self._publish = None if published_keys is None else names("published_keys", published_keys)
        keep = None if max_keep_ckpts == -1 else max_keep_ckpts
        self._kept = Kept(keep, partial(Best, save_best, rule, greater_keys, less_keys))
        self._sharded = False
        self._loaded_here = False  # the run goes on from a file in this directory
        self._checked = False
        self._finished = False
        self._first = True  # of several processes, the one that removes
        self._began_at: int | None = None  # iterations at the beginning, if there is nothing to save of that state

    # -------------------------------------------------------------------------------------------- begin and end

    def before_run(self, event: BeforeRun) -> None:
        """Find the directory."""
        directory = self._directory(event.run.work_dir)
        event.run.shared[KEPT] = everybody = event.run.shared.get(KEPT, [])
        self._kept.begin(directory, everybody)
        self._loaded_here = False
        self._checked = self._finished = False
        self._first = event.run.rank == 0
        if directory is not None and directory.exists() and not directory.is_dir():
            raise ConfigurationError(f"{self.label} cannot save to {directory}: it is not a directory")
        if directory is not None and directory != event.run.work_dir:
            event.run.keeps_checkpoints_in(directory)

    def after_load_checkpoint(self, event: AfterLoadCheckpoint) -> None:
        """Note whether the newest file is here."""
        self._loaded_here = bool(self._kept.own([event.path]))

    def before_train(self, event: BeforeTrain) -> None:
        """Clean up after a process that was killed here."""
        directory = self._kept.directory
        if self._saves and directory is None:
            raise ConfigurationError(
                f"{self.label} has no place for its files: give the run a work_dir, or the hook an out_dir"
            )
        if self._kept.best.wanted:
            check_validated(event, f"{self.label}(save_best=...)")
        if directory is not None and event.run.rank == 0:
            self._sharded = sweep(directory) or any(map(is_sharded, event.run.models.values()))
        self._began_at = event.progress.iter if self._loaded_here or not event.progress.iter else None

    def after_train(self, event: AfterTrain) -> None:
        """Save what was trained since the newest file."""
        self._finished = True
        if self._kept.best.wanted:
            warn_unvalidated(event, f"{self.label}(save_best=...)")
        if not self.save_last or (done := event.progress).iter == self._began_at:
            return
        name = self._template.format(done.epoch if self.by_epoch else done.iter)
        if self.by_epoch and done.batch_idx:
            name = f"iter_{done.iter}{SUFFIX}"
        self._request(event.run, name, busy="wait")  # of a state that is in this file already nothing is written

    def after_run(self, event: AfterRun) -> None:
        """Write the stripped copies."""
        if self._publish is None or not self._finished or (directory := self._kept.directory) is None or event.run.rank:
            return
        event.run.wait_for_saves()
        shelves = self._kept.shelves if self.save_last else self._kept.best.shelves
        for entry in (shelf.newest for shelf in shelves):
            if entry is not None and entry.durable:
                with self._errors("a checkpoint could not be published", directory / entry.name):
                    publish_checkpoint(directory / entry.name, self._publish)

    # ------------------------------------------------------------------------------------------------- training

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Save by iterations; at the first update, check that saving is possible."""
        run = event.run
        if not self._checked and (run.updated or not run.optimizers):
            self._checked = True
            if self._saves:
                there = run.check_savable(directory=self._kept.directory, **self._options)
                if self._publish is not None and not run.rank:
                    with self._errors("no checkpoint can be published", str(self._kept.directory)):
                        keys_to_publish(self._publish, there, f"a checkpoint of {self.label}")
            if self.interval > 0:
                last = (event.progress.max_epochs or 1) if self.by_epoch else run.total_iters
                warn_of_late_begin(self.label, self.save_begin, last, "epoch" if self.by_epoch else "iteration")
        if self.by_epoch:
            return
        done = event.progress.iter + 1
        if self._due(done) or (self.save_last and done == run.total_iters):
            self._request(run, self._template.format(done))

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        """Save by epochs."""
        if not self.by_epoch:
            return
        done = event.progress.epoch + 1
        if self._due(done) or (self.save_last and done == event.progress.max_epochs):
            self._request(event.run, self._template.format(done))

    def after_val_epoch(self, event: AfterValEpoch) -> None:
        """Save what is the best so far by any of the metrics, in a training."""
        if not self._kept.best.wanted or not event.run.training:
            return
        if not event.metrics:
            log.warning("this validation has no metrics; the best checkpoint is not looked for", hook=self.label)
            return
        for metric, score, shelf in self._kept.best.improved(event.metrics):
            file = f"best_{metric.replace('/', '_')}_{self._when(event)}"
            shelf.put(file, score)
            event.run.request_save(file, directory=self._kept.directory, **self._options)

    # --------------------------------------------------------------------------------- on the committing thread

    def checkpoint_committed(self, event: CheckpointCommitted) -> None:
        """Delete what has a durable successor now."""
        directory, gone = self._kept.directory, self._kept.committed(event.names)
        if directory is None or not self._first:
            return
        for name in gone:
            with self._errors("an old checkpoint could not be removed", directory / name):
                store_of(directory).remove(directory / name)
        if self._sharded:  # also when a file was replaced by a newer one of its name
            with self._errors("parts of old checkpoints could not be removed", directory):
                sweep_shards(Path(str(directory)), still=0)  # nothing else is being written: this is the thread that writes

    def checkpoint_failed(self, event: CheckpointFailed) -> None:
        """Forget what could not be written: what it was to replace stays."""
        self._kept.forget(event.names)

    def checkpoint_skipped(self, event: CheckpointSkipped) -> None:
        """Forget what was left out; as with one that failed, what it was to replace stays."""
        self._kept.forget(event.names)

    # ---------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the files that stay, and the best scores."""
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back. A best score whose file is gone is forgotten: the next one is the best that there is."""
        self._kept.load_state_dict(state)

    # ------------------------------------------------------------------------------------------------ internals

    @property
    def _saves(self) -> bool:
        return self.interval > 0 or self.save_last or self._kept.best.wanted

    def _directory(self, work_dir: Path | None) -> AnyPath | None:
        """Return where this run's files go: in ``out_dir``, which other runs may have, too, a folder of its own."""
        out_dir = None if self._out_dir is None else self._out_dir.absolute()
        if out_dir is None or work_dir is None or out_dir == work_dir:
            return out_dir or work_dir
        return out_dir / work_dir.resolve().name

    def _due(self, done: int) -> bool:
        return self.interval > 0 and done >= self.save_begin and (done - self.save_begin) % self.interval == 0

    def _request(self, run: RunView, name: str, **options: Any) -> None:
        self._kept.files.put(name)
        run.request_save(name, directory=self._kept.directory, **(self._options | options))

    def _when(self, event: AfterValEpoch) -> str:
        by_epoch = self.by_epoch and event.progress.max_iters is None
        return self._template.format(event.progress.epoch) if by_epoch else self._best_by_iter.format(event.progress.iter)

    @contextmanager
    def _errors(self, what: str, path: AnyPath | str) -> Iterator[None]:
        """Log errors of the file system instead of raising them, with ``on_error="log"``."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if self.on_error == "raise":
                raise
            log.warning(what, hook=self.label, path=str(path), error=str(error))
