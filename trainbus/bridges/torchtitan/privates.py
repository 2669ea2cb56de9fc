"""The undocumented names of torchtitan that this bridge uses. It documents none of its ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch

from trainbus.eventloop.privates import Names, check_names

TRAIN_STATE: Final = "train_state"
"""The key of the trainer's own counts in a checkpoint, which a checkpoint of the model alone lacks."""

_SEEN: Final = "0.3.0"
NAMES: Final[Names] = {
    "trainer.config.training.steps": ("host.py: the length of a training", _SEEN),
    "trainer.parallel_dims.pp_enabled": ("host.py: what is refused", _SEEN),
    "trainer.parallel_dims.spmd_backend": ("host.py: likewise", _SEEN),
    "trainer.parallel_dims.dp_shard": ("host.py: the number of ranks that train on different data", _SEEN),
    "trainer.model_parts": ("host.py: the models of a run", _SEEN),
    "trainer.optimizers.optimizers": ("host.py: the optimizers of a run", _SEEN),
    "trainer.lr_schedulers.schedulers": ("host.py: run.set_lr()", _SEEN),
    "trainer.gradient_accumulation_steps": ("host.py: the batches of a step", _SEEN),
    "trainer.step": ("host.py: where a training begins and ends", _SEEN),
    "trainer.should_continue_training": ("host.py: stops, and the saves that hooks request", _SEEN),
    "trainer.train_step": ("host.py: the end of a step", _SEEN),
    "trainer.forward_backward_step": ("host.py: one iteration", _SEEN),
    "trainer.metrics_processor.log": ("host.py: the gradient norm", _SEEN),
    "trainer.metrics_processor.log_validation": ("host.py: the metrics of a validation", _SEEN),
    "trainer.checkpointer.enable": ("host.py: whether torchtitan saves", _SEEN),
}
SAVING_NAMES: Final[Names] = {
    "checkpointer.dcp_save": ("checkpoints.py: add the state of the bus to a checkpoint", _SEEN),
    "checkpointer.dcp_load": ("checkpoints.py: read the state of the bus", _SEEN),
    "checkpointer.async_mode": ("checkpoints.py: whether saves are written beside the training", _SEEN),
    "checkpointer.save_future": ("checkpoints.py: the save that is being written", _SEEN),
    "checkpointer.staging_future": ("checkpoints.py: copies that are made beside the next passes", _SEEN),
    "checkpointer.stager": ("checkpoints.py: likewise", _SEEN),
    "checkpointer.states": ("manager.py: the model", _SEEN),
    "checkpointer.folder": ("checkpoints.py: find the newest checkpoint", _SEEN),
    "checkpointer.maybe_wait_for_saving": ("checkpoints.py: one save at a time", _SEEN),
    "checkpointer._flattened_model_states_sd": ("checkpoints.py: what a checkpoint holds", _SEEN),
    "checkpointer._states_to_load": ("checkpoints.py: what a resumed training loads", _SEEN),
    "storage._storage_setup": ("checkpoints.py: the names in a checkpoint", "torch 2.11.0 to 2.13.0"),
}
MANAGER_NAMES: Final[Names] = {
    f"manager.{name}": (f"manager.py: TrainbusCheckpointManager.{name}()", _SEEN)
    for name in ("dcp_save", "_load", "_wait_for_saving", "_close")
}


def check(trainer: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("torchtitan", "torchtitan", NAMES, trainer=trainer)
    if trainer.checkpointer.enable:
        check_names("torchtitan", "torchtitan", SAVING_NAMES, checkpointer=trainer.checkpointer, storage=_storage())


def check_manager(manager: type) -> None:
    """Raise ConfigurationError if the ``CheckpointManager`` of the installed version lacks a method that ours replaces."""
    check_names("torchtitan", "torchtitan", MANAGER_NAMES, manager=manager)


def models(checkpointer: Any) -> list[torch.nn.Module]:
    """Return the parts of the model."""
    found: list[torch.nn.Module] = checkpointer.states["model"].model
    return found


def states(checkpointer: Any) -> dict[str, Any]:
    """Return what a checkpoint of a training holds."""
    found: dict[str, Any] = checkpointer._flattened_model_states_sd()
    return found


def states_to_load(checkpointer: Any) -> dict[str, Any]:
    """Return what a resumed training loads."""
    found: dict[str, Any] = checkpointer._states_to_load(False)
    return found


def saved_in(checkpoint_id: str) -> Mapping[str, Any]:
    """Return the metadata of each entry of a checkpoint by its name."""
    found: Mapping[str, Any] = _storage()._storage_setup(None, checkpoint_id, reader=True).read_metadata().state_dict_metadata
    return found


def _storage() -> Any:
    return import_module("torch.distributed.checkpoint._storage_utils")
