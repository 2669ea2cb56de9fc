"""The callback of a copied ``lightning.Trainer`` in the place of its bridge."""

from __future__ import annotations

from typing import Any

from eventloop.bridges.copies import Unattached


class UnattachedCallback(Unattached):
    """Tells once that the copy has no bus; else it does nothing."""

    # Not the key of the bridge: Lightning warns if a checkpoint has the state of a callback that the trainer does not have.
    state_key = _legacy_state_key = "trainbus (copied without a bus)"

    def __getattr__(self, name: str) -> None:
        # Lightning looks up every method of a callback, and skips methods that are not callable.
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Tell that the copy has no bus."""
        if stage == "fit":
            self.tell(trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Do nothing."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Do nothing."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Do nothing."""
