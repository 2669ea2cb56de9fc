"""Request checkpoints: ``Saves`` keeps the requests of hooks and threads until a save point, where the host's saver gets them.

A request waits for the next save point, after the last handler of a mount point. Requests at one save point become one write
under several names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import msgspec

from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import AnyPath, Busy, RemotePath, StagedTree, Staging, as_path
from trainbus.eventloop.checks import check_value
from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.events import CheckpointCommitted, CheckpointFailed, CheckpointSkipped, CheckpointUploaded, Progress
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.coordinator import Coordinator
from trainbus.eventloop.training.folders import free_folder
from trainbus.eventloop.training.saves.contents import SavedRun

if TYPE_CHECKING:  # half a second to import, and only sharded models need it
    from trainbus.eventloop.checkpoint.sharded import Parts

log = get_logger()

OnError = Literal["raise", "log"]

_CHOICES: Final = {
    option: (annotation, frozenset(get_args(annotation)))
    for option, annotation in (("busy", Busy), ("staging", Staging), ("on_error", OnError))
}


class SaveRequest(msgspec.Struct, frozen=True):
    """The path of a requested checkpoint, and the options to write it with."""

    path: Path
    leave_out: frozenset[str] = frozenset()
    """Keys to leave out of the checkpoint."""
    on_error: OnError = "raise"
    staging: Staging = "block"
    busy: Busy = "wait"

    def check(self) -> None:
        """Raise ConfigurationError for an unknown option."""
        for option, (annotation, allowed) in _CHOICES.items():
            value = getattr(self, option)
            if type(value) is not str or value not in allowed:  # check_value takes 10 times as long, for its message
                check_value(option, value, annotation)


def merged(requests: list[SaveRequest]) -> SaveRequest:
    """Merge requests into one, with the first path and the safest options."""
    if len(requests) == 1:
        return requests[0]
    return SaveRequest(
        path=requests[0].path,
        leave_out=frozenset.intersection(*(request.leave_out for request in requests)),
        on_error="raise" if any(request.on_error == "raise" for request in requests) else "log",
        # One request may need its copy at once, or must not be skipped.
        staging="overlap" if all(request.staging == "overlap" for request in requests) else "block",
        busy=min((request.busy for request in requests), key=("wait", "replace", "skip").index),
    )


class SaveJob(msgspec.Struct, eq=False):
    """What becomes of requests: a staged state, or an earlier job with the same state, and the names of its file."""

    request: SaveRequest
    paths: list[Path]
    progress: Progress
    version: tuple[int, ...] = ()
    """Version of the state."""
    staged: StagedTree | None = None
    stall: float = 0.0
    """Seconds that the training thread spent on it."""
    source: SaveJob | None = None
    given_up: str = ""
    """The reason why it is not written; empty otherwise."""
    states: Callable[[Callable[[], bool]], list[bytes]] | None = None
    """Returns the random states of all ranks, for rank 0; see ``RankStates``. None if there is one rank, and once taken."""
    parts: Parts | None = None
    """This process's part of a sharded state."""
    number: int = -1
    """The position among the written states; -1 for one that is not written yet, or of another training."""
    held: list[Path] = []
    """The durable files with this state, oldest first."""
    lost: bool = False
    """True if no file with this state could be written."""
    digest: str = ""
    """The digest of its files; empty until one is written."""
    scores: Mapping[str, Any] = {}
    """The metrics of the validation of this state; empty until then."""

    def release(self) -> None:
        """Release the memory of the staged state."""
        for one in (self.staged, self.parts):
            if one is not None:
                one.release()


