"""Random numbers: the global generators of a process, and datasets and samplers that draw by seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from eventloop.errors import ConfigurationError


def checked_seed(seed: int) -> int:
    """Return the seed; raises ConfigurationError for one that torch does not take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ConfigurationError(f"seed={seed!r}: give an integer of 64 bits")
    return seed


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_rng_state() -> dict[str, Any]:
    """Return the states of all global generators, in a form that a checkpoint can hold."""
    version, words, gauss = random.getstate()
    # 625 Python integers as one array: a checkpoint has this twice, and would take longer over them than over the weights.
    state = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch: unannotated
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`get_rng_state` returned; CUDA states only where as many devices are there."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def other_rng_state(state: Mapping[str, Any] | None, rank: int) -> Mapping[str, Any] | None:
    """Return random states for ``rank`` that follow from those of rank 0, and differ from them."""
    if state is None:
        return None
    now = get_rng_state()
    try:
        set_rng_state(state)
        seed_everything(int(torch.randint(2**31, ())) + rank)
        return get_rng_state()
    finally:
        set_rng_state(now)


class SeededDataset(Dataset[Any]):
    """Makes a dataset's random augmentation a function of (seed, epoch, index), so that it survives a resume.

    Around each ``dataset[index]`` the global random states of Python, numpy and torch (CPU) are seeded and put back. A run
    tells the epoch to each that its training loader holds, also in other datasets around it (``Subset``, ``ConcatDataset``,
    your own). It looks at attributes, so one that only a closure holds needs ``set_epoch`` from you.

    Args:
        dataset: a map-style dataset.
        seed: of the run.

    Raises:
        ConfigurationError: the seed is not an integer of 64 bits.
    """

    def __init__(self, dataset: Dataset[Any], seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = checked_seed(seed)
        # In shared memory: workers that persist over epochs must hear of the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch: unannotated

    def set_epoch(self, epoch: int) -> None:
        """Use other random numbers in another epoch; a run calls it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset declares no length, map-style ones have one

    def __getitem__(self, index: int) -> Any:
        state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = np.random.SeedSequence([self.seed % 2**64, int(self._epoch), index]).generate_state(2)
        random.seed(int(seed[0]))
        np.random.seed(int(seed[1]))
        torch.default_generator.manual_seed(int(seed[0]) << 32 | int(seed[1]))
        try:
            return self.dataset[index]
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])
            torch.set_rng_state(state[2])


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tell each :class:`SeededDataset` of a loader which epoch it is, however it is wrapped; samplers are a hook's business."""
    for dataset in _seeded(loader):
        dataset.set_epoch(epoch)


def _seeded(loader: Iterable[Any]) -> Iterator[SeededDataset]:
    """Find them among the attributes of what can be iterated or indexed: a wrapper of data is one of these."""
    seen: set[int] = set()
    waiting: list[Any] = [loader]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or not (hasattr(type(thing), "__getitem__") or hasattr(type(thing), "__iter__")):
            continue
        seen.add(id(thing))
        if isinstance(thing, SeededDataset):
            yield thing
        for value in _attributes(thing):
            if isinstance(value, list | tuple):
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
            else:
                waiting.append(value)


def _attributes(thing: object) -> list[Any]:
    state: Any = object.__getstate__(thing)  # a dict of attributes, in a pair with one of slots where there are some
    return [value for part in (state if isinstance(state, tuple) else (state,)) if part for value in part.values()]


def set_sampler_epoch(loader: Iterable[Any] | None, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on the sampler of a loader, if it has one that takes it.

    A loader with ``set_epoch`` (Accelerate's) tells its sampler itself. Else it is the loader's ``sampler``, else its
    ``batch_sampler``'s, else the ``batch_sampler`` itself.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(epoch)
            return
