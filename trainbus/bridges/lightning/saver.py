"""``TrainbusCheckpointIO``: Lightning's checkpoints, written beside the training. It needs no bus.

The files have torch.save's format, so ``load_from_checkpoint`` and other programs read them without trainbus. Lightning
is not imported before the first object is made.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from torch import distributed

from trainbus.bridges.lightning import privates
from trainbus.bridges.saves import ReopenedSaver
from trainbus.convert import Pickled
from trainbus.eventloop.checkpoint import AnyPath, CommitInfo, StagedTree, as_path, link, make_directory, remove, symlink
from trainbus.eventloop.device import current_device
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import add_note, text_of
from trainbus.eventloop.world import world_size

log = get_logger()

_PACKAGES: Final = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""The two names of Lightning's package, each with the name of its Fabric package. Their classes differ."""


class TrainbusCheckpointIO:
    """Write Lightning's checkpoints while the training continues.

        trainer = Trainer(plugins=[TrainbusCheckpointIO()])

    The training thread copies the tensors into memory that it uses again. A thread writes the file under a temporary name,
    syncs it, and renames it. A checkpoint that Lightning replaces is removed once its successor is durable, and a link
    (``save_last="link"``) then names the successor. Two checkpoints may be under way; a third one waits.

    The end of ``fit()`` waits for the files; so does ``trainer.save_checkpoint()`` outside of it. If a save fails, the next
    one or the end of ``fit()`` raises its error, and the checkpoint that it should have replaced is kept.

    Strategies that write shards (DeepSpeed, FSDP with ``state_dict_type="sharded"``) do not use a ``CheckpointIO``; a warning
    says so.
    """

    def __init__(self) -> None:
        _join_lightning(self)
        self._saver = ReopenedSaver("queue")
        self._files: dict[str, Future[CommitInfo]] = {}  # the last save of each path since the last wait
        self._last: Future[CommitInfo] | None = None  # the last save
        self.saved_by: weakref.ref[Any] | None = None
        """The trainer that saved since the last teardown."""
        self.saves = 0
        """The number of saves so far."""
        self.around: AbstractContextManager[object] | None = None
        """A context in which the next file is written, on the writing thread; None once a save has taken it."""
        self.raises = True
        """False if the error of the next save is for ``around`` only."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no file under way."""
        none = dict.fromkeys(("_last", "saved_by", "around"))
        return {**vars(self), **none, "_saver": ReopenedSaver("queue"), "_files": {}, "raises": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        _join_lightning(self)  # perhaps in another process
        vars(self).update(state)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Copy ``checkpoint`` and queue the copy to be written to ``path``, a file or a URL.

        Raises:
            CheckpointValueError: an object in it cannot be pickled.
            CheckpointError: an earlier save failed.
            TypeError: ``storage_options`` was given.
        """
        if storage_options is not None:
            raise TypeError("TrainbusCheckpointIO takes no storage_options; configure the file system by fsspec's own settings")
        pickled = Pickled(checkpoint)
        write = partial(_write, pickled, self.around)
        future = self._saver.save(pickled.storages, as_path(path), write, raises=self.raises)
        self.around, self._last = None, future
        self.saves += 1
        self._files = {name: file for name, file in self._files.items() if not file.done()} | {os.fspath(path): future}

    def load_checkpoint(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint as Lightning does, after the saves that are under way."""
        self.wait()
        fabric = next(_PACKAGES[name] for name in _PACKAGES if name in sys.modules)
        own = importlib.import_module(f"{fabric}.plugins.io.torch_io").TorchCheckpointIO()
        loaded: dict[str, Any] = own.load_checkpoint(path, *arguments, **options)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint once the saves so far are durable. If the last one failed, it stays."""
        self.after_commit(partial(_remove, os.fspath(path)))

    def teardown(self) -> None:
        """Wait until all files are durable, on all ranks; Lightning calls it at the end of ``fit()``.

        Raises:
            CheckpointError: a save failed. If ``fit()`` itself has failed, its own error is raised, and this one is logged.
        """
        trainer = None if self.saved_by is None else self.saved_by()
        error = sys.exception() if trainer is not None and trainer.interrupted else None
        self.saved_by, self._last, self._files = None, None, {}
        try:
            self._saver.close()
        except Exception as failure:
            if error is None:
                raise
            log.exception("checkpoint not written", id="lightning-save-failed")
            add_note(error, f"and a checkpoint could not be written: {text_of(failure)}")
        if trainer is not None and error is None:
            _wait_for_ranks()

    def wait(self) -> None:
        """Wait until all files are durable; raise the error of a save that failed."""
        self._saver.wait()

    def finish(self) -> None:
        """Wait until no file is under way; an error is raised later."""
        wait(self._files.values())

    def is_pending(self, path: str) -> bool:
        """Return True while a file is being written that will have the name ``path``."""
        file = self._files.get(path)
        return file is not None and not file.done()

    def after_commit(self, action: Callable[[], object]) -> None:
        """Call ``action`` once the saves so far are durable, or at once; not if the last one has failed."""
        self._saver.after_commit(partial(_unless_failed, self._last, action))


def _write(pickled: Pickled, around: AbstractContextManager[object] | None, staged: StagedTree, path: AnyPath) -> CommitInfo:
    with nullcontext() if around is None else around:
        make_directory(path.parent)
        if isinstance(path, Path):
            return pickled.write(staged, path)
        with TemporaryDirectory() as directory:
            info = pickled.write(staged, Path(directory) / "checkpoint")
            link(info.path, path)
        return info


def _unless_failed(save: Future[CommitInfo] | None, action: Callable[[], object]) -> None:
    """Call ``action``, unless the save that it follows has failed: a later one is not the file that it counts on."""
    if save is None or not save.done() or save.exception() is None:  # the future is not done during its own commit
        action()


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 - a sharded checkpoint of another strategy
        shutil.rmtree(path)
    else:
        remove(path)
    log.debug("removed an old checkpoint", path=path)


def _wait_for_ranks() -> None:
    """Hold all ranks until rank 0 has written its files, because all of them may read these next."""
    if world_size() > 1:
        on_device = distributed.get_backend() == "nccl"  # the only one that takes an index, and warns without one
        device = current_device()
        distributed.barrier(device_ids=[device.index] if on_device and device is not None else None)


# Lightning passes a CheckpointIO neither its trainer nor the names that ModelCheckpoint looks up or links. Hence three methods
# of its classes are wrapped while there is a plugin. For trainers without one they are unchanged.

_plugins: Final[set[int]] = set()  # the ids of all plugins
_joined: Final[dict[str, Callable[[], None]]] = {}  # the packages whose methods are wrapped; for each, what undoes it


def _join_lightning(plugin: TrainbusCheckpointIO) -> None:
    """Make the imported Lightning packages accept a plugin, for as long as it exists; import one if none is imported.

    Raises:
        ConfigurationError: no Lightning package is installed, or it lacks a name that the plugin uses.
    """
    names = [name for name in _PACKAGES if name in sys.modules] or [_installed()]
    for name in names:
        privates.check_plugin(name)
    _plugins.add(id(plugin))
    weakref.finalize(plugin, _leave_lightning, id(plugin)).atexit = False
    for name in names:
        if name in _joined:
            continue
        model_checkpoint = importlib.import_module(f"{name}.callbacks.model_checkpoint").ModelCheckpoint
        trainer = importlib.import_module(f"{name}.trainer.trainer").Trainer
        importlib.import_module(f"{_PACKAGES[name]}.plugins.io.checkpoint_io").CheckpointIO.register(TrainbusCheckpointIO)
        undo = ExitStack()
        undo.callback(setattr, trainer, "save_checkpoint", trainer.save_checkpoint)
        undo.callback(setattr, model_checkpoint, "file_exists", model_checkpoint.file_exists)
        trainer.save_checkpoint = _around_save(trainer.save_checkpoint)
        model_checkpoint.file_exists = _around_file_exists(model_checkpoint.file_exists)
        undo.callback(privates.replace_link(model_checkpoint, _around_link))
        _joined[name] = undo.close


def _leave_lightning(plugin: int) -> None:
    """Restore the methods once the last plugin is gone."""
    _plugins.discard(plugin)
    while _joined and not _plugins:
        _joined.popitem()[1]()


def _installed() -> str:
    for name in _PACKAGES:
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise ConfigurationError("TrainbusCheckpointIO needs Lightning: pip install 'trainbus[lightning]'")


def plugin_of(trainer: Any) -> TrainbusCheckpointIO | None:
    """Return the plugin of a trainer, if it has one."""
    plugin = privates.checkpoint_io(trainer)
    return plugin if isinstance(plugin, TrainbusCheckpointIO) else None


def _around_save(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def save_checkpoint(self: Any, filepath: Any, *arguments: Any, **options: Any) -> None:
        plugin = plugin_of(self)
        saves = 0 if plugin is None else plugin.saves
        original(self, filepath, *arguments, **options)
        if plugin is None:
            return
        plugin.saved_by = weakref.ref(self)
        if plugin.saves == saves and self.is_global_zero:
            log.warning(
                "this strategy writes checkpoints itself, so TrainbusCheckpointIO has no effect: remove the plugin",
                id="lightning-strategy-saves",
                strategy=type(self.strategy).__name__,
                path=str(filepath),
            )
        if self.state.stage is None:  # outside of fit(), the caller may read the file at once
            plugin.teardown()

    return save_checkpoint


def _around_file_exists(original: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(original)
    def file_exists(self: Any, filepath: Any, trainer: Any) -> bool:
        plugin = plugin_of(trainer)
        if plugin is None:
            return original(self, filepath, trainer)
        with privates.files_seen(self, partial(_Files, plugin)):
            return original(self, filepath, trainer)

    return file_exists


class _Files:
    """A file system with the files that are being written."""

    def __init__(self, plugin: TrainbusCheckpointIO, files: Any) -> None:
        self._plugin = plugin
        self._files = files

    def exists(self, path: Any) -> bool:
        return self._plugin.is_pending(os.fspath(path)) or bool(self._files.exists(path))


def _around_link(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        plugin = plugin_of(trainer)
        if plugin is None:
            original(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):  # noqa: PTH100 - links stay
            plugin.after_commit(partial(symlink, filepath, linkpath))
        trainer.strategy.barrier()

    return link_checkpoint
