"""What an event may know of the run that published it.

Events stand below the training package, so they name the run through this protocol and never through
:class:`eventloop.training.Run` itself (an import under ``TYPE_CHECKING`` would break msgspec's decoder).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import torch


class RunView(Protocol):
    """The run as its hooks see it. Safe from any thread: ``stop`` and ``checkpoint_now``; the rest from the training thread."""

    @property
    def model(self) -> torch.nn.Module:
        """The model, or the one under the key ``"model"`` of several."""

    @property
    def models(self) -> Mapping[str, torch.nn.Module]:
        """All models by name; a single one is named ``"model"``."""

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """All optimizers by name; a single one is named ``"optimizer"``."""

    @property
    def work_dir(self) -> Path | None:
        """Where files of this run go, if it has a place."""

    @property
    def device(self) -> torch.device:
        """Where batches are moved to."""

    @property
    def updated(self) -> bool:
        """True if an optimizer has stepped in the current iteration."""

    @property
    def info(self) -> MutableMapping[str, Any]:
        """Facts that hooks leave for each other: ``info["train/lr"]`` …; kept in checkpoints where they are plain values."""

    @property
    def scheduled(self) -> int | None:
        """Iterations this run is going to make in all, or None where that cannot be known."""

    def report(self, **scalars: Any) -> None:
        """Add entries to the current iteration's ``outputs``: numbers or 0-dim tensors, which stay on their device."""

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost open scope ends, however it ends; last registered, first called."""

    def stop(self, reason: str = "") -> None:
        """End the run at the next safe mount point."""

    def checkpoint_now(self) -> None:
        """Save at the next safe mount point."""

    def request_save(self, name: str, **options: Any) -> None:
        """Save under ``name`` once the last subscriber of the current mount point has run."""
