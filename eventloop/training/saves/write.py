"""Write checkpoints on the background writer, and report each by an event."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainbus.eventloop.bus.subscription import OFFLOADED, Subscription
from trainbus.eventloop.checkpoint import (
    BackgroundWriter,
    commit_bytes,
    file_kind,
    keep_as_old,
    link,
    make_directory,
    note_scores,
    write,
)
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.events import CheckpointStaged
from trainbus.eventloop.events.event import name_of
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.offload import Deadline
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.saves.requests import SaveJob, SaveOutcome
from trainbus.eventloop.training.schema import LAST
from trainbus.eventloop.user_errors import add_note

_STAGED: Final = name_of(CheckpointStaged)

log = get_logger()


class CheckpointWriter:
    """Write jobs in order on a separate thread. A later job may replace one that has not begun.

    The work dir gets a pointer to the newest checkpoint in any directory.
    """

    def __init__(self, run: SavedRun) -> None:
        self._run = run
        self._bus = bus = run.bus
        self.made: dict[Path, Path] = {}
        """Directories that exist durably (a power cut cannot remove them), each with the path of its ``last_checkpoint``."""
        self._late: set[Subscription] = set()  # slow handlers of checkpoint_staged
        self._skipped = self._written = 0
        self._named: dict[Path | None, tuple[int, Path]] = {}  # for each pointer, the number and path that it names
        self.failed: set[Path] = set()
        """Paths that could not be written."""
        self._writer = BackgroundWriter[SaveJob](self._write_checkpoint, at_exit=lambda: self.close(bus.abort_timeout))

    # --------------------------------------------------------------------------------------- on the training thread

    @property
    def busy(self) -> bool:
        """True while a file is being written, or waits for it."""
        return self._writer.busy and any(job.paths for job in self._writer.under_way)

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until no job is under way, for at most ``seconds``."""
        self._writer.wait(seconds=seconds)

    def hand_over(self, job: SaveJob) -> None:
        """Publish ``checkpoint_staged`` and queue a job; drop it after an error, unless the thread has begun it."""
        try:
            self._run.publish(CheckpointStaged, path=str(job.paths[0]))
            self._writer.enter(job, can_wait=job.staged is not None)
        except BaseException:
            self._writer.drop(lambda one: one is job)
            if not self._writer.has(job):
                job.release()
            raise

    def score(self, job: SaveJob, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of the validation of a state, once its file is written."""
        job.scores = metrics
        if not self._run.rank:
            self._writer.enter(SaveJob(job.request, [], job.progress, source=job), can_wait=False)

    def make_way(self, job: SaveJob, agree: Callable[[bool], bool]) -> None:
        """Wait for earlier jobs, or replace the waiting one if all ranks ``agree``, as the request of a new job says.

        Further names of a job that is replaced stay behind it: all ranks write in one order.
        """
        with self._bus.span("waiting for checkpoints"):
            replaced = self._writer.make_way(
                job.request.busy, lambda waiting: waiting.give_up(f"replaced by {job.paths[0]}"), agree
            )
        if replaced is not None:
            self.skip(replaced)

    def close(self, seconds: float) -> None:
        """Write the queued jobs and end the thread; after ``seconds``, log the jobs that are left."""
        if self._writer.close(seconds):
            return
        left = self._writer.under_way
        for waiting in self._writer.drop():
            waiting.release()
        log.warning(
            "checkpoints were not written before the run ended",
            id="checkpoints-left-at-end",
            names=[str(job.paths[0]) for job in left if job.paths],
        )

    def skip(self, job: SaveJob) -> None:
        """Log and publish the reason why a job is not written."""
        self._skipped += 1
        SaveOutcome(self._bus, job.paths, job.progress).skipped(job.given_up, skipped=self._skipped)

    # ------------------------------------------------------------------------------------------------ on the thread

    def _write_checkpoint(self, job: SaveJob) -> None:
        try:
            with self._bus.span("writing checkpoints"):
                self._write_job(job)
        except BaseException as error:  # noqa: BLE001 - raised on the training thread
            add_note(error, f"{OFFLOADED} writing of {(job.paths or (job.source or job).paths)[0]}")
            self._bus.internal.fail(self, error)

    def _write_job(self, job: SaveJob) -> None:
        root = job.source or job
        if not job.paths:
            self._note_scores(root)
            return
        if root.given_up:
            self._skip_given_up(job, root)
            return
        if root.number < 0:
            self._written += 1
            root.number = self._written
        self._wait_for_handlers()
        if root.states is not None and root.staged is not None:
            take, root.states = root.states, None
            root.staged.put("ranks", take(lambda: self._writer.closed))
        start, size, done, failed = time.perf_counter(), 0, list[Path](), dict[Path, Exception]()
        for path in job.paths:  # a failure at one path costs no other one
            try:
                size = max(size, self._write(root, path))
                done.append(path)
            except Exception as error:  # noqa: BLE001 - raised below
                failed[path] = error
        if failed and not done and _is_given_up(root):  # meanwhile
            self._skip_given_up(job, root)
            return
        seconds = time.perf_counter() - start
        self.failed = (self.failed | failed.keys()) - set(done)
        root.lost = not (done or root.held)
        root.release()
        self._note_scores(root)
        self._report(job, done, failed, size=size, seconds=seconds)

    def _note_scores(self, root: SaveJob) -> None:
        """Write the scores of a state beside its files, which stay without them if that fails."""
        for directory in dict.fromkeys(path.parent for path in root.held) if root.scores and root.digest else ():
            names = [path.name for path in root.held if path.parent == directory]
            try:
                note_scores(directory, root.digest, names, root.scores)
            except CheckpointError as error:
                log.warning(
                    "the scores of a checkpoint are not recorded",
                    id="scores-not-recorded",
                    path=str(directory / names[0]),
                    error=str(error),
                )

    def _skip_given_up(self, job: SaveJob, root: SaveJob) -> None:
        job.given_up, root.lost = root.given_up, True
        root.release()
        self.skip(job)

    def _report(self, job: SaveJob, done: list[Path], failed: dict[Path, Exception], *, size: int, seconds: float) -> None:
        """Publish and log what became of a job; raise the first error, if the request says so."""
        raises = job.request.on_error == "raise"
        try:
            if done:
                self._run.checkpointer.committed.append(done[0])
                written = 0 if job.source is not None else size
                SaveOutcome(self._bus, done, job.progress).committed(size=written, seconds=seconds, stall=job.stall)
        except Exception:
            log.exception("a handler of checkpoint_committed failed", id="committed-handler-failed", path=str(done[0]))
            if raises:
                raise
        finally:
            if failed:
                SaveOutcome(self._bus, [*failed], job.progress).failed(next(iter(failed.values())))
        if failed and raises:
            raise next(iter(failed.values()))

    def _wait_for_handlers(self) -> None:
        """Wait for the other offloaded handlers of ``checkpoint_staged``, up to half of the bus's ``abort_timeout``."""
        for one in self._bus.subscriptions:
            if one.lane is None or one.mode == "stream" or _STAGED not in one.mount_points:
                continue
            patience = 0.0 if one in self._late else self._bus.abort_timeout / 2  # an aborted run has all of it
            if one.lane.join(Deadline(patience)):
                self._late.discard(one)
            elif one not in self._late:
                self._late.add(one)
                log.warning(
                    "a checkpoint no longer waits for a slow handler of checkpoint_staged",
                    id="staged-handler-slow",
                    handler=one.label,
                )

    def _write(self, root: SaveJob, path: Path) -> int:
        """Write a state, with this rank's part of a sharded one, or give its file a further name; return the bytes."""
        if root.parts is None:
            return self._write_file(root, path)
        return root.parts.commit(path, partial(self._write_file, root, path), apart=self._run.checkpointer.apart(path.parent))

    def _write_file(self, root: SaveJob, path: Path) -> int:
        self._make(path.parent)
        _keep_foreign(path)
        size = self._fill(root, path)
        self._landed(root, path)
        return size

    def _fill(self, root: SaveJob, path: Path) -> int:
        """Write the file ``path``, or link it to one that is there; return the bytes written."""
        held = next((one for one in root.held if one.exists()), None)
        if held is not None:
            link(held, path)
            return 0
        if root.staged is None or root.staged.released:
            raise CheckpointError(f"cannot write {path}: the file that has its state is gone, or could not be written")
        written = write(root.staged, path, release=False)
        root.digest = written.digest
        return written.bytes

    def _landed(self, root: SaveJob, path: Path) -> None:
        """Note a durable file; have ``last_checkpoint`` in its directory and in the work dir name it, if it is the newest."""
        home = self._run.work_dir
        for directory in dict.fromkeys((path.parent, home)):
            number, _ = self._named.get(directory, (-1, None))
            if root.number > number:
                if directory is not None:
                    self._make(directory)
                    self._point(directory, path)
                self._named[directory] = root.number, path
        if path not in root.held:
            root.held.append(path)

    def _point(self, directory: Path, path: Path) -> None:
        """Have ``last_checkpoint`` in ``directory`` name a file."""
        pointer = self.made[directory]
        if os.path.isdir(pointer) and not pointer.is_symlink():  # noqa: PTH112 - at each save
            log.warning(
                "a directory had the name of last_checkpoint, and is kept",
                id="directory-at-last-checkpoint",
                to=str(keep_as_old(pointer)),
            )
        relative = path.name if path.parent == directory else os.path.relpath(path, directory)
        commit_bytes(pointer, os.fsencode(relative))

    def _make(self, directory: Path) -> None:
        # It may have been removed.
        if directory in self.made and os.path.isdir(directory):  # noqa: PTH112
            return
        make_directory(directory)
        self.made[directory] = directory / LAST


def _is_given_up(job: SaveJob) -> bool:
    return bool(job.given_up)


def _keep_foreign(path: Path) -> None:
    """Keep what is not a checkpoint of trainbus, or cannot be read, under another name: a checkpoint is about to replace it."""
    if path.is_symlink() or not os.path.lexists(path):  # the file that a link leads to stays
        return
    try:
        if file_kind(path) == "checkpoint":
            return
        why = {}
    except OSError as error:  # a bad sector, no permission, a directory
        why = {"error": str(error)}
    log.warning(
        f"what had the name of a checkpoint {'cannot be read' if why else 'is of another program'}, and is kept",
        id="file-at-checkpoint-kept",
        path=str(path),
        to=str(keep_as_old(path)),
        **why,
    )
