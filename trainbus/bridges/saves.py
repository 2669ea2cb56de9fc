"""Save a hosted run: hooks request checkpoints, and the trainer writes them in its own format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Literal

from trainbus.convert import Pickled
from trainbus.eventloop.bus import Bus
from trainbus.eventloop.checkpoint import AnyPath, AsyncSaver, CommitInfo, StagedTree, Staging, link
from trainbus.eventloop.errors import ConfigurationError, RunCancelled
from trainbus.eventloop.events import Progress
from trainbus.eventloop.training.run import HostedRun
from trainbus.eventloop.training.saves.capture import state_version
from trainbus.eventloop.training.saves.requests import SaveJob, SaveOutcome, SaveRequest
from trainbus.eventloop.user_errors import contextmanager
from trainbus.eventloop.world import world_size

CHECKED: Final = str(Path())  # the path that stands for a check: the state is gathered, but not written


class Writing(AbstractContextManager[None]):
    """A context in which a checkpoint is written, on the training thread or on another one; used once."""

    report: AbstractContextManager[None]

    def __init__(self, bus: Bus) -> None:
        self._bus, self._thread, self._begin = bus, get_ident(), time.perf_counter()
        self._span: AbstractContextManager[None] = nullcontext()
        self.here = False  # True if the training thread writes
        self.copied = 0.0  # seconds for which the training thread copied the state, if another one writes

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Measure a block in which the training thread copies the state and hands it to the thread that writes."""
        start = time.perf_counter()
        with self._bus.span("copying for checkpoints"):
            try:
                yield
            finally:
                self.copied = time.perf_counter() - start

    def __enter__(self) -> None:
        self.here = get_ident() == self._thread
        if self.here:
            self._span = self._bus.span("writing checkpoints")
        elif not self.copied:  # the other thread was as fast as the hand-over
            self.copied = time.perf_counter() - self._begin
        self._span.__enter__()
        self.report.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self.report.__exit__(kind, error, trace)
        finally:
            self._span.__exit__(None, None, None)


class TrainerSaver:
    """The saver of a run in another trainer, which writes the files.

    At a save point of the run, requests become due. At its next safe moment the bridge calls :meth:`write_due`.
    """

    hidden: tuple[type[BaseException], ...] = (RunCancelled, KeyboardInterrupt)  # Lightning exits instead of raising it
    sharded = False
    save = None
    overlaps = False
    """Whether the trainer can copy the state during the next forward and backward pass."""
    way_to_overlap = "for a CheckpointHook, staging keeps its default"

    def __init__(self, host: Any) -> None:
        self._host = host
        self._run: HostedRun = host.run
        self.staging: Staging = "block"  # of the current save
        self.raises = True  # True if a failure of the current save ends the training; False if a hook asked for a log line only
        self._others: list[Path] = []  # further names for the file that is being written

    def open(self) -> None:
        """Begin a run."""

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError for an option that needs trainbus's own format."""
        request.check()
        if request.staging == "overlap" and not self.overlaps:
            raise ConfigurationError(
                "staging='overlap' does not work here: another trainer writes the checkpoints, by its own saver; "
                + self.way_to_overlap
            )
        if request.leave_out:
            raise ConfigurationError(
                f"leave_out={sorted(request.leave_out)} does not work here: another trainer writes the checkpoints, always "
                "whole (for a CheckpointHook: save_optimizer and save_param_scheduler keep their defaults)"
            )

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Gather the state. Return no keys, because those of the trainer's checkpoint are unknown."""
        self._host.gather_entry(CHECKED)
        return []

    def version(self) -> tuple[int, ...] | None:
        """Return numbers that change with the state."""
        # Of several ranks each has handlers of its own, which count as changes of the state, and all must write or none.
        return state_version(self._run) if world_size() == 1 else None

    def way_to_resume(self, path: AnyPath) -> str:
        """Return how a user resumes, in the trainer's own words."""
        return str(self._host.resume_way).format(path)

    def write_due(self, write: Callable[[AnyPath], object]) -> None:
        """Call ``write`` with the path of the file, if one is due. It makes the trainer save, within :meth:`writing`."""

        def save(job: SaveJob) -> None:
            path, *self._others = job.paths
            self.raises, self.staging = job.request.on_error == "raise", job.request.staging
            try:
                write(path)
            except Exception:
                job.lost = True
                if self.raises:
                    raise
            finally:
                self._others, self.raises, self.staging = [], True, "block"

        self._run.checkpointer.save_due(save)

    def writing(self, path: AnyPath) -> Writing:
        """Return a context that publishes ``checkpoint_committed`` or ``checkpoint_failed`` when it ends.

        The trainer writes in it. It may be entered later, and on another thread: then the training waits only for
        :meth:`Writing.copying`.
        """
        others, self._others = self._others, []
        writing = Writing(self._run.bus)
        writing.report = self._report(path, others, self._run.state.counters.snapshot(self._run.state.progress.stage), writing)
        return writing

    @contextmanager
    def _report(self, path: AnyPath, others: list[Path], progress: Progress, writing: Writing) -> Iterator[None]:
        start, outcome = time.perf_counter(), SaveOutcome(self._run.bus, [path, *others], progress)
        # After the run, the trainer may still save, but the bus may be closed.
        first, open_here = self._run.rank == 0, self._run.running
        try:
            yield
            for other in others if first else ():
                link(path, other)
        except Exception as error:
            if first and open_here:
                outcome.failed(error)
            raise
        if first and open_here:
            self._run.checkpointer.committed.append(path)
            seconds = time.perf_counter() - start
            outcome.committed(size=_size(path), seconds=seconds, stall=seconds if writing.here else writing.copied)


class ReopenedSaver:
    """An ``AsyncSaver`` that begins with the first save, and anew after :meth:`close`."""

    def __init__(self, busy: Literal["wait", "queue"] = "wait") -> None:
        self._busy: Literal["wait", "queue"] = busy
        self._saver: AsyncSaver | None = None

    def save(self, tree: object, path: AnyPath, write: Callable[..., CommitInfo], *, raises: bool = True) -> Future[CommitInfo]:
        """Copy ``tree``, and queue the copy to be written, as :meth:`AsyncSaver.save`."""
        self._saver = self._saver or AsyncSaver(busy=self._busy)
        return self._saver.save(tree, path, write=write, raises=raises)

    def after_commit(self, action: Callable[[], object]) -> None:
        """Call ``action`` once the saves so far are durable."""
        if self._saver is None:
            action()
        else:
            self._saver.after_commit(action)

    def wait(self) -> None:
        """Wait until all files are durable; raise the CheckpointError of a failed one."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait as :meth:`wait`, and end. After Ctrl-C, call it again to finish."""
        if self._saver is not None:
            try:
                self._saver.close()
            except Exception:
                self._saver = None
                raise
            self._saver = None


def write_pickled(pickled: Pickled, report: AbstractContextManager[object], staged: StagedTree, path: AnyPath) -> CommitInfo:
    """Write a file of torch.save, within ``report``."""
    with report:
        return pickled.write(staged, path)


def _size(path: AnyPath) -> int:
    """Return the bytes of a local file, or of all files in a folder."""
    files = (path, *path.rglob("*")) if isinstance(path, Path) else ()
    return sum(file.stat().st_size for file in files if file.is_file())
