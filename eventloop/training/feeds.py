"""The loaders that a run has been given, and the place in the training data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from eventloop.training.data import Feed


class Feeds:
    """The feed of the training data, kept from epoch to epoch, and the one of the last validation or test.

    Args:
        device: where batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self.train: Feed | None = None
        self.evaluated: Feed | None = None
        self._device = device
        self._place: Mapping[str, Any] | None = None

    def for_training(self, loader: Iterable[Any]) -> Feed:
        """Return the feed of ``loader``: the one it had, or one that goes on where a resumed run has to."""
        if self.train is None or self.train.loader is not loader:
            self.train = Feed(loader, self._device)
            if self._place is not None:
                self.train.load_state_dict(self._place)
                self._place = None
        return self.train

    def for_evaluation(self, loader: Iterable[Any], name: str) -> Feed:
        """Return a new feed of ``loader``, which errors call ``name``."""
        self.evaluated = Feed(loader, self._device, name)
        return self.evaluated

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the place in the training data; None before the first epoch."""
        if self._place is not None:
            return self._place  # resumed, and not come to training yet
        return None if self.train is None else self.train.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Have the next feed for training go on at this place."""
        self._place = state

    def forget(self) -> None:
        """Let go of the training data, when the run ends."""
        # A run is a cycle of references. Were a DataLoader with persistent workers collected as part of one, its queues would
        # end before its iterator, and torch would wait 5 s for each of the workers.
        self.train = None
