"""Save the state of a run with ``accelerator.save_state()`` of Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainbus.eventloop.errors import CheckpointError, ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import custom_objects_of
from trainbus.eventloop.training.machine import ITERATION
from trainbus.eventloop.training.saves.contents import flat, gather_weights
from trainbus.eventloop.training.saves.restore import HOSTED, Restore
from trainbus.eventloop.training.schema import how_far

log = get_logger()


def register(accelerator: Any, run: Any, restore: Restore) -> None:
    """Add the state of a run to the checkpoints of an accelerator, replacing the state of its last run.

    Raises:
        ConfigurationError: the object is not an ``accelerate.Accelerator``.
    """
    if not (callable(getattr(accelerator, "register_for_checkpointing", None)) and hasattr(accelerator, "sync_gradients")):
        raise ConfigurationError(f"accelerator={accelerator!r}: give an accelerate.Accelerator")
    # In the accelerator and not in a table of ours: a copy of it has a copy of the entry.
    entry = next((one for one in custom_objects_of(accelerator) if isinstance(one, AcceleratorEntry)), None)
    if entry is None:  # once, because Accelerate loads only folders with as many objects as are registered
        entry = AcceleratorEntry()
        accelerator.register_for_checkpointing(entry)
    entry.run, entry.restore = run, restore


class AcceleratorEntry:
    """The state of the last run with an accelerator, as an object of its checkpoints.

    Accelerate saves and loads models and optimizers. The entry has weights only if a hook replaces them (``EMAHook``).
    """

    run: Any = None
    """The run; None in a copy of the accelerator, until a run gets it."""
    restore: Restore

    def __reduce__(self) -> str | tuple[Any, ...]:
        return AcceleratorEntry, ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run; in the body of ``run.train()``, end the current iteration first."""
        if self.run is None:
            return {}
        self.run.state.check_open("accelerator.save_state()")
        if self.run.state.machine.innermost is ITERATION:
            self.run.drive().end_iteration()
        gathered: dict[str, Any] = {}
        self.run.gather_state(gathered)
        state: dict[str, Any] = gathered[HOSTED]
        del state["optimizer"]
        if _same_storage(state["state_dict"], flat(gather_weights(self.run.models))):
            del state["state_dict"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, now or when the run begins. Accelerate has loaded models and optimizers already."""
        if self.run is None:
            log.warning("this is a copy of an accelerator, and has no run: call Run(accelerator=...) before load_state()")
            return
        if not how_far(state):
            raise CheckpointError("accelerator.load_state(): the folder has no state of a trainbus run")
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.run.optimizers.items()}
        weights = flat(gather_weights(self.run.models))
        self.restore.begin_with({HOSTED: {"state_dict": weights, **state, "optimizer": optimizers}})


def _same_storage(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_storage(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return bool(one == other)
