"""How far a run has come: the counters behind the frozen ``Progress`` snapshots, and what comes next after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from eventloop.events import Progress, Stage

_IN_ORDER = ("iter", "epoch", "validations", "tests")
"""What orders the states of a run. Iterations first: the other counts move between two of them."""

Phase = Literal["train", "val"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Counters(msgspec.Struct):
    """The counts of a run. ``phase`` says what a resumed run does first: go on training, or validate.

    ``batches`` counts training batches used up in the current pass over the loader, ``validations`` and ``tests`` the passes
    that have ended.
    """

    epoch: Count = 0
    iter: Count = 0
    update: Count = 0
    batches: Count = 0
    validations: Count = 0
    tests: Count = 0
    max_epochs: int | None = None
    max_iters: int | None = None
    phase: Phase = "train"

    def snapshot(self, stage: Stage = "train", batch_idx: int | None = None) -> Progress:
        """Return the frozen form that events carry."""
        return Progress(
            epoch=self.epoch,
            iter=self.iter,
            update=self.update,
            batch_idx=self.batches if batch_idx is None else batch_idx,
            validation=self.tests if stage == "test" else self.validations,
            max_epochs=self.max_epochs,
            max_iters=self.max_iters,
            stage=stage,
        )

    def state_dict(self) -> dict[str, int | str]:
        """Return what a checkpoint keeps; the limits are not in it, so that a resumed run may go further."""
        kept = ("epoch", "iter", "update", "batches", "validations", "tests", "phase")
        return {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Take back what :meth:`state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)


def how_far(state: Any) -> tuple[int, ...]:
    """Return how far the run of a checkpoint had come, for comparison; () for another kind of file."""
    progress = state.get("progress") if isinstance(state, Mapping) else None
    if not isinstance(progress, Mapping):
        return ()
    counts = [progress.get(name, 0) for name in _IN_ORDER]
    return tuple(counts) if all(type(count) is int for count in counts) else ()
