"""``AsyncSaver``: saves that the caller waits for no longer than a copy takes."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple, Self

import torch

from eventloop.checkpoint.container import CommitInfo, write
from eventloop.checkpoint.overlap import Overlap
from eventloop.checkpoint.stage import StageBuffer, StagedTree, stage
from eventloop.checkpoint.store import AnyPath, as_path
from eventloop.checkpoint.turns import Busy, Turns, check_busy
from eventloop.errors import CheckpointError


class _Job(NamedTuple):
    staged: StagedTree
    path: AnyPath
    future: Future[CommitInfo]


class AsyncSaver:
    """Copies trees at once and writes them durably on one thread of its own.

        with AsyncSaver() as saver:
            for step, batch in enumerate(loader):
                ...
                if step % 100 == 0:
                    saver.save({"model": model.state_dict()}, f"step_{step}.safetensors")

    For one thread at a time. A save that fails is raised by the next `save`, `wait` or `close`, and it costs no file that is
    there already. What is unwritten when the interpreter exits is written then. In a forked process it is inert.

    Args:
        busy: what a `save` does while another is being written: ``"wait"`` waits for it, ``"skip"`` does nothing,
            ``"replace"`` takes the place of the one that waits (never of the one that is being written), and so needs
            staging memory twice.
        overlap: optimizers; their parameters and state are copied while the caller goes on, up to their next step (see
            :mod:`eventloop.checkpoint.overlap`).

    Raises:
        ConfigurationError: an unknown ``busy``.
    """

    def __init__(self, *, busy: Busy = "wait", overlap: Iterable[torch.optim.Optimizer] = ()) -> None:
        check_busy(busy)
        optimizers = list(overlap)
        self._busy = busy
        self._buffer = StageBuffer()
        self._turns: Turns[_Job] = Turns()
        # Wakes the thread; in C, so that Ctrl-C leaves it whole.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._closed = False
        self._process = os.getpid()
        self._overlap = Overlap(optimizers) if optimizers else None
        self._thread = threading.Thread(target=self._write_all, name="trainbus-saver", daemon=True)
        try:
            self._thread.start()
            atexit.register(self.close)
        except BaseException:
            self._closed = True
            self._bell.put(None)  # after Ctrl-C the thread may run all the same, and nobody else will end it
            raise

    def save(self, tree: object, path: str | os.PathLike[str] | AnyPath) -> Future[CommitInfo]:
        """Copy ``tree`` and have it written to ``path``, a file or a URL; its directory must exist.

        Returns:
            A future: cancelled if the save was skipped or replaced, done once the file is durable.

        Raises:
            CheckpointValueError: a value that a checkpoint cannot hold, with its path.
            CheckpointError: an earlier save failed; or the saver is closed, or of another process.
        """
        self._check_usable()
        self._raise_failures()
        place = as_path(path)
        future: Future[CommitInfo] = Future()
        if self._busy == "wait":
            self.wait()
        elif self._busy == "skip" and self._turns.busy:
            self._bell.put(None)  # see _finish
            future.cancel()
            future.set_running_or_notify_cancel()  # else concurrent.futures.wait() would wait for it
            return future
        self._give_up_waiting()
        job = _Job(stage(tree, self._buffer, overlap=self._overlap), place, future)
        self._turns.enter(job)  # from here on it is written, or replaced, whatever strikes
        self._bell.put(None)
        return future

    def wait(self) -> None:
        """Wait until everything is durable.

        Raises:
            CheckpointError: a save failed.
        """
        if self._process == os.getpid():
            self._finish()
            self._raise_failures()

    def close(self) -> None:
        """Write what is unwritten, and end. Again is fine, and goes on where Ctrl-C has cut it short.

        Raises:
            CheckpointError: a save failed.
        """
        if self._process != os.getpid():
            return
        self._closed = True
        self._finish()
        self._thread.join()  # for tidiness: nothing is left to be written, should Ctrl-C have it return too soon
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
        self._bell.put(None)  # Ctrl-C may have struck in save, when the job was there and nobody was told yet
        self._turns.wait()

    def _give_up_waiting(self) -> None:
        """Make room for another job in the place of the one that waits, if one does."""
        waiting = self._turns.waiting
        if waiting is not None and waiting.future.cancel():  # first of all: whoever waits for it must hear of it
            waiting.staged.release()  # so that its memory can be used again
            if self._turns.take_back() is not None:  # else the thread has it, and sees that it is cancelled
                waiting.future.set_running_or_notify_cancel()

    def _write_all(self) -> None:
        while True:
            self._bell.get()
            while (job := self._turns.begin_next()) is not None:
                try:
                    self._write(job)
                finally:
                    self._turns.end(job)
            if self._closed:
                return

    def _write(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():  # replaced, or the caller has cancelled it
            job.staged.release()
            return
        try:
            info = write(job.staged, job.path)
        except Exception as error:  # noqa: BLE001 - told by the next call
            job.staged.release()
            self._failures.append(error)
            job.future.set_exception(error)
        else:
            job.future.set_result(info)

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise CheckpointError("this AsyncSaver is of the process that forked this one; make one here")
        if self._closed:
            raise CheckpointError("this AsyncSaver is closed; make a new one")

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        first, *others = self._failures
        for other in others:
            first.add_note(f"and another one: {other}")
        told = 1 + len(others)
        self._failures = self._failures[told:]  # right before it is raised: no Ctrl-C can come in between
        raise first
