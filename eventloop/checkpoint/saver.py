"""Saving a tree: at once (`save`), as two steps (`stage`, then `write`), or on a thread that writes (`AsyncSaver`)."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final, Generic, Literal, NamedTuple, Self, TypeVar

import msgspec
import torch

from eventloop.checkpoint.container import readable
from eventloop.checkpoint.overlap import Overlap
from eventloop.checkpoint.stage import StageBuffer, StagedTree, stage
from eventloop.checkpoint.store import AnyPath, AsPath, as_path, write_pieces
from eventloop.checks import check_value
from eventloop.errors import CheckpointError

Busy = Literal["wait", "skip", "replace"]
"""The behaviour of a save that is due while another is being written."""

_POLL: Final = 0.2
"""Seconds after which a waiting thread checks again, in case Ctrl-C swallowed a notification."""

Job = TypeVar("Job")


class CommitInfo(msgspec.Struct, frozen=True):
    """A checkpoint that is on disk: where, its size in bytes, its digest, and the seconds it took without staging."""

    path: AnyPath
    bytes: int
    digest: str
    seconds: float


def write(staged: StagedTree, path: AsPath) -> CommitInfo:
    """Write a staged tree to `path`, a file or a URL, durably and atomically, and release it.

    The GIL is free during nearly all of it. If it fails, the name keeps what it had, and `staged` may be written elsewhere.

    Raises:
        CheckpointError: from the error of the step that failed; or `staged` was released before.
        ConfigurationError: `path` is a URL whose file system is not installed.
    """
    start = time.perf_counter()
    path = as_path(path)
    digest = write_pieces(path, staged.bytes, staged.pieces())
    staged.release()
    return CommitInfo(path, staged.bytes, readable(digest), time.perf_counter() - start)


Writer = Callable[[StagedTree, AnyPath], CommitInfo]
"""Writes a staged tree to a path, durably and atomically, or raises."""


def save(tree: object, path: AsPath) -> CommitInfo:
    """Stage `tree` and write it to `path`; raise the errors of `stage` and `write`."""
    return write(stage(tree), path)


class Turns(Generic[Job]):
    """Tracks the jobs under way and the one that waits. Jobs come from one thread and are done by another.

    A job is entered, begun and ended, or it is entered and taken back before it has begun. Each of these is done in full or
    not at all when Ctrl-C strikes: CPython looks for signals only at calls and jumps back, and none is between the changes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.under_way: tuple[Job, ...] = ()
        """The jobs that were entered and have not ended."""
        self.waiting: Job | None = None
        """The job that can be taken back."""
        # One taken lock for each thread in `wait`. An Event would lose track of its own lock when Ctrl-C strikes in it.
        self._bells: list[threading.Lock] = []

    def wait(self, *, for_place: bool = False) -> None:
        """Wait until no job is under way; ``for_place``: until none waits to begin."""
        while True:
            with self._lock:
                if not self.under_way or (for_place and self.waiting is None):
                    return
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            bell.acquire(timeout=_POLL)

    def enter(self, job: Job, *, can_wait: bool = True) -> None:
        """Note a job. Unless it ``can_wait``, it cannot be taken back, and `begin` is not asked about it."""
        with self._lock:
            self.under_way = (*self.under_way, job)
            if can_wait:
                self.waiting = job

    def take_back(self) -> Job | None:
        """Take back the waiting job, if there is one: it will never begin."""
        with self._lock:
            job = self.waiting
            if job is not None:
                self._remove(job)
            return job

    def begin(self, job: Job) -> bool:
        """Begin a job; False if it was taken back."""
        with self._lock:
            if self.waiting is not job:
                return False
            self.waiting = None
            self._ring()
            return True

    def end(self, job: Job) -> None:
        """Note that a job is done, well or not. A job that is not under way is ignored."""
        with self._lock:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        left = tuple(other for other in self.under_way if other is not job)
        self.under_way = left
        if self.waiting is job:
            self.waiting = None
        if not left:
            self._ring()

    def _ring(self) -> None:
        while self._bells:
            self._bells.pop().release()


class _Job(NamedTuple):
    staged: StagedTree
    path: AnyPath
    number: int
    write: Writer
    raises: bool
    future: Future[CommitInfo]


