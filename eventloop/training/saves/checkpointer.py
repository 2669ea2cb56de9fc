"""``Checkpointer``: what a run saves and loads, in a loop of one's own and in other trainers.

A request of a hook or thread waits for the next save point, which comes after the last handler of a mount point. There it is
due, and all that is due becomes one save under several names: at once, or at the next safe moment of another trainer, whose
saver has the last word. A request for a state that the last file holds adds a name to that file.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from trainbus.eventloop.checkpoint import AnyPath, RemotePath, as_path
from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.plain import numbers_in, plain
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.folders import free_folder
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.requests import SaveJob, SaveOutcome, SaveRequest, merged
from trainbus.eventloop.training.saves.restore import Restore, resume_line
from trainbus.eventloop.training.saves.write import CheckpointWriter

log = get_logger()

_REMEMBERED = 1000
"""Committed files that are remembered."""


class Mirrored(Protocol):
    """Has a store hold what is saved to a directory: :class:`trainbus.hooks.mirror.Mirror`."""

    @property
    def directory(self) -> Path:
        """The directory on this machine."""

    @property
    def apart(self) -> bool:
        """True if the directory may be another one on each rank."""

    def recover(self) -> dict[str, str]:
        """Upload what an earlier run has left, if this run could not read it; return what is not whole, with the reason.

        A collective.
        """

    def wait(self) -> None:
        """Wait until the store has what was saved so far, or has refused it."""

    def tell_waiting(self) -> None:
        """Log what waits, when the run ends by an error."""

    def finish(self) -> CheckpointError | None:
        """Upload what is left; return the error if the store does not take it, and the run is to fail then."""


class Saver(Protocol):
    """Who makes a file of the state: trainbus, or the trainer of a host."""

    hidden: tuple[type[BaseException], ...]
    """Errors that the user may not get to see."""
    sharded: bool
    """True if every rank writes its part."""

    @property
    def save(self) -> Callable[[SaveJob], object] | None:
        """Copies the state for a job, and passes it to the writer; None if the trainer writes, at its next safe moment."""

    def open(self) -> CheckpointWriter | None:
        """Begin a run; return the writer of trainbus's own files, if it writes such. A collective if a model is sharded."""

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError for an option that does not work here."""

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Gather the state as for a save, without writing it; return its keys, if they are known."""

    def version(self) -> tuple[int, ...] | None:
        """Return numbers that change with the state, the first of them ``run.state.version``; None if that is unknown."""

    def way_to_resume(self, path: AnyPath) -> str:
        """Return how a user resumes from a file, such as ``resume="auto"``."""


