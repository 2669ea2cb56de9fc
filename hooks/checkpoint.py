"""``CheckpointHook``: decide when to save, under which names, and which files stay. The run gathers and writes the state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from trainbus.eventloop import (
    CheckpointError,
    ConfigurationError,
    Hook,
    Priority,
    check_options,
    events,
    get_logger,
    mount,
    platform,
)
from trainbus.eventloop.checkpoint import (
    AnyPath,
    Busy,
    RemotePath,
    Staging,
    as_path,
    checkpoints_in,
    remove,
    sweep_shards,
)
from trainbus.eventloop.events import RunView
from trainbus.eventloop.registry import register
from trainbus.eventloop.training import Best, load_best_at_end
from trainbus.eventloop.user_errors import contextmanager
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import NonNegativeInt, check_epochs, one_or_more
from trainbus.hooks.publishing import keys_to_publish, publish_checkpoint, remove_copies
from trainbus.hooks.retention import KEPT, REGULAR, SUFFIX, RetentionPolicy, sweep
from trainbus.hooks.rules import Rule
from trainbus.hooks.schedule import KEY as SCHEDULES
from trainbus.hooks.scores import BestMetrics, check_validated, warn_unvalidated
from trainbus.hooks.sharded_mirror import mirror_of

log = get_logger()

MetricNames = Annotated[Sequence[str], Meta(description='a list of names (with their rules in rule=["greater", "less"])')]


@register
class CheckpointHook(CopiedAnew, Hook):
    """Save checkpoints every ``interval`` epochs or iterations, at the end, and when a metric is the best so far.

    With n = epoch + 1 (or iteration + 1), the hook saves when n ≥ ``begin`` and (n − ``begin``) % ``interval`` == 0.
    With ``begin=5, interval=2`` that is at 5, 7, 9 … A save within an accumulation window waits for the window's step.

    Files are ``epoch_{n}.safetensors`` or ``iter_{n}.safetensors``, and ``best_{metric}_{epoch|iter}_{n}.safetensors`` (with
    ``_`` for ``/`` in the metric's name). A run can resume from any of them. ``last_checkpoint``, in the directory and in the
    work dir, names the newest.

    A state is written once: a best checkpoint is a hard link (or copy; in a store a second upload) of the file of the same
    iteration. It becomes a file of its own if a handler in between may have changed the state (see ``observes`` of
    :class:`trainbus.eventloop.Hook`). A file is deleted only when its successor is durable and no other hook of the run keeps
    it. A value that a checkpoint cannot hold is an error at the first update.

    Args:
        interval: epochs or iterations between saves; -1 for none.
        by_epoch: count epochs; False counts iterations.
        save_optimizer: False leaves optimizers out; such a file cannot resume a run exactly.
        save_param_scheduler: False leaves schedules out.
        out_dir: a directory, or a URL for fsspec such as ``"s3://bucket/runs"`` (``pip install "trainbus[remote]"`` and the
            package of the protocol); by default the work dir. Each run saves into a subfolder with the name of its work dir,
            if it has one. ``resume="auto"`` looks in both. What goes to a URL is saved on this machine first, and uploaded
            beside the training.
        local_dir: where files wait for a URL: at most those that the store does not have yet, and the newest; by default the
            work dir, or without one a temporary directory. It may be in memory (``"/dev/shm/runs"``).
        max_keep_ckpts: number of regular files that stay, with those of ``run.checkpoints.save()`` and ``PreemptionHook``; -1
            for all.
        save_last: also save when training ends or is stopped (in the middle of an epoch as ``iter_{n}``), but not after an
            exception.
        save_best: keep the best checkpoint by this metric, or by each of these. ``"auto"`` is the first metric of the first
            validation (the step's own outputs count only if there is no metric).
        rule: ``"greater"`` or ``"less"`` is better, for all of ``save_best``, or a list with one for each. By default
            inferred from the name, see :func:`trainbus.hooks.rules.find_rule`.
        save_top_k: number of best files by each metric that stay: with 3, the three best; -1 for one of each validation. Of
            equal scores the earlier file stays. A file is removed when a better one is durable.
        load_best_model_at_end: when the training has ended and its last state is saved, load the weights of the best checkpoint
            (by the first metric of ``save_best``), with the averages of ``EMAHook``. Optimizers keep their state, so train on
            from a checkpoint. It is not done after an exception, and in a run that ends to be resumed (``PreemptionHook``).
        greater_keys: names of metrics for which more is better, instead of the usual ones.
        less_keys: names of metrics for which less is better, instead of the usual ones.
        filename_tmpl: template of other names: ``"model_{}.safetensors"`` also gives ``best_{metric}_model_{n}.safetensors``.
        published_keys: keys of the checkpoint (``"state_dict"``) to copy into a smaller file after training. Its name ends in
            the first 8 hex digits of its SHA-256. The best file is copied if ``save_best``, the last one if ``save_last``.
            Then the copies of files that the training removed go, too.
        begin: first epoch or iteration to save at.
        on_error: ``"raise"`` ends the run when a file cannot be written, published or removed; ``"log"`` continues it. A store
            that does not take a file ends no run: the file waits on this machine. If some still wait at the end of the run,
            ``"raise"`` has it fail then, and a run that resumes in this directory uploads them.
        staging: ``"block"`` copies the state while training waits. ``"overlap"`` copies the tensors that only optimizers change
            on a thread during the next forward and backward pass, and the rest at once; the next ``optimizer.step`` waits for
            that thread. In a validation or test it copies everything at once. The save fails if such a tensor changes in the
            meantime; see :mod:`trainbus.eventloop.checkpoint.overlap` for undetected changes.
        busy: what to do with a save that is due while another is being written: ``"wait"``; ``"skip"`` it; or ``"replace"`` the
            save that waits (this needs staging memory twice). A dropped save is published as ``checkpoint_skipped``. The last
            save of a training always waits.
        name: key of this hook in checkpoints, needed if there are several of its kind.

    Raises:
        ConfigurationError: an option is invalid, the run has no directory, or the package for the URL is not installed. Later:
            ``interval`` counts epochs in an iteration-based training.
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
        local_dir: str | Path | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | MetricNames | None = None,
        save_top_k: int = 1,
        load_best_model_at_end: bool = False,
        rule: Rule | Sequence[Rule] | None = None,
        greater_keys: str | Iterable[str] | None = None,
        less_keys: str | Iterable[str] | None = None,
        filename_tmpl: str | None = None,
        published_keys: str | Iterable[str] | None = None,
        begin: NonNegativeInt = 0,
        on_error: Literal["raise", "log"] = "raise",
        staging: Staging = "block",
        busy: Busy = "wait",
        name: str = "",
    ) -> None:
        for option, value, none in (("interval", interval, "none"), ("max_keep_ckpts", max_keep_ckpts, "all")):
            if value < 1 and value != -1:
                raise ConfigurationError(f"{option}={value!r}: give a number of at least 1, or -1 for {none}")
        if save_top_k < 1 and save_top_k != -1:
            advice = "give a number of at least 1, or -1 for all; without save_best= there are no best files"
            raise ConfigurationError(f"save_top_k={save_top_k!r}: {advice}")
        for option, given in (("save_top_k", save_top_k != 1), ("load_best_model_at_end", load_best_model_at_end)):
            if given and save_best is None:
                raise ConfigurationError(
                    f'{option}= needs the metric that files are the best by: give save_best="accuracy", say'
                )
        self.name = name
        self.interval = interval
        self.by_epoch = by_epoch
        self.begin = begin
        self.save_last = save_last
        self.on_error: Literal["raise", "log"] = on_error
        self._out_dir = None if out_dir is None else as_path(out_dir)
        self._local_dir = None if local_dir is None else as_path(local_dir)
        if local_dir is not None and (isinstance(self._local_dir, RemotePath) or not isinstance(self._out_dir, RemotePath)):
            raise ConfigurationError(
                f"local_dir={str(local_dir)!r} is where files wait on this machine for a URL: give it a directory, and "
                "out_dir= the URL"
            )
        parts = {"optimizer": save_optimizer, SCHEDULES: save_param_scheduler}
        self._options: dict[str, Any] = {
            "leave_out": [key for key, saved in parts.items() if not saved],
            "on_error": on_error,
            "staging": staging,
            "busy": busy,
        }
        self._template = _checked_template(filename_tmpl or f"{'epoch' if by_epoch else 'iter'}_{{}}{SUFFIX}")
        # Iteration-based training validates within its one epoch, so its best files count iterations.
        self._best_by_iter = _checked_template(filename_tmpl or f"iter_{{}}{SUFFIX}")
        self._publish = None if published_keys is None else one_or_more("published_keys", published_keys)
        best = BestMetrics(save_best, rule, greater_keys, less_keys)
        keep, keep_best = (None if limit == -1 else limit for limit in (max_keep_ckpts, save_top_k))
        self._kept = RetentionPolicy(keep, best, keep_best)
        self._asked = RetentionPolicy(keep, BestMetrics(None, None, None, None))  # in the work dir, if that is another one
        self._load_best = load_best_model_at_end
        self._saves = interval > 0 or save_last or bool(best.names)
        self._sharded = self._checked = self._finished = False
        self._last: int | None = None  # iteration of the run, once it is known
        self._loaded_here = False  # the run was resumed from a file in this directory
        self._removes = True  # on rank 0
        self._suffix = SUFFIX
        self._unremoved: list[tuple[RetentionPolicy, str]] = []  # old files that a store did not remove
        self._removed: list[str] = []  # names of old files
        self._began_at: int | None = None  # iterations at the beginning, if that state needs no save

    def in_check(self) -> Hook:
        self._out_dir = self._local_dir = None
        return self

    def files_of_run(self, work_dir: Path) -> Collection[AnyPath]:
        places = {self._place(self._local_dir, work_dir), self._place(self._out_dir, work_dir)} - {None, work_dir}
        return [file for place in places if place is not None for file in checkpoints_in(place)]

    def _place(self, given: AnyPath | None, home: AnyPath | None) -> AnyPath | None:
        """Return the directory of a run: a folder in the given one, or its home."""
        given = None if given is None else given.absolute()
        if given is None or home is None or given == home:
            return given or home
        return given / (home.resolve() if isinstance(home, Path) else home).name  # each run has its own folder

    def best_checkpoint(self) -> Best | None:
        directory, top = self._kept.directory, self._kept.top
        return None if directory is None or top is None else Best(self._kept.path(top[1].name), top[1].score or 0.0, top[0])

    def needs_metrics(self) -> Collection[str]:
        return set(self._kept.best.names) - {"auto"}

    def before_run(self, event: events.BeforeRun) -> None:
        run, home, work_dir = event.run, event.run.checkpoints.directory, event.run.work_dir
        place, mirror = self._place(self._out_dir, home), None
        if place is not None and place.exists() and not place.is_dir():
            raise ConfigurationError(f"{self.label} cannot save to {place}: it is not a directory")
        if place is not None and place != home:
            place = run.checkpoints.keeps_in(place)
        directory = place if isinstance(place, Path) else None
        if isinstance(place, RemotePath):
            here = self._place(self._local_dir, work_dir)
            if here is not None and here != work_dir:
                here = run.checkpoints.keeps_in(here)
            mirror = mirror_of(run, here if isinstance(here, Path) else None, place, raises=self.on_error == "raise")
            directory = mirror.directory
        event.run.shared[KEPT] = policies = event.run.shared.get(KEPT, [])
        self._suffix = event.run.checkpoints.suffix
        self._removes = event.run.rank == 0
        self._kept.begin(directory, policies, self._suffix, mirror, looks=self._removes)
        asked = home if isinstance(home, Path) and directory != home else None
        self._asked.begin(asked, policies, self._suffix, looks=self._removes)
        if self._publish is not None and self._suffix != SUFFIX:
            advice = "but here another trainer writes the checkpoints; remove the option"
            raise ConfigurationError(f"{self.label}(published_keys=...) copies parts of trainbus's own checkpoints, {advice}")
        self._loaded_here = self._checked = self._finished = False
        self._last, self._removed = None, []
        self._sharded = run.checkpoints.in_parts  # before a forward pass puts parameters together

    def after_load_checkpoint(self, event: events.AfterLoadCheckpoint) -> None:
        # Rank 0 decides what is saved; the disk of another rank may have another name.
        self._loaded_here = bool(self._kept.own([event.path])) or not self._removes

    def before_train(self, event: events.BeforeTrain) -> None:
        directory = self._kept.directory
        if self._saves and directory is None:
            raise ConfigurationError(f"{self.label} has no directory: give it out_dir=; or {event.run.work_dir_advice}")
        if self._load_best:
            load_best_at_end(event.run, f"{self.label}(load_best_model_at_end=True)", self.best_checkpoint)
        if self._kept.best.names:
            check_validated(event, f"{self.label}(save_best=...)")
        if directory is not None and event.run.rank == 0:
            self._sharded |= sweep(directory)
        if (at := event.progress).iter:
            self._kept.adopt_if_there(self._names_at(at))
            self._asked.adopt_if_there([self._asked_at(at)])
            if self._removes:  # what the saved run was about to remove
                self._remove([(kept, name) for kept in (self._kept, self._asked) for name in kept.committed(kept.durable())])
        self._began_at = event.progress.iter if self._loaded_here or not event.progress.iter else None

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        if self.by_epoch and self.interval > 0:
            subject, instead = f"{self.label}(interval={self.interval})", "by_epoch=False, interval=<iterations between saves>"
            check_epochs(event, subject, f"Give {instead}; save_last and save_best need no interval")

    def after_train(self, event: events.AfterTrain) -> None:
        self._finished = True
        if self._kept.best.names:
            warn_unvalidated(event, f"{self.label}(save_best=...)")
        if not self.save_last or (done := event.progress).iter == self._began_at:
            return
        name = self._template.format(done.epoch if self.by_epoch else done.iter)
        if self.by_epoch and done.batch_idx:
            name = f"iter_{done.iter}{SUFFIX}"
        self._request(event.run, name, busy="wait")  # the run does not write the same state again

    def after_run(self, event: events.AfterRun) -> None:
        if self._publish is None or not self._finished or (directory := self._kept.directory) is None or event.run.rank:
            return
        durable, others = self._kept.newest(regular=self.save_last)
        place = directory if self._kept.mirror is None else self._kept.mirror.store
        for name in others:
            log.error(
                "not published: the checkpoint was not written",
                id="checkpoint-not-published",
                hook=self.label,
                path=str(directory / name),
            )
        for name in durable:
            with self._errors("cannot publish a checkpoint", place / name):
                publish_checkpoint(self._kept.path(name), self._publish, place)
        if durable and not others:
            with self._errors("cannot remove the published copies of old checkpoints", place):
                remove_copies(place, self._removed)

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        """Save by iterations. At the first update, check that saving is possible."""
        run = event.run
        if not self._checked and (run.updated or not run.optimizers):
            self._checked = True
            if self._saves:
                there = run.checkpoints.check(directory=self._kept.directory, **self._options)
                if self._publish is not None and not run.rank:
                    with self._errors("cannot publish checkpoints", str(self._kept.directory)):
                        keys_to_publish(self._publish, there, f"a checkpoint of {self.label}")
            last = (event.progress.max_epochs or 1) if self.by_epoch else run.data.total_iters
            if self.interval > 0 and last is not None and self.begin > last:
                end = f"{'epoch' if self.by_epoch else 'iteration'} {last}, before its first regular save"
                log.warning(f"{self.label}(begin={self.begin}): this training ends with {end}", id="no-regular-save")
        if not self.by_epoch:
            self._last = self._last or run.data.total_iters
            if self._due(done := event.progress.iter + 1, self._last):
                self._request(run, self._template.format(done))

    def after_train_epoch(self, event: events.AfterTrainEpoch) -> None:
        done = event.progress.epoch + 1
        if self.by_epoch and self._due(done, event.progress.max_epochs):
            self._request(event.run, self._template.format(done))

    def after_val_epoch(self, event: events.AfterValEpoch) -> None:
        if not self._kept.best.names or not event.run.training:
            return
        if not event.metrics and self._kept.best.names == ("auto",):
            log.warning("this validation has no metrics; the best checkpoint stays", id="no-metrics-for-best", hook=self.label)
            return
        by_epoch = self.by_epoch and event.progress.max_iters is None
        when = self._template.format(event.progress.epoch) if by_epoch else self._best_by_iter.format(event.progress.iter)
        for metric, score in self._kept.improved(event.metrics):
            file = f"best_{platform.portable_name(metric)}_{when}"
            self._request(event.run, file, metric, score)

    def checkpoint_committed(self, event: events.CheckpointCommitted) -> None:
        asked, gone = self._asked_at(event.progress), list[tuple[RetentionPolicy, str]]()
        for kept in (self._kept, self._asked):
            if asked in (own := kept.own(event.names)):
                kept.adopt(asked)
            gone += [(kept, name) for name in kept.committed(own)]
            if kept.mirror is not None and self._removes:
                for name in filter(kept.has, own):
                    kept.mirror.keep(name, event.progress, event.bytes)
        if self._removes:
            self._remove(gone)

    def _remove(self, gone: Collection[tuple[RetentionPolicy, str]]) -> None:
        """Remove files that no hook of the run wants any more."""
        gone, self._unremoved = [*(one for one in self._unremoved if not one[0].has(one[1])), *gone], []
        for kept, name in gone:
            assert kept.directory is not None  # noqa: S101 - it has files
            path = kept.directory / name
            self._removed.append(name)
            if kept.mirror is not None:
                kept.mirror.drop(name)
            elif not any(one.has(name) for one in kept.of_hooks if one.directory == kept.directory):
                with self._errors("cannot remove an old checkpoint", path, then=partial(self._unremoved.append, (kept, name))):
                    remove(path)
                    log.debug("removed an old checkpoint", hook=self.label, path=str(path))
        for kept in (self._kept, self._asked):
            if self._sharded and kept.directory is not None:  # also when a newer file of the same name has replaced one
                with self._errors("cannot remove parts of old checkpoints", kept.directory):
                    sweep_shards(kept.directory, still=0)  # this is the only thread that writes

    @mount("checkpoint_failed", "checkpoint_skipped")
    def forget(self, event: events.CheckpointFailed | events.CheckpointSkipped) -> None:
        """Forget files that were not written. The files that they would have replaced stay."""
        self._kept.forget(event.names)

    def state_dict(self) -> dict[str, Any]:
        asked = self._asked.state_dict()["files"]
        replaced = [] if self._kept.mirror is None else self._kept.mirror.replaced
        return self._kept.state_dict() | ({"asked": asked} if asked else {}) | ({"replaced": replaced} if replaced else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the kept files and best scores. A best score without its file is forgotten: the next score is the best."""
        self._kept.load_state_dict(state)
        self._asked.load_state_dict({"files": state.get("asked", ()), "best": {}, "metrics": None})
        if self._kept.mirror is not None:
            self._kept.mirror.replaced += filter(self._kept.knows, state.get("replaced", ()))

    def _asked_at(self, at: events.Progress) -> str:
        """Return the name by which ``checkpoints.save()`` saves here."""
        return f"iter_{at.iter}{self._suffix}"

    def _names_at(self, at: events.Progress) -> list[str]:
        """Return the regular names that a save of this state may have got after its state was gathered."""
        name = self._template.format(at.epoch if self.by_epoch else at.iter).removesuffix(SUFFIX)
        return [self._asked_at(at), f"{name}{self._suffix}"]

    def _due(self, done: int, last: int | None) -> bool:
        regular = self.interval > 0 and done >= self.begin and (done - self.begin) % self.interval == 0
        return regular or (self.save_last and done == last)

    def _request(self, run: RunView, name: str, kind: str = REGULAR, score: float | None = None, **options: Any) -> None:
        name = name.removesuffix(SUFFIX) + self._suffix
        self._kept.put(name, kind, score)
        run.checkpoints.save(name, directory=self._kept.directory, **(self._options | options))

    @contextmanager
    def _errors(self, what: str, path: AnyPath | str, then: Callable[[], object] | None = None) -> Iterator[None]:
        """With ``on_error="log"``, log file system errors instead of raising them; call ``then`` in any case."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            if then is not None:
                then()
            if self.on_error == "raise":
                raise
            log.warning(what, id="checkpoint-hook-failed", hook=self.label, path=str(path), error=str(error))


def _checked_template(template: str) -> str:
    try:
        name = template.format(1)
    except (IndexError, KeyError, ValueError, AttributeError):
        name = template
    lacks = {*name} & {*platform.NOT_IN_NAMES}
    if name == template or lacks or Path(name).name != name or not name.endswith(SUFFIX) or template.format(2) == name:
        advice = f'give a file name that has one {{}} for the count and ends in {SUFFIX}, such as "model_{{}}{SUFFIX}"'
        raise ConfigurationError(f"filename_tmpl={template!r}: {advice}")
    return template