class RunningWriter(Protocol):
    """Writes files on a thread of its own."""

    def wait(self, seconds: float = math.inf) -> object:
        """Wait until no file is being written, for at most ``seconds``."""

    def close(self, seconds: float) -> object:
        """Write what is queued, for at most ``seconds``, and end the thread."""


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
    """Who saves: trainbus's own writer, or the trainer of a host."""

    hidden: tuple[type[BaseException], ...]
    """Errors that the user may not get to see."""
    due: list[SaveRequest]
    """Requests that wait for a safe moment of the trainer."""

    @property
    def writer(self) -> RunningWriter | None:
        """Our own writer; None if the trainer writes."""

    def open(self) -> None:
        """Begin a run."""

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError for an option that does not work here."""

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Gather the state as for a save, without writing it; return its keys, if they are known."""

    def save(self, requests: list[SaveRequest]) -> None:
        """Save for these requests, at a save point of the run."""

    def note_scores(self, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a validation of the present state, for its files."""

    def resume_line(self) -> str:
        """Return the line that tells how to continue a training that ended early; empty if nothing can be resumed from."""


class Saves:
    """The requests of a run, and the directories that it saves to."""

    def __init__(self, run: SavedRun) -> None:
        self._run = run
        self.requests: list[SaveRequest] = []
        self.directories: list[AnyPath] = [] if run.work_dir is None else [run.work_dir]
        """The work dir, if any, and the directories of hooks."""
        self.home: AnyPath | None = run.work_dir
        """The directory of checkpoints without one of their own: the work dir, which replica groups share."""
        self.mirrors: list[Mirrored] = []
        """What uploads the files of directories to stores."""
        self.before_step: Callable[[], object] | None = None
        """Called before the next optimizer step, if a request must not wait longer."""
        self._begins_anew = False
        self._is_open = False

    @property
    def _saver(self) -> Saver:
        saver: Saver = self._run.host.saver
        return saver

    def open(self, *, begins_anew: bool = False) -> None:
        """Begin a run. ``begins_anew`` tells that it has no work dir, and gets free directories for its hooks."""
        self.requests, self._begins_anew, self._is_open = [], begins_anew, True
        self.before_step = None
        self._run.state.own.files = lambda: [request.path.name for request in self.requests]
        self._saver.open()

    def apart(self, directory: Path) -> bool:
        """Return True if the directory may be another one on each rank: a store gets what is in all of them."""
        return any(one.apart and one.directory == directory for one in self.mirrors)

    def save_to(self, directory: AnyPath) -> None:
        """Save there if no directory is given, and not into the work dir."""
        self.home = directory
        self.directories.append(directory)

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
        if requests:
            self._saver.save(requests)

    def end(self) -> None:
        """Save the last requests and wait until all files are written. Requests that come too late are skipped."""
        self.save_if_asked(force=True)
        if not self._run.state.has_trained:
            self._add_asked_now()
        left = [*self._saver.due, *self.requests]
        self._saver.due, self.requests = [], []
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
        self._check_open()
        if (writer := self._saver.writer) is not None:
            with self._run.bus.span("waiting for checkpoints"):
                writer.wait()

    def wait_for_files(self, seconds: float) -> None:
        """Wait for the files that are being written, for at most ``seconds``."""
        if (writer := self._saver.writer) is not None:
            writer.wait(seconds)

    def close(self, seconds: float) -> None:
        """Accept no more requests, and wait for the files that are being written, for at most ``seconds``."""
        if (writer := self._saver.writer) is not None:
            writer.close(seconds)

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


class SaveOutcome:
    """The outcome of a save: the file is committed, or failed, or was skipped.

    Args:
        bus: the bus that is told.
        paths: the names of the file that the outcome is about, at least one.
        progress: the progress that is in the file.
    """

    def __init__(self, bus: Bus, paths: Sequence[AnyPath], progress: Progress) -> None:
        self._bus, self._progress = bus, progress
        self._names = [str(path) for path in paths]

    def committed(self, *, size: int = 0, seconds: float = 0.0, stall: float = 0.0) -> None:
        """The file is durable; see :class:`~trainbus.eventloop.events.CheckpointCommitted` for the numbers."""
        names = self._names
        event = CheckpointCommitted(
            progress=self._progress, path=names[0], names=names, bytes=size, seconds=seconds, stall=stall
        )
        self._bus.publish(event)

    def failed(self, error: Exception, kept: Path | None = None) -> None:
        """The file could not be written, or not uploaded: then ``kept`` is the file on this machine."""
        names, where = self._names, "" if kept is None else str(kept)
        if kept is None:
            log.error("checkpoint not written", id="checkpoint-not-written", names=names, exc_info=error)
        else:
            log.error(
                "a store did not take a checkpoint; this machine keeps it",
                id="checkpoint-not-uploaded",
                names=names,
                kept=where,
                error=str(error),
            )
        self._bus.publish(CheckpointFailed(progress=self._progress, path=names[0], names=names, error=str(error), kept=where))

    def uploaded(self, file: Path, *, size: int, seconds: float) -> None:
        """A store has the ``file``."""
        event = CheckpointUploaded(progress=self._progress, path=self._names[0], file=str(file), bytes=size, seconds=seconds)
        self._bus.publish(event)

    def skipped(self, reason: str, **more: object) -> None:
        """The save that was asked for is not made."""
        log.warning("checkpoint not made", id="checkpoint-skipped", names=self._names, reason=reason, **more)
        self._bus.publish(CheckpointSkipped(progress=self._progress, path=self._names[0], names=self._names, reason=reason))
