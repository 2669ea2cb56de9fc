"""``attach(bus, trainer, checkpoints=True)``: the checkpoints of a ``transformers.Trainer``, written beside its training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainbus.bridges.transformers import privates
from trainbus.bridges.transformers.folders import Folders
from trainbus.convert import FolderFiles
from trainbus.eventloop.checkpoint import AnyPath, AsyncSaver, CommitInfo, StagedTree, discard_folder
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import add_note, contextmanager, text_of

log = get_logger()

Report = AbstractContextManager[None]

_REFUSED: Final = {
    "is_deepspeed_enabled": "DeepSpeed writes its own shards, on all ranks",
    "is_fsdp_enabled": "FSDP writes its own shards, on all ranks",
    "is_fsdp_xla_enabled": "a TPU writes through torch_xla",
    "is_distributed_loading_by_transformers": "the model is sharded, and all ranks gather it for each save",
}
"""Attributes of the trainer for kinds of training that cannot be copied on one rank, with the reason."""
_REFUSED_ARGUMENTS: Final = {
    "push_to_hub": "the trainer uploads a folder at once, before it is complete",
    "enable_jit_checkpoint": "at SIGTERM it needs the folder at once; a PreemptionHook does the same, and waits",
}


class FolderSaver:
    """Write the folders of a trainer on a thread: a copy, a temporary folder, digests, fsync, and a rename at the end.

    Older checkpoints are removed, and the best one is named, after the commit. All ranks wait for each other at a save,
    because each one writes a file into the folder.
    """

    def __init__(self, trainer: Any, folders: Folders) -> None:
        _check(trainer)
        self._trainer = trainer
        self._folders = folders
        self._saver: AsyncSaver | None = None
        self._best: str | None = None  # the folder that becomes the best one once it is durable
        self.is_open = False  # True while the trainer trains; outside of it, the trainer writes itself

    @contextmanager
    def open(self) -> Iterator[None]:
        """Write beside the training in a block; at its end, wait for all files, and raise the error of a save that failed."""
        self.is_open, self._best = True, None
        with ExitStack() as stack:
            stack.callback(self._forget)
            if self._trainer.args.should_save:
                self._saver = stack.enter_context(AsyncSaver())
            self._warn_of_callbacks()
            yield
            self.wait_for_files()

    def _forget(self) -> None:
        self.is_open, self._saver = False, None

    def wait_for_files(self) -> None:
        """Wait on all ranks until everything is durable; raise the error of a save that failed."""
        try:
            if self._saver is not None:
                self._saver.wait()
        finally:
            self._trainer.accelerator.wait_for_everyone()
        best, self._best = self._best, None
        if best is not None and Path(best).is_dir():
            self._trainer.state.best_model_checkpoint = best

    def finish(self, error: BaseException) -> None:
        """Wait for the files of this rank after ``error``, so that they are there when it is reported."""
        try:
            if self._saver is not None:
                self._saver.wait()
        except Exception as failure:  # noqa: BLE001 - the first error is the one to raise
            add_note(error, f"and a checkpoint could not be written: {text_of(failure)}")

    def save(self, write: Callable[[], object], path: Path, report: Report, *, own: bool, raises: bool = True) -> None:
        """Copy the state that the trainer saves in ``write``, and queue the copy for the folder ``path``, within ``report``.

        A folder of the trainer's ``own`` counts for its limit, and may be its best one. Unless it ``raises``, an error of
        writing is logged only.
        """
        self.wait_for_files()
        saver = self._saver
        try:
            with self._folders.redirected(path, best=path if own else None) as written:
                files = FolderFiles(written)
                with files.recorded() if saver is not None else ExitStack():
                    write()
            if saver is not None:
                best = self._folders.best if own else None
                after = partial(self._rotate, path.parent, best) if own else None
                saver.save(files.tree, path, write=partial(_write, files, report, after), raises=raises)
        except Exception:
            if saver is not None:
                discard_folder(self._folders.temporary(path))
                with report:
                    raise
            raise
        if own:
            self._best = self._folders.best

    def _rotate(self, directory: Path, best: str | None) -> None:
        """Name the best folder, which is durable now, and remove older ones as the trainer does."""
        self._trainer.state.best_model_checkpoint = best
        privates.rotate(self._trainer, directory)

    def around_on_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace ``on_save`` of the callbacks: wait until the folder is complete, because callbacks may read it."""
        if self.is_open and self._readers():
            self.wait_for_files()
        return original(*args, **kwargs)

    def _readers(self) -> list[str]:
        callback = importlib.import_module("transformers").TrainerCallback
        callbacks = [type(one) for one in self._trainer.callback_handler.callbacks]
        return [kind.__name__ for kind in callbacks if getattr(kind, "on_save", None) is not callback.on_save]

    def _warn_of_callbacks(self) -> None:
        if readers := self._readers():
            log.warning(
                "these callbacks handle on_save and may read the folder, so the training waits for each checkpoint",
                id="transformers-callbacks-wait",
                callbacks=readers,
            )


def _write(
    files: FolderFiles, report: Report, after: Callable[[], None] | None, staged: StagedTree, path: AnyPath
) -> CommitInfo:
    """Write a folder on the saver's thread, report it, and then remove what it replaces."""
    try:
        with report:
            info = files.write(staged, path)
    finally:
        discard_folder(files.folder.parent)
    if after is not None:
        after()
    return info


def _check(trainer: Any) -> None:
    """Raise ConfigurationError for a trainer whose checkpoints cannot be written beside its training."""
    xla = importlib.import_module("transformers.utils").is_torch_xla_available()
    reasons = [reason for name, reason in _REFUSED.items() if getattr(trainer, name, False)]
    reasons += ["a TPU writes through torch_xla"] if xla and not reasons else []
    reasons += [f"{name}=True: {reason}" for name, reason in _REFUSED_ARGUMENTS.items() if getattr(trainer.args, name, False)]
    if reasons:
        raise ConfigurationError(
            f"checkpoints=True does not work with this {type(trainer).__name__}: {reasons[0]}. Attach without it: the trainer "
            "then writes its checkpoints itself"
        )
