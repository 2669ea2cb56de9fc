"""A save handler for Ignite's ``Checkpoint`` that writes beside the training. It needs no bus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from ignite import distributed
from ignite.engine import Engine
from ignite.handlers import DiskSaver

from trainbus.bridges.copies import replaced
from trainbus.bridges.saves import ReopenedSaver, Writing, write_pickled
from trainbus.convert import Pickled
from trainbus.eventloop.checkpoint import remove, stage
from trainbus.eventloop.user_errors import add_note, text_of


class TrainbusSaver(DiskSaver):  # type: ignore[misc]  # types of Ignite are not looked at
    """Write the files of Ignite's ``Checkpoint`` on a thread: training waits only for a copy.

        saver = TrainbusSaver("runs/digits", trainer)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(to_save, saver, n_saved=2))

    The files have torch.save's format; ``Checkpoint.load_objects`` and ``torch.load`` read them.

    - A file gets its name when it is complete and durable.
    - A file that ``Checkpoint`` removes is kept until its successor is durable, and stays if that fails.
    - If a file could not be written, the next save or the end of ``trainer.run()`` raises its error.
    - ``trainer.run()`` returns when all files are durable. A save outside of it waits for its file.
    - ``Checkpoint.last_checkpoint`` waits until that file is durable.

    Args:
        dirname: the directory; it is made if it does not exist.
        trainer: the engine whose ``run()`` waits at its end.
        require_empty: refuse a directory with files that end in ``.pt``.
        save_on_rank: the rank that writes.

    Raises:
        ValueError: the directory is not empty.
    """

    def __init__(self, dirname: str | Path, trainer: Engine, *, require_empty: bool = True, save_on_rank: int = 0) -> None:
        self._saver = ReopenedSaver()
        super().__init__(dirname, require_empty=require_empty, save_on_rank=save_on_rank)
        self._in_run = False
        self._removed: list[str] = []  # since the last save
        self._kept: set[str] = set()
        #: Makes a context for the writing of one file: a bridge reports it there. Used once.
        self.report: Callable[[Path], Writing] | None = None
        self._trainer = trainer
        self._join()

    def _join(self) -> None:
        """Make the engine's ``run()`` wait for the files."""
        inner = self._trainer.run
        replaced(self._trainer, "run", update_wrapper(partial(self._around, inner), inner))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no file under way and belongs to a copy of the engine."""
        return {**vars(self), "_saver": ReopenedSaver(), "_in_run": False, "report": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._join()

    @property
    def dirname(self) -> Path:
        """The directory; waits until its files are durable, and raises the error of a failed one."""
        self.wait()
        return self._directory

    @dirname.setter
    def dirname(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, checkpoint: Mapping[str, Any], filename: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Copy a checkpoint, and queue the copy to be written."""
        if distributed.get_rank() != self.save_on_rank:
            return
        path, report, self.report = self._directory / filename, self.report, None
        pickled = Pickled(checkpoint)
        writing = None if report is None else report(path)
        write = partial(write_pickled, pickled, writing or nullcontext())
        self._kept.add(filename)
        if self._in_run:
            with nullcontext() if writing is None else writing.copying():
                self._saver.save(pickled.storages, path, write)
            for name in self._take_removed():
                self._saver.after_commit(partial(self._remove, name))
        else:
            write(stage(pickled.storages), path)
            for name in self._take_removed():
                self._remove(name)

    def remove(self, filename: str) -> None:
        """Remove a file when the next one is durable."""
        if distributed.get_rank() == self.save_on_rank:
            self._kept.discard(filename)
            self._removed.append(filename)

    def wait(self) -> None:
        """Wait until all files are durable; raise the CheckpointError of a failed one."""
        self._saver.wait()

    def _take_removed(self) -> list[str]:
        names, self._removed = self._removed, []
        return names

    def _remove(self, filename: str) -> None:
        if filename not in self._kept:  # else it was saved again
            remove(self._directory / filename)

    def _around(self, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run the engine, and wait for the files, also after an error."""
        before, self._in_run = self._in_run, True
        try:
            state = inner(*arguments, **named)
        except BaseException as error:
            try:
                self._saver.close()
            except Exception as failure:  # noqa: BLE001 - the first error is the one to raise
                add_note(error, f"and a checkpoint could not be written: {text_of(failure)}")
            raise
        finally:
            self._in_run = before
        self._saver.close()
        return state