class AsyncSaver:
    """Copy trees at once, and write them durably on a separate thread.

        with AsyncSaver() as saver:
            for step, batch in enumerate(loader):
                ...
                if step % 100 == 0:
                    saver.save({"model": model.state_dict()}, f"step_{step}.safetensors")

    One thread at a time may use it. If a save fails, the next `save`, `wait` or `close` raises its error, and the files that
    are there stay. At interpreter exit it writes the saves that wait. In a forked process it does nothing.

    Args:
        busy: the behaviour of `save` while another save is being written: ``"wait"`` waits for it, ``"skip"`` does nothing,
            ``"replace"`` replaces the one that waits (never the one that is being written), ``"queue"`` waits only if another
            one waits already. The last two need staging memory twice.
        overlap: optimizers; their parameters and state are copied while the caller continues, up to their next step (see
            :mod:`eventloop.checkpoint.overlap`).
    """

    def __init__(self, *, busy: Busy | Literal["queue"] = "wait", overlap: Iterable[torch.optim.Optimizer] = ()) -> None:
        check_value("busy", busy, Literal[Busy, "queue"])
        self._busy = busy
        self._buffer = StageBuffer()
        self._turns: Turns[_Job] = Turns()
        # Wakes the thread; in C, so that Ctrl-C cannot corrupt it.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._entered = 0
        """The number of the newest save."""
        self._actions: deque[tuple[int, Callable[[], object]]] = deque()
        """What to call after the commit of the save with that number, or of a later one."""
        self._committed = True  # the last save was, or there was none
        self._closed = False
        self._process = os.getpid()
        self._overlap = Overlap(optimizers) if (optimizers := list(overlap)) else None
        self._thread = threading.Thread(target=self._write_all, name="trainbus-saver", daemon=True)
        try:
            self._thread.start()
            atexit.register(self.close)
        except BaseException:
            self._closed = True
            self._bell.put(None)  # after Ctrl-C the thread may run nevertheless, and must end
            raise

    def save(self, tree: object, path: AsPath, *, write: Writer = write, raises: bool = True) -> Future[CommitInfo]:
        """Copy ``tree``, and queue the copy to be written to ``path``, a file or a URL, whose directory must exist.

        Args:
            tree: what `stage` takes.
            path: the file to write.
            write: called on the saver's thread with the copy and the path, for files of another format
                (`Pickled.write` for files of ``torch.save``). The copy is released afterwards.
            raises: if False, only the future has the error of this save.

        Returns:
            A future: cancelled if the save was skipped or replaced, done once the file is durable.

        Raises:
            CheckpointValueError: a value that a checkpoint cannot hold, with its path.
            CheckpointError: an earlier save failed; or the saver is closed, or belongs to another process.
        """
        if self._process != os.getpid():
            raise CheckpointError("this AsyncSaver belongs to the process that forked this one; create another one here")
        if self._closed:
            raise CheckpointError("this AsyncSaver is closed; create another one")
        self._raise_failures()
        path = as_path(path)
        future: Future[CommitInfo] = Future()
        if self._busy == "wait":
            self.wait()
        elif self._busy == "skip" and self._turns.under_way:
            self._bell.put(None)  # see _finish
            future.cancel()
            future.set_running_or_notify_cancel()  # else concurrent.futures.wait() would wait for it
            return future
        elif self._busy == "queue":
            self._bell.put(None)
            self._turns.wait(for_place=True)
            self._raise_failures()
        else:
            self._give_up_waiting()
        staged = stage(tree, self._buffer, overlap=self._overlap)
        self._entered += 1
        job = _Job(staged, path, self._entered, write, raises, future)
        self._turns.enter(job)  # from here on it is written or replaced, even after Ctrl-C
        self._bell.put(None)
        return future

    def after_commit(self, action: Callable[[], object]) -> None:
        """Call ``action`` once the saves so far are durable, for example to remove the files that they replace.

        It runs on the saver's thread, or at once if no save is under way. While the last save has failed, it waits for the
        next one that succeeds, and is dropped if none does. Its error is raised like that of a save.
        """
        self._actions.append((self._entered, action))
        if not self._turns.under_way and self._committed:
            self._act(self._entered)

    def wait(self) -> None:
        """Wait until everything is durable; raise the CheckpointError of a save that failed."""
        if self._process == os.getpid():
            self._finish()
            self._raise_failures()

    def close(self) -> None:
        """Write the saves that wait, and end; raise like `wait`. After Ctrl-C, call it again to finish."""
        if self._process != os.getpid():
            return
        self._closed = True
        self._finish()
        self._thread.join()  # everything is written by now, should Ctrl-C have it return too soon
        if self._overlap is not None:
            self._overlap.close()
        self._buffer.clear()
        atexit.unregister(self.close)
        self._raise_failures()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and a checkpoint could not be written: {failure}")

    def _finish(self) -> None:
        self._bell.put(None)  # Ctrl-C may have struck in save, between entering the job and ringing
        self._turns.wait()
        if self._committed:
            self._act(self._entered)  # what was asked for while the last save was ending

    def _give_up_waiting(self) -> None:
        waiting = self._turns.waiting
        if waiting is not None and waiting.future.cancel():  # first of all, so that every thread that waits for it is told
            waiting.staged.release()  # so that its memory can be used again
            if self._turns.take_back() is not None:  # else the thread has it, and sees that it is cancelled
                waiting.future.set_running_or_notify_cancel()

    def _write_all(self) -> None:
        while True:
            self._bell.get()
            closed = self._closed  # asked first: every job comes before it, so the last one is found below
            while (job := self._turns.waiting) is not None:
                if self._turns.begin(job):  # else it was replaced at this moment
                    try:
                        self._write(job)
                    finally:
                        self._turns.end(job)
            if closed:
                return

    def _write(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():  # replaced, or the caller has cancelled it
            job.staged.release()
            return
        try:
            info = job.write(job.staged, job.path)
        except Exception as error:  # noqa: BLE001 - raised by the next call
            job.staged.release()
            self._committed = False
            if job.raises:
                self._failures.append(error)
            job.future.set_exception(error)
        else:
            job.staged.release()
            self._committed = True
            self._act(job.number)
            job.future.set_result(info)

    def _act(self, number: int) -> None:
        while self._actions and self._actions[0][0] <= number:
            try:
                self._actions.popleft()[1]()
            except IndexError:  # the other thread took it
                return
            except Exception as error:  # noqa: BLE001 - raised by the next call
                self._failures.append(error)

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        first, *others = self._failures
        for other in others:
            first.add_note(f"and another one: {other}")
        told = 1 + len(others)
        del self._failures[:told]  # right before it is raised: no Ctrl-C can come in between
        raise first
