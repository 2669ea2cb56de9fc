"""The loaders that a run has been given, and the place in the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from eventloop.training.data import Feed
from eventloop.training.distributed.launch import warn_if_all
from eventloop.training.loader_state import (
    generator_states,
    has_workers,
    own_generators,
    passes_made,
    set_generators,
    set_passes_made,
    start_persistent_workers,
)


class Feeds:
    """The feed of the training data, kept from epoch to epoch, and the one of the last validation or test.

    Args:
        device: where batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self.train: Feed | None = None
        self.evaluated: Feed | None = None
        self._device = device
        self._evaluated: list[Iterable[Any]] = []  # loaders of validations and tests, in the order of their first use
        self._place: Mapping[str, Any] | None = None
        self._places: list[Mapping[str, Any]] = []  # of such loaders, from the checkpoint
        # Each is put back once: two loaders may share one, and what has drawn from it must not draw the same again.
        self._restored: set[torch.Generator] = set()

    def for_training(self, loader: Iterable[Any]) -> Feed:
        """Return the feed of ``loader``: the one it had, or one that goes on where a resumed run has to."""
        if self.train is None or self.train.loader is not loader:
            self.train = Feed(loader, self._device)
            warn_if_all(loader, "train_data")
            if self._place is not None:
                self.train.load_state_dict(self._place, self._restored)
                self._note(loader)
                self._place = None
        return self.train

    def for_evaluation(self, loader: Iterable[Any], name: str) -> Feed:
        """Return a new feed of ``loader``, which errors call ``name``."""
        self.evaluated = Feed(loader, self._device, name)
        if not any(known is loader for known in self._evaluated):
            self._evaluated.append(loader)
            warn_if_all(loader, name)
            self._restore(loader, self._places[len(self._evaluated) - 1 :])
        return self.evaluated

    def state_dict(self, *, validating: bool) -> Mapping[str, Any] | None:
        """Return the place in the data; None before the first epoch and the first validation.

        Args:
            validating: whether it is to be the one that the validation under way began with.
        """
        began = self.evaluated.start if validating and self.evaluated is not None else None
        instead: dict[Any, Any] = {}
        if began is not None and self.evaluated is not None:
            instead = dict(zip(own_generators(self.evaluated.loader), began["generators"], strict=True))
        place: Mapping[str, Any] = self._place or {}  # resumed, and not come to training yet
        if self.train is not None:
            place = self.train.state_dict(instead)
        evaluated: list[Mapping[str, Any]] = [
            {
                "generators": generator_states(loader, instead),
                "workers": has_workers(loader),
                "counted": passes_made(loader),
            }
            for loader in self._evaluated
        ]
        if began is not None and self.evaluated is not None:
            now = next(index for index, loader in enumerate(self._evaluated) if loader is self.evaluated.loader)
            evaluated[now] = {**evaluated[now], "workers": began["workers"]}
        evaluated += self._places[len(evaluated) :]
        return {**place, "evaluated": evaluated} if place or evaluated else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Have the next feeds go on at this place."""
        state = state or {}
        self._place = state if "used" in state else None
        self._places = list(state.get("evaluated", ()))

    def forget(self) -> None:
        """Let go of the data, when the run ends."""
        # A run is a cycle of references. Were a DataLoader with persistent workers collected as part of one, its queues would
        # end before its iterator, and torch would wait 5 s for each of the workers.
        self.train = None
        self._evaluated.clear()

    def _restore(self, loader: Iterable[Any], places: list[Mapping[str, Any]]) -> None:
        if places:
            if places[0]["workers"]:
                start_persistent_workers(loader)
            set_passes_made(loader, places[0].get("counted"))  # not in older checkpoints
            set_generators(loader, places[0]["generators"], self._restored)
            self._note(loader)

    def _note(self, loader: Iterable[Any]) -> None:
        self._restored.update(generator for generator in own_generators(loader) if generator is not None)