class Checkpointer:
    """The requests of a run, the saves that are made for them, and the directories and stores that it saves to.

    :meth:`request` may be called in handlers, the rest on the training thread between them.
    """

    def __init__(self, run: SavedRun) -> None:
        self._run = run
        self.requests: list[SaveRequest] = []
        """Requests that wait for a save point."""
        self.due: list[SaveRequest] = []
        """Requests that wait for a safe moment of the trainer."""
        self.directories: list[AnyPath] = [] if run.work_dir is None else [run.work_dir]
        """The work dir, if any, and the directories of hooks."""
        self.home: AnyPath | None = run.work_dir
        """The directory of checkpoints without one of their own: the work dir, which replica groups share."""
        self.mirrors: list[Mirrored] = []
        """What uploads the files of directories to stores."""
        self.restore: Restore
        """Reads the checkpoint to resume from; a trainer has its own resume, and does not call :meth:`load`."""
        self.before_step: Callable[[], object] | None = None
        """Called before the next optimizer step, if a request must not wait longer."""
        self.committed: deque[AnyPath] = deque(maxlen=_REMEMBERED)
        """The files of this run, the newest last."""
        self.writer: CheckpointWriter | None = None
        self._last: SaveJob | None = None
        self._names: set[Path] = set()  # all paths of the last file, links included
        self._left: list[Path] = []
        self._scores: tuple[tuple[int, ...] | None, Mapping[str, Any]] = None, {}
        """The version of the state that was validated last, and its metrics."""
        self._begins_anew = False
        self._is_open = False

    @property
    def _saver(self) -> Saver:
        return self._run.host.saver

    def open(self, *, begins_anew: bool = False) -> None:
        """Begin a run. ``begins_anew`` tells that it has no work dir, and gets free directories for its hooks."""
        self.requests, self.due, self._begins_anew, self._is_open = [], [], begins_anew, True
        self.before_step = self._last = None
        self._run.state.own.files = lambda: [request.path.name for request in self.requests]
        self.writer = self._saver.open()

    # -------------------------------------------------------------------------------------------------- directories

    def apart(self, directory: Path) -> bool:
        """Return True if the directory may be another one on each rank: a store gets what is in all of them."""
        return any(one.apart and one.directory == directory for one in self.mirrors)

    def save_to(self, directory: AnyPath) -> None:
        """Save there if no directory is given, and not into the work dir."""
        self.home = directory
        self.directories.append(directory)

    def move_to(self, work_dir: Path) -> None:
        """Take another work dir, before the run has saved anything."""
        if self.home == self.directories[0]:
            self.home = work_dir
        self.directories[0] = work_dir

    def directory(self, directory: str | AnyPath | None = None) -> Path:
        """Return ``directory``, or the work dir if it is None; raise ConfigurationError if there is neither, or for a URL."""
        found = self.home if directory is None else as_path(directory)
        if directory is None and isinstance(found, RemotePath):
            found = self._run.work_dir
        if found is None:
            raise ConfigurationError(f"the run has no directory for checkpoints: {self._run.work_dir_advice}")
        if isinstance(found, RemotePath):
            raise ConfigurationError(
                f"cannot save to {found}: files are saved on this machine first. CheckpointHook(out_dir={str(found)!r}) "
                "uploads what it saves"
            )
        return found

    def add_directory(self, wanted: AnyPath) -> AnyPath:
        """Add a directory of checkpoints: another one if ``wanted`` has a run, and nothing tells the two runs apart."""
        folder = wanted
        if self._begins_anew:
            folder = self._run.coordinator.from_first(lambda: free_folder(wanted))
            if folder != wanted:
                log.info("this directory has a run already, so this one gets a directory of its own", directory=str(folder))
        self.directories.append(folder)
        return folder

    # ---------------------------------------------------------------------------------------------------- load, save

    def load(self) -> None:
        """Restore the state that the run resumes from, if it does."""
        self.restore.load()

    def resume_line(self) -> str:
        """Return the line that tells how to continue a training that ended early; empty if nothing can be resumed from."""
        run = self._run
        if run.rank or not run.state.has_trained:
            return ""
        begun = run.checkpoints.resumed_from
        files = [*([] if begun is None else [begun]), *self.committed]  # of which some may be removed
        lines = (resume_line(path, self._saver.way_to_resume(path)) for path in reversed(files))
        return next(filter(None, lines), "")

    def request(self, request: SaveRequest) -> None:
        """Queue a request for the next save point; skip it if the run does not train."""
        self._check_open()
        if not (self._run.state.has_trained or self._run.state.progress.stage == "train"):
            self._skip(request)
            return
        self._saver.check(request)
        self.requests.append(request)

    def check(self, request: SaveRequest, *, rehearse: bool) -> list[str]:
        """Raise the error that a save would raise; with ``rehearse``, gather the state and return its keys."""
        self._check_open()
        self._saver.check(request)
        return self._saver.rehearse(request) if rehearse else []

    def save_if_asked(self, *, force: bool = False) -> None:
        """Save if hooks or threads requested it; inside an accumulation window only with ``force``."""
        state = self._run.state
        if not self.requests and not state.agreed.save and not (force and state.coordinator.size > 1):
            return  # the usual case
        if not state.has_trained or (not force and state.window_open):
            return
        self._add_asked_now()
        if state.coordinator.size > 1:
            self._agree(state.coordinator, force=force)
        requests, self.requests = self.requests, []
        self.due += requests
        if self._saver.save is not None:
            self.save_due(self._saver.save)

    def save_due(self, save: Callable[[SaveJob], object]) -> None:
        """Make one save for all that is due, by calling ``save``; none if the last file has the state, or another is written.

        With several ranks all decide alike, even if only some have finished the previous save. Of several replica groups, the
        first one saves.
        """
        requests, self.due = self.due, []
        if not requests:
            return
        paths = list(dict.fromkeys(request.path for request in requests))
        if (replicas := self._run.host.replicas) is not None and not replicas.first:
            self._left = paths
            log.debug("another replica group saves", names=[*map(str, paths)])
            return
        # What the file has: the iteration or epoch that ends here counts.
        job = SaveJob(merged(requests), paths, self._run.state.counters.snapshot(self._run.state.progress.stage))
        held, busy, failed = self._agreed_standing(job)
        if held:
            self._add_names([path for number, path in enumerate(paths) if path not in self._names or number in failed], job)
        elif busy and job.request.busy == "skip":
            if self.writer is not None and self._writes:
                job.given_up = "another checkpoint is being written"
                self.writer.skip(job)
        else:
            job.version = self._saver.version()
            job.scores = self._scores[1] if self._scores[0] == job.version else {}
            save(job)
            self._last, self._names = job, set(paths)  # last: after Ctrl-C above, no file may hold this state

    def note_scores(self, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a validation of the present state: for its last file, and for one that is requested now.

        Another trainer has its own place for them.
        """
        if self.writer is None:
            return
        version = self._saver.version()
        self._scores = version, plain(numbers_in(metrics))
        if (last := self._last) is not None and last.version == version:
            self.writer.score(last, self._scores[1])

    def left_to_others(self) -> list[str]:
        """Return the files of the last save that another replica group was to write, as far as they are not there."""
        left, self._left = self._left, []
        return [str(path) for path in left if not path.exists()]

    # --------------------------------------------------------------------------------------------------- wait, close

    def end(self) -> None:
        """Save the last requests and wait until all files are written. Requests that come too late are skipped."""
        self.save_if_asked(force=True)
        if not self._run.state.has_trained:
            self._add_asked_now()
        left, self.due, self.requests = [*self.due, *self.requests], [], []
        for request in left:
            self._skip(request)
        self.wait()  # even if the bus stays open: the next run may resume from the file
        state = self._run.state
        failures = [error for mirror in self.mirrors if (error := mirror.finish()) is not None]
        if failures and not (state.stops and state.agreed.exit_code):  # which has told the scheduler what to do
            raise failures[0]

    def tell_waiting(self) -> None:
        """Log what waits for stores, when the run ends by an error."""
        for mirror in self.mirrors:
            mirror.tell_waiting()

    def wait_for_all(self) -> None:
        """Wait until no save is being written or uploaded."""
        self.wait()
        for mirror in self.mirrors:
            mirror.wait()

    def wait(self) -> None:
        """Wait until no save is being written."""
        with self._run.bus.span("waiting for checkpoints"):
            self.wait_for_files()

    def wait_for_files(self, seconds: float = math.inf) -> None:
        """Wait for the files that are being written, if any, for at most ``seconds``."""
        if self.writer is not None:
            self.writer.wait(seconds)

    def close(self, seconds: float) -> None:
        """Accept no more requests, and wait for the files that are being written, for at most ``seconds``."""
        self._is_open = False
        if self.writer is not None:
            self.writer.close(seconds)

    # --------------------------------------------------------------------------------------------------------- parts

    @property
    def _writes(self) -> bool:
        """False if another rank writes the file."""
        return self._saver.sharded or self._run.coordinator.rank == 0

    def _agreed_standing(self, job: SaveJob) -> tuple[bool, bool, set[int]]:
        """Return what counts for all ranks, and give the job its token: is the state in the last file, is another one written?

        The last value has the numbers of the paths that could not be written before.
        """
        ranks, writer, job.token = self._run.coordinator, self.writer, secrets.token_hex(4)
        failed = {number for number, path in enumerate(job.paths) if writer is not None and path in writer.failed}
        if ranks.size == 1:
            return self._held(job), writer is not None and writer.busy, failed

        def own() -> tuple[str, bool, bool, set[int]]:
            return job.token, self._held(job), writer is not None and writer.busy, failed

        if self._saver.sharded:
            job.token, held, busy, failed = ranks.merged(
                own(), lambda one, two: (one[0], one[1] and two[1], one[2] or two[2], one[3] | two[3])
            )
        else:
            job.token, held, busy, failed = ranks.from_first(own)
        return held, busy, failed

    def _held(self, job: SaveJob) -> bool:
        """Return True if the last file has the present state, and all that the job's is to have."""
        last = self._last
        return (
            last is not None
            and last.version is not None
            and last.version[0] == self._run.state.version  # the usual case is another one, and needs no look at the tensors
            and last.version == self._saver.version()
            and not last.lost
            and last.request.leave_out <= job.request.leave_out
            and (self.writer is not None or self._names.issuperset(job.paths))  # another trainer's file has no further names
        )

    def _add_names(self, paths: list[Path], job: SaveJob) -> None:
        if self.writer is not None and self._last is not None and self._writes and paths:
            self.writer.hand_over(SaveJob(job.request, paths, job.progress, source=self._last))
            self._names.update(paths)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigurationError("checkpoints need an open run: use `with Run(...) as run:`, or TrainLoop")

    def _add_asked_now(self) -> None:
        """Queue a request, once, if ``checkpoints.save()`` was called on any rank."""
        state = self._run.state
        if not state.agreed.save:
            return
        state.own.save = state.agreed.save = False
        self.requests.append(SaveRequest(self.directory() / f"iter_{state.counters.iter}{self._run.checkpoints.suffix}"))

    def _agree(self, ranks: Coordinator, *, force: bool) -> None:
        if force:  # rank 0 alone sees a failed write, after which it may request another file
            everyones = ranks.distinct([(self._number_of(one.path.parent), one) for one in self.requests])
            ranks.check_first_has_all({rank: [one.path.name for _, one in asked] for rank, asked in everyones.items()})
            self.requests = [
                one if number < 0 else msgspec.structs.replace(one, path=self._here(number) / one.path.name)
                for number, one in everyones[0]
            ]
        elif self.requests:
            ranks.confirm()

    def _number_of(self, directory: Path) -> int:
        """Return the number of a directory of this run, which may have another name on another rank; -1 for another one."""
        return next((number for number, one in enumerate(self.directories) if one == directory), -1)

    def _here(self, number: int) -> Path:
        directory = self.directories[number]
        assert isinstance(directory, Path)  # noqa: S101 - a request has a path
        return directory

    def _skip(self, request: SaveRequest) -> None:
        state = self._run.state
        reason = f"only a training saves, and this run {'has ended' if state.has_trained else 'has not trained'}"
        SaveOutcome(self._run.bus, [request.path], state.counters.snapshot()).skipped(reason)
