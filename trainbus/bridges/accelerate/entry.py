"""``Run(accelerator=...)``: the state of a run is saved with ``accelerator.save_state()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from trainbus.bridges.accelerate.privates import custom_objects_of
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.machine import ITERATION
from trainbus.eventloop.training.saves.contents import flat, gather_weights
from trainbus.eventloop.training.saves.restore import HOSTED, Restore
from trainbus.eventloop.training.schema import how_far

log = get_logger()


class AcceleratedLoop:
    """What a run asks of its ``accelerate.Accelerator``."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    @classmethod
    def of(cls, accelerator: Any) -> Self:
        """Return it for an accelerator."""
        return cls(accelerator)

    @property
    def window_open(self) -> bool:
        """True inside a window of ``accelerator.accumulate()``, before its step."""
        return not self._accelerator.sync_gradients

    @property
    def accumulation(self) -> int:
        """Iterations per optimizer step."""
        return int(self._accelerator.gradient_accumulation_steps)

    @property
    def precision(self) -> str | None:
        """Its mixed precision, if any."""
        mixed = self._accelerator.mixed_precision
        return None if mixed in ("no", None) else str(mixed)

    def join(self, run: Any, restore: Restore) -> None:
        """Add the state of a run to the checkpoints of the accelerator, replacing the state of its last run."""
        # In the accelerator and not in a table of ours: a copy of it has a copy of the entry.
        known = custom_objects_of(self._accelerator)
        entry = next((one for one in known if isinstance(one, AcceleratorEntry)), None)
        if entry is None:  # once, because Accelerate loads only folders with as many objects as are registered
            entry = AcceleratorEntry()
            self._accelerator.register_for_checkpointing(entry)
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
        self.run.checkpoints.gather_state(gathered)
        state: dict[str, Any] = gathered[HOSTED]
        del state["optimizer"]
        if _same_storage(state["state_dict"], flat(gather_weights(self.run.models))):
            del state["state_dict"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, now or when the run begins. Accelerate has loaded models and optimizers already."""
        if self.run is None:
            log.warning(
                "this is a copy of an accelerator, and has no run: call Run(accelerator=...) before load_state()",
                id="accelerator-is-copy",
            )
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
