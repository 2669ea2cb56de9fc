"""What of a DataLoader's state is in no ``state_dict``: its generators, the workers that outlive a pass, a count of passes.

Accelerate's loaders are no DataLoaders, but hold one as ``base_dataloader``, and pretend to be of its class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from eventloop.training.rng import get_rng_state, set_rng_state


def generator_states(loader: Iterable[Any], instead: Mapping[torch.Generator, torch.Tensor] = {}) -> list[torch.Tensor | None]:
    """States of the generators that a DataLoader and its samplers own; they are not part of the global RNG.

    Args:
        loader: any iterable; most own none.
        instead: states that some of them had, and that count.
    """
    owned = own_generators(loader)
    return [None if one is None else instead[one] if one in instead else one.get_state() for one in owned]


def set_generators(loader: Iterable[Any], states: list[torch.Tensor | None], but: Collection[torch.Generator] = ()) -> None:
    """Put back what :func:`generator_states` returned, but for some generators."""
    for generator, state in zip(own_generators(loader), states, strict=True):
        if generator is not None and state is not None and generator not in but:
            generator.set_state(state)


def has_workers(loader: Iterable[Any]) -> bool:
    """True if a DataLoader has workers from an earlier pass, and will not draw a seed for new ones."""
    return getattr(loader, "_iterator", None) is not None


def start_persistent_workers(loader: Iterable[Any]) -> None:
    """Have the workers that an uninterrupted run would have by now, so that later passes draw what they would have drawn."""
    if isinstance(loader, DataLoader) and loader.persistent_workers and not has_workers(loader):
        now, generators = get_rng_state(), generator_states(loader)
        iter(_held(loader))
        set_rng_state(now)
        set_generators(loader, generators)


def has_state(loader: Iterable[Any]) -> bool:
    """True if a loader tells its place and takes it back. Accelerate's claim to; what counts is the one that they hold."""
    return all(callable(getattr(_held(loader), name, None)) for name in ("state_dict", "load_state_dict"))


def passes_made(loader: Iterable[Any]) -> int | None:
    """How many passes one of Accelerate's loaders has counted: the order of the next one depends on it. None for others."""
    return getattr(loader, "iteration", None) if _held(loader) is not loader else None


def set_passes_made(loader: Any, count: int | None) -> None:
    """Put back what :func:`passes_made` returned."""
    if count is not None and _held(loader) is not loader:
        loader.iteration = count


def _held(loader: Iterable[Any]) -> Iterable[Any]:
    held: Iterable[Any] = getattr(loader, "base_dataloader", loader)
    return held


def own_generators(loader: Iterable[Any]) -> list[torch.Generator | None]:
    """The generators of a DataLoader and its samplers, in a fixed order: one may be there several times, or missing."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [getattr(owner, "generator", None) for owner in owners]
