"""What of a DataLoader's state is in no ``state_dict``: its generators, and the workers that outlive a pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from eventloop.training.rng import get_rng_state, set_rng_state


def generator_states(loader: Iterable[Any]) -> list[torch.Tensor | None]:
    """States of the generators that a DataLoader and its samplers own; they are not part of the global RNG."""
    return [None if generator is None else generator.get_state() for generator in _own_generators(loader)]


def set_generators(loader: Iterable[Any], states: list[torch.Tensor | None]) -> None:
    """Put back what :func:`generator_states` returned."""
    for generator, state in zip(_own_generators(loader), states, strict=True):
        if generator is not None and state is not None:
            generator.set_state(state)


def has_workers(loader: Iterable[Any]) -> bool:
    """True if a DataLoader has workers from an earlier pass, and will not draw a seed for new ones."""
    return getattr(loader, "_iterator", None) is not None


def start_persistent_workers(loader: Iterable[Any]) -> None:
    """Have the workers that an uninterrupted run would have by now, so that later passes draw what they would have drawn."""
    if isinstance(loader, DataLoader) and loader.persistent_workers and not has_workers(loader):
        now = get_rng_state()
        iter(loader)
        set_rng_state(now)


def _own_generators(loader: Iterable[Any]) -> list[torch.Generator | None]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [getattr(owner, "generator", None) for owner in owners]
