"""``AsyncSaver``: copy trees at once, and write them on a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Literal, NamedTuple, Self

import torch

from trainbus.eventloop.checkpoint.background import BackgroundWriter, Busy
from trainbus.eventloop.checkpoint.overlap import Overlap
from trainbus.eventloop.checkpoint.staging import CommitInfo, StageBuffer, StagedTree, WriteFile, stage, write
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path
from trainbus.eventloop.checks import check_value
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.user_errors import add_note, text_of


class _Job(NamedTuple):
    staged: StagedTree
    path: AnyPath
    number: int
    write: WriteFile
    raises: bool
    future: Future[CommitInfo]


class AsyncSaver:
    """Copy trees at once, and write them durably on a separate thread.

        with AsyncSaver() as saver:
            for step, batch in enumerate(loader):
                ...
                if step % 100 == 0:
                    saver.save({"model": model.state_dict()}, f"step_{step}.safetensors")

    One thread at a time may use it. If a save fails, the next ``save``, ``wait`` or ``close`` raises its error, and the files
    that are there stay. At interpreter exit it writes the saves that wait. In a forked process it does nothing.

    Args:
        busy: the behaviour of ``save`` while another save is being written: ``"wait"`` waits for it, ``"skip"`` does nothing,
            ``"replace"`` replaces the one that waits (never the one that is being written), ``"queue"`` waits only if another
            one waits already. The last two need staging memory twice.
        overlap: optimizers; their parameters and state are copied while the caller continues, up to their next step (see
            :mod:`trainbus.eventloop.checkpoint.overlap`).
    """

    def __init__(self, *, busy: Busy | Literal["queue"] = "wait", overlap: Iterable[torch.optim.Optimizer] = ()) -> None:
        check_value("busy", busy, Literal[Busy, "queue"])
        self._busy = busy
        self._buffer = StageBuffer()
        self._failures: list[BaseException] = []
        self._entered = 0
        """The number of the newest save."""
        self._actions: deque[tuple[int, Callable[[], object]]] = deque()
        """What to call after the commit of the save with that number, or of a later one."""
        self._committed = True  # the last save was, or there was none
        self._overlap = Overlap(optimizers) if (optimizers := list(overlap)) else None
        self._writer = BackgroundWriter[_Job](self._write, at_exit=self.close)

    def save(self, tree: object, path: AsPath, *, write: WriteFile = write, raises: bool = True) -> Future[CommitInfo]:
        """Copy ``tree``, and queue the copy to be written to ``path``, a file or a URL, whose directory must exist.

        Args:
            tree: what ``stage`` takes.
            path: the file to write.
            write: called on the saver's thread with the copy and the path, for files of another format
                (``trainbus.convert.Pickled.write`` for files of ``torch.save``). The copy is released afterwards.
            raises: if False, only the future has the error of this save.

        Returns:
            A future: cancelled if the save was skipped or replaced, done once the file is durable.

        Raises:
            CheckpointValueError: a value that a checkpoint cannot hold, with its path.
            CheckpointError: an earlier save failed; or the saver is closed, or belongs to another process.
        """
        if not self._writer.here:
            raise CheckpointError("this AsyncSaver belongs to the process that forked this one; create another one here")
        if self._writer.closed:
            raise CheckpointError("this AsyncSaver is closed; create another one")
        self._raise_failures()
        path = as_path(path)
        future: Future[CommitInfo] = Future()
        if self._busy == "skip" and self._writer.busy:
            future.cancel()
            future.set_running_or_notify_cancel()  # else concurrent.futures.wait() would wait for it
            return future
        if (replaced := self._writer.make_way(self._busy, _give_up)) is not None:
            replaced.future.set_running_or_notify_cancel()
        if self._busy == "wait":
            self._finish()
        self._raise_failures()
        staged = stage(tree, self._buffer, overlap=self._overlap)
        self._entered += 1
        job = _Job(staged, path, self._entered, write, raises, future)
        self._writer.enter(job)
        return future

    def after_commit(self, action: Callable[[], object]) -> None:
        """Call ``action`` once the saves so far are durable, for example to remove the files that they replace.

        It runs on the saver's thread, or at once if no save is under way. While the last save has failed, it waits for the
        next one that succeeds, and is dropped if none does. Its error is raised like that of a save.
        """
        self._actions.append((self._entered, action))
        if self._committed and not self._writer.busy:
            self._act(self._entered)

    def wait(self) -> None:
        """Wait until everything is durable; raise the CheckpointError of a save that failed."""
        self._writer.wait()
        self._finish()

    def close(self) -> None:
        """Write the saves that wait, and end; raise like ``wait``. After Ctrl-C, call it again to finish."""
        self._writer.close()
        if self._writer.here:
            if self._overlap is not None:
                self._overlap.close()
            self._buffer.clear()
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"and a checkpoint could not be written: {text_of(failure)}")

    def _finish(self) -> None:
        if self._writer.here:
            if self._committed:
                self._act(self._entered)  # what was asked for while the last save was ending
            self._raise_failures()

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
            add_note(first, f"and another one: {text_of(other)}")
        try:
            raise first
        finally:
            del self._failures[: 1 + len(others)]  # after it was raised, so that Ctrl-C loses none


def _give_up(job: _Job) -> bool:
    if not job.future.cancel():  # first of all, so that every thread that waits for it goes on
        return False
    job.staged.release()  # so that its memory can be used again
    return True
