"""The checkpoints of torchtitan's ``CheckpointManager``, with the state of a bus in them, and others with names of hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager

from trainbus.bridges.hosted import TrainerHost
from trainbus.bridges.saves import TrainerSaver, Writing
from trainbus.bridges.torchtitan import privates
from trainbus.bridges.torchtitan.folders import FolderWriter, when_written
from trainbus.bridges.torchtitan.manager import TrainbusCheckpointManager, copied_buffers
from trainbus.bridges.torchtitan.rates import Rates
from trainbus.bridges.torchtitan.state import KEY, SplitEntry, restored, wanted
from trainbus.eventloop.checkpoint import (
    FORMER_PREFIX,
    STATE_FILE,
    TEMPORARY_PREFIX,
    AnyPath,
    as_path,
)
from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.training.saves.contents import gather_entry
from trainbus.eventloop.training.saves.requests import SaveRequest

Method = Callable[..., Any]
T = TypeVar("T")

_METADATA = ".metadata"
"""The file that DCP writes last into a checkpoint."""


class TitanCheckpoints:
    """Add the state of a run to what a ``CheckpointManager`` saves, and take it back from what it loads."""

    def __init__(self, manager: CheckpointManager, rates: Rates) -> None:
        self._manager: Any = manager
        self._rates = rates
        self._save: Method = self._manager.dcp_save
        own = isinstance(manager, TrainbusCheckpointManager)  # it renames folders itself
        self._writer = manager.writer if own else FolderWriter()
        self._plain_save = partial(CheckpointManager.dcp_save, manager) if own else self._save
        self._load: Method = self._manager.dcp_load
        self._loaded: tuple[str, Any] | None = None

    # -------------------------------------------------------------------------------------------------------- save

    def save(
        self, host: TrainerHost, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, *args: Any, **options: Any
    ) -> Any:
        """Replace ``dcp_save`` of the manager: one of its own saves."""
        filled, writing = self._filled(host, state_dict, checkpoint_id), host.saver.writing(as_path(checkpoint_id))
        return _reported(writing, async_mode, lambda: self._save(filled, checkpoint_id, async_mode, *args, **options))

    def write(self, host: TrainerHost, path: AnyPath) -> None:
        """Save a checkpoint that hooks have requested. It gets its name when it is complete and durable."""
        if not isinstance(path, Path):
            raise CheckpointError(f"cannot write {path}: in torchtitan, hooks save to local directories only")
        manager = self._manager
        manager.maybe_wait_for_saving()
        mode = _mode(manager, overlap=host.saver.staging == "overlap")
        filled = copied_buffers(manager, self._filled(host, privates.states(manager), str(path)), mode)
        files = {STATE_FILE: filled[KEY][f"rank_{host.run.rank}"]}  # of the first rank; also tells that the folder is ours
        write = partial(self._writer.write, path, mode, lambda folder: self._plain_save(filled, folder, mode), files=files)
        pending = _reported(host.saver.writing(path), mode, write)
        if mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            manager.staging_future, pending = pending.staging_completion, pending.upload_completion
        if mode is not AsyncMode.DISABLED:
            manager.save_future = pending

    def _filled(self, host: TrainerHost, state: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return what is saved, with the state of the bus, and weights that hooks replace."""
        entry, weights = host.gather_entry(path)
        replaced = {name: tensor for tensors in weights.values() for name, tensor in tensors.items() if name in state}
        filled = {**state, **{name: tensor.to(state[name].dtype) for name, tensor in replaced.items()}}
        if privates.TRAIN_STATE in state:  # else it is the model alone, at the end of a training
            filled[KEY] = entry.stored(host.run.rank, rates=self._rates.factors)
        return filled

    # -------------------------------------------------------------------------------------------------------- load

    def load(self, host: TrainerHost, original: Method, step: int = -1) -> tuple[bool, tuple[str, Any] | None]:
        """Replace ``load`` of the manager: also find checkpoints that hooks have requested.

        Return whether one was loaded, and its path and the state of the bus in it, if it is not one of the model alone.
        """
        self._loaded = None
        ranks = self._writer.ranks
        find = partial(self._newest, host) if step == -1 and ranks.first else lambda: None
        newest = ranks.from_first(ranks.do("cannot find the newest checkpoint", find))
        if newest is None:
            return original(step), self._loaded
        with torch.no_grad():
            self.dcp_load(host, privates.states_to_load(self._manager), newest, from_hf=False, from_quantized=False)
        return True, self._loaded

    def dcp_load(
        self, host: TrainerHost, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Replace ``dcp_load`` of the manager."""
        whole = privates.TRAIN_STATE in state_dict
        if whole and not from_hf:
            own, _ = host.gather_entry("")
            entry = wanted(privates.saved_in(checkpoint_id), host.run.rank, own.sharded)
            if entry is not None:
                state_dict[KEY] = entry
        self._load(state_dict, checkpoint_id, from_hf, from_quantized)
        if whole:
            filled = state_dict.pop(KEY, None)
            saved = None if filled is None else restored(filled)
            if saved is not None:
                self._rates.restore(saved["rates"])
            self._loaded = checkpoint_id, None if saved is None else saved["entry"]

    def _newest(self, host: TrainerHost) -> str | None:
        """Return the newest checkpoint, if it is one of hooks; None if it is one of the manager."""
        folders = {Path(one) for one in host.run.checkpointer.directories if isinstance(one, Path)}
        found = [one for folder in folders for one in folder.glob(f"*/{_METADATA}") if _is_checkpoint(one.parent)]
        own = [*Path(self._manager.folder).glob(f"step-*/{_METADATA}")] if "://" not in str(self._manager.folder) else []
        newest = max([*own, *found], key=lambda path: path.stat().st_mtime_ns, default=None)
        return str(newest.parent) if newest in found and newest is not None else None


def _is_checkpoint(folder: Path) -> bool:
    return (folder / STATE_FILE).is_file() and not folder.name.startswith((TEMPORARY_PREFIX, FORMER_PREFIX))


def _reported(writing: Writing, mode: AsyncMode, save: Callable[[], Any]) -> Any:
    """Make a save, and report it when it is complete; return what ``dcp_save`` returns."""

    def copied() -> Any:
        with writing.copying():
            return save()

    def finish(written: Callable[[], T]) -> T:
        with writing:
            return written()

    return when_written(mode, save if mode is AsyncMode.DISABLED else copied, finish)


def _mode(manager: Any, *, overlap: bool) -> AsyncMode:
    """Return how a checkpoint of hooks is written; prepare the manager for it."""
    if manager.async_mode is AsyncMode.DISABLED:
        return AsyncMode.DISABLED
    if not overlap:
        return AsyncMode.ASYNC
    if manager.stager is None:  # as torchtitan makes it for its own first save
        manager.stager = DefaultStager(StagingOptions())
    return AsyncMode.ASYNC_WITH_PINNED_MEM


class TitanSaver(TrainerSaver):
    """The saver of a run in a torchtitan ``Trainer``."""

    way_to_overlap = "set checkpoint.async_mode='async_with_pinned_mem', or leave out staging"

    def __init__(self, host: TrainerHost, manager: Any) -> None:
        super().__init__(host)
        self._manager = manager
        self.overlaps = manager.enable and manager.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM

    def check(self, request: SaveRequest) -> None:
        """Raise ConfigurationError also if the ``CheckpointManager`` is switched off."""
        super().check(request)
        if not self._manager.enable:
            raise ConfigurationError(
                "torchtitan saves nothing with checkpoint.enable=False, so no hook can save: set checkpoint.enable=True "
                "(with checkpoint.load_only=True, only hooks save)"
            )

    def rehearse(self, request: SaveRequest) -> list[str]:
        """Gather the state of the hooks; not the weights, for which ranks wait for each other, and this is for the first."""
        SplitEntry(gather_entry(self._run))
        return []
