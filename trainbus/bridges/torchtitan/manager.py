"""``TrainbusCheckpointManager``: torchtitan's checkpoints, each with its name only when it is complete. It needs no bus."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools import filesystem

from trainbus.bridges.torchtitan import privates
from trainbus.bridges.torchtitan.folders import FolderWriter
from trainbus.eventloop.checkpoint.overlap import own_part
from trainbus.eventloop.errors import ConfigurationError


class TrainbusCheckpointManager(CheckpointManager):  # type: ignore[misc]  # types of torchtitan are not looked at
    """torchtitan's ``CheckpointManager``, with saves that are complete, checked and durable before they have their names.

        checkpoint = TrainbusCheckpointManager.Config(enable=True, interval=500, async_mode="async")

    A folder is written under a temporary name. When all ranks have written, the first one compares its index with the sizes
    of its files, syncs it, and renames it to ``step-N``. A failure on one rank is an error on all. The files are those of
    torchtitan, which reads them without trainbus.

    Args:
        config: the options of ``CheckpointManager.Config``. With ``async_mode``, one checkpoint more than ``keep_latest_k``
            stays until the next save.
        parts: what a torchtitan ``Trainer`` gives to its checkpointer.

    Raises:
        ConfigurationError: the folder is a URL, or this version of torchtitan lacks a name.
    """

    save_future: Future[Any] | None

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The options of ``CheckpointManager.Config``."""

    def __init__(self, config: Config, **parts: Any) -> None:
        privates.check_manager(CheckpointManager)
        folder = filesystem.join(parts.get("base_folder", ""), config.folder)
        if config.enable and filesystem.is_remote(folder):
            raise ConfigurationError(
                f"{folder!r}: a store has no folders to rename; give a local directory that all ranks share, or name "
                "torchtitan's CheckpointManager in the configuration"
            )
        super().__init__(config, **parts)
        self.writer = FolderWriter()

    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode, *args: Any, **options: Any
    ) -> Any:
        """Write a checkpoint as torchtitan does, but give it its name at the end."""
        write, state = super().dcp_save, copied_buffers(self, state_dict, async_mode)
        return self.writer.write(
            Path(checkpoint_id), async_mode, lambda folder: write(state, folder, async_mode, *args, **options), replace=True
        )

    def _load(self, step: int = -1) -> bool:
        self.maybe_wait_for_saving()
        if not self.load_only:
            self.writer.ranks.do(f"cannot load from {self.folder}", lambda: self.writer.remove_leftovers(Path(self.folder)))
        loaded: bool = super()._load(step)
        return loaded

    def _wait_for_saving(self) -> None:
        """Wait for the last save, and raise its error once."""
        pending, self.save_future = self.save_future, None
        if pending is not None:
            pending.result()

    def _close(self) -> None:
        """Wait for the last save, too, which torchtitan does not."""
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()


def copied_buffers(manager: Any, state: dict[str, Any], mode: AsyncMode) -> dict[str, Any]:
    """Return what is saved, with copies of the model's buffers if the rest is copied during the next forward pass."""
    if mode is not AsyncMode.ASYNC_WITH_PINNED_MEM:
        return state
    buffers = {_storage(buffer) for model in privates.models(manager) for buffer in model.buffers()} - {0}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return state | {name: tensor.clone() for name, tensor in tensors.items() if _storage(tensor) in buffers}


def _storage(tensor: torch.Tensor) -> int:
    return int(own_part(tensor).untyped_storage().data_ptr())
