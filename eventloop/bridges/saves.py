"""Save a hosted run: hooks request checkpoints, and the trainer writes them in its own format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Final

from eventloop import events as ev
from eventloop.bus import Bus
from eventloop.checkpoint import AnyPath, link
from eventloop.errors import ConfigurationError, RunCancelled
from eventloop.events import Progress
from eventloop.log import get_logger
from eventloop.training.distributed.ranks import Ranks
from eventloop.training.saves.capture import Saves
from eventloop.training.saves.resumable import resume_line
from eventloop.training.saves.write import SaveRequest, merged

log = get_logger()

CHECKED: Final = str(Path())
"""The path that stands for a check: the state is gathered, but not written."""


class Writing(AbstractContextManager[None]):
    """A context in which a checkpoint is written, on the training thread or on another one; used once."""

    report: AbstractContextManager[None]

    def __init__(self, bus: Bus) -> None:
        self._bus, self._thread, self._begin = bus, get_ident(), time.perf_counter()
        self._span: AbstractContextManager[None] = nullcontext()
        self.here = False
        """True if the training thread writes."""
        self.copied = 0.0
        """Seconds for which the training thread copied the state, if another one writes."""

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


class HostSaves(Saves):
    """Collect the requests of hooks, and make the trainer write them.

    At a save point of the run, requests become due. At its next safe moment the bridge calls :meth:`write_due`.
    """

    hidden = RunCancelled, KeyboardInterrupt  # Lightning exits instead of raising it
    _run: Any
    due: list[SaveRequest]
    _others: list[AnyPath]
    """Further names for the file that is being written."""
    raises = True
    """True if a failure of the current save ends the training; False if a hook asked for a log line only."""
    _written: tuple[object, set[AnyPath]] | None
    """The version of the last state that was written, and its paths."""

    def __init__(self, run: Any, feeds: Any) -> None:
        super().__init__(run, feeds)
        self._committed: list[AnyPath] = []

    def open(self, ranks: Ranks | None) -> None:
        """Accept requests until the run ends."""
        self.requests, self.due, self._others, self._written = [], [], [], None

    def request(self, request: SaveRequest) -> None:
        """Queue a request; raise ConfigurationError for an option that needs trainbus's own format."""
        self._run.state.check_open("run.request_save()")
        self._check(request)
        if self._run.state.has_trained or self._run.state.progress.stage == "train":
            self.requests.append(request)
        else:
            self._refuse(request)

    def check(self, request: SaveRequest, *, copy: bool) -> list[str]:
        """Raise the error that a save would raise. Returns no keys, because those of the trainer's checkpoint are unknown."""
        self._check(request)
        if copy:
            self._run.gather_entry(CHECKED)
        return []

    def save_if_asked(self, *, force: bool = False) -> None:
        """Make the requests due; inside an accumulation window only with ``force``."""
        state = self._run.state
        if not state.has_trained or (not force and state.window_open):
            return
        self._add_asked_now()
        self.due += self.requests
        self.requests = []

    def end(self) -> None:
        """Skip requests that are too late for the trainer."""
        left = [*self.due, *self.requests]
        self.due, self.requests = [], []
        for request in left:
            self._refuse(request)

    def resume_line(self) -> str:
        """Return the line that tells how to continue from the newest checkpoint of this run, in the trainer's own words."""
        lines = (resume_line(path, self._run.resume_way.format(path)) for path in reversed(self._committed))
        return next(filter(None, lines), "")  # the trainer may have removed the newest

    def wait(self) -> None:
        """Return at once: the trainer has written its files."""

    def write_due(self, write: Callable[[AnyPath], object]) -> None:
        """Call ``write`` with the path of the file, if one is due. It makes the trainer save, within :meth:`writing`."""
        if not self.due:
            return
        requests, self.due = self.due, []
        asked, version = {request.path for request in requests}, self._version()
        if self._written is not None and self._written[0] == version and asked <= self._written[1]:
            return  # the end of training asks for the state of its last epoch again
        path, *self._others = dict.fromkeys(request.path for request in requests)
        self.raises = merged(requests).on_error == "raise"
        try:
            write(path)
            self._written = version, asked
        except Exception:
            if self.raises:
                raise
        finally:
            self._others, self.raises = [], True

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
    def _report(self, path: AnyPath, others: list[AnyPath], progress: Progress, writing: Writing) -> Iterator[None]:
        start, names = time.perf_counter(), [str(path), *map(str, others)]
        payload: dict[str, Any] = {"progress": progress, "path": names[0], "names": names}
        # After the run, the trainer may still save, but the bus may be closed.
        first, open_here = self._run.rank == 0, self._run.running
        try:
            yield
            for other in others if first else ():
                link(path, other)
        except Exception as error:
            if first and open_here:
                log.exception("checkpoint not written", names=names)
                self._run.bus.publish(ev.CheckpointFailed(**payload, error=str(error)))
            raise
        if first and open_here:
            self._committed.append(path)
            seconds = time.perf_counter() - start
            stall = seconds if writing.here else writing.copied
            self._run.bus.publish(ev.CheckpointCommitted(**payload, bytes=_size(path), seconds=seconds, stall=stall))

    def _check(self, request: SaveRequest) -> None:
        request.check(sharded=False)
        for option, value in (("staging", request.staging), ("leave_out", sorted(request.leave_out))):
            if value not in ("block", []):
                raise ConfigurationError(
                    f"{option}={value!r} does not work here: another trainer writes the checkpoints, always whole, by its own "
                    "saver (for a CheckpointHook: save_optimizer, save_param_scheduler and staging keep their defaults)"
                )

    def _refuse(self, request: SaveRequest) -> None:
        reason = "only a training saves, and this run has not trained or has ended"
        names: Any = [str(request.path)]
        log.warning("checkpoint not made", names=names, reason=reason)
        self._run.bus.publish(
            ev.CheckpointSkipped(progress=self._run.state.counters.snapshot(), path=names[0], names=names, reason=reason)
        )


def _size(path: AnyPath) -> int:
    """Return the bytes of a local file, or of all files in a folder."""
    files = (path, *path.rglob("*")) if isinstance(path, Path) else ()
    return sum(file.stat().st_size for file in files if file.is_file())
