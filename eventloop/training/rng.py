"""Random numbers: the generators of a process and of its loaders, and the epoch of datasets and samplers."""

from __future__ import annotations

import random
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Final, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainbus.eventloop.checkpoint import packed
from trainbus.eventloop.device import random_states_of_devices, seed_devices, set_random_states_of_devices
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.privates import workers_of
from trainbus.eventloop.training.schema import SavedStart

_PARTS: Final = 500  # objects of a loader that are looked at
_HELD: Final = 64  # attributes or values of each: one with more is data


def checked_seed(seed: int) -> int:
    """Return the seed, or raise ConfigurationError if torch does not accept it."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ConfigurationError(f"seed={seed!r}: give a 64-bit integer")
    return seed


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def reseed(seed: int) -> None:
    """Seed what :func:`seed_everything` has seeded, in a tenth of the time: ``torch.manual_seed`` asks each kind of device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    seed_devices(seed)


def get_rng_state() -> dict[str, Any]:
    """Return the states of all global generators in types that a checkpoint can hold."""
    state: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    return state | random_states_of_devices()


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states of :func:`get_rng_state`; an accelerator's for each device, by index, that is here."""
    random.setstate(_for_python(state["python"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    set_random_states_of_devices({kind: states for kind, states in state.items() if kind not in ("python", "numpy", "torch")})


def other_rng_state(state: Mapping[str, Any] | None, rank: int) -> Mapping[str, Any] | None:
    """Derive the random states of ``rank`` from the states of rank 0."""
    if state is None:
        return None
    now = get_rng_state()
    try:
        set_rng_state(state)
        seed_everything(int(torch.randint(2**31, ())) + rank)
        return get_rng_state()
    finally:
        set_rng_state(now)


Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def own_generators(loader: Iterable[Any]) -> list[Generator | None]:
    """Return the generators of a loader and its samplers in a fixed order, with repeats, and None where one is missing.

    First their ``generator``, then those in other attributes, such as a sampler's ``rng``, then :func:`generators_within`.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    usual = [getattr(owner, "generator", None) for owner in owners]
    others = [value for owner in owners for name, value in _attributes(owner).items() if name != "generator"]
    found = [one if is_generator(one) else None for one in usual] + [one for one in others if is_generator(one)]
    return found + [one for one in generators_within(loader) if one not in found]


def generators_within(loader: Iterable[Any]) -> list[Generator]:
    """Return the generators of :func:`samplers_within`."""
    return [value for one in samplers_within(loader) for value in _attributes(one).values() if is_generator(value)]


def samplers_within(loader: Iterable[Any]) -> list[Sampler[Any]]:
    """Return the samplers in the parts of a loader that is no DataLoader, such as torchdata's nodes, in a fixed order.

    To continue a pass, such a loader draws its order again from the beginning.
    """
    found: list[Sampler[Any]] = []
    seen, parts, private = {id(loader)}, deque[Any]([loader]), deque[Any]()
    while (parts or private) and len(seen) < _PARTS and not isinstance(loader, DataLoader):
        part = (parts or private).popleft()  # private attributes last: a pass may change them, and so the order
        if isinstance(part, Sampler):
            found.append(part)
            continue
        held = dict(enumerate(part)) if isinstance(part, (list, tuple)) else _attributes(part)
        for name, value in held.items() if len(held) <= _HELD else ():
            if id(value) not in seen and (isinstance(value, (list, tuple, dict)) or hasattr(value, "__dict__")):
                seen.add(id(value))
                (private if str(name).startswith("_") else parts).append(value)
    return found


def _attributes(owner: object) -> Mapping[str, Any]:
    held: Mapping[str, Any] = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    return held


def is_generator(value: object) -> bool:
    """Return True for a generator of random numbers that has a state."""
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def generator_states(loader: Iterable[Any], instead: Mapping[Generator, Any] = {}) -> list[Any]:
    """Return the states of the generators that a DataLoader and its samplers own; ``instead`` replaces current ones."""
    owned = own_generators(loader)
    return [None if one is None else instead[one] if one in instead else state_of(one) for one in owned]


def set_generators(loader: Iterable[Any], states: Sequence[Any], but: Collection[Generator] = ()) -> None:
    """Restore the result of :func:`generator_states`, except for the generators in ``but``. A file of 0.2 has fewer of them."""
    for generator, state in zip(own_generators(loader), states, strict=False):
        if generator is not None and state is not None and generator not in but:
            set_state_of(generator, state)


def drawn_since(loader: Iterable[Any], before: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    """Return those of ``states`` whose generators have drawn numbers since ``before``, and None for the others."""
    now = generator_states(loader)
    return [None if packed(old) == packed(new) else state for old, new, state in zip(before, now, states, strict=False)]


def state_of(generator: Generator) -> Any:
    """Return the state of a generator in types that a checkpoint can hold."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _python_state(generator.getstate())
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state_of(generator: Generator, state: Any) -> None:
    """Restore the result of :func:`state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(_for_python(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _python_state(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, words, gauss = state
    # One array instead of 625 Python integers, which would take longer to save than the weights.
    return version, np.frombuffer(array("I", words), np.uint32), gauss  # in half the time of np.array(words)


def _for_python(state: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss


def random_states(loader: Iterable[Any]) -> SavedStart:
    """Return the states of all global generators and of those that ``loader`` owns, and whether its workers are running."""
    return SavedStart(get_rng_state(), generator_states(loader), has_workers(loader))


def set_random_states(loader: Iterable[Any], states: SavedStart) -> None:
    """Restore the random states in the result of :func:`random_states`."""
    set_rng_state(states.rng)
    set_generators(loader, states.generators)


def has_workers(loader: Iterable[Any]) -> bool:
    """Return True if persistent workers are running, so that the next pass draws no seed for new ones."""
    return workers_of(loader) is not None


class SeededDataset(Dataset[Any]):
    """Make a dataset's random augmentation a function of (seed, epoch, index), so that a resume repeats it.

    Each ``dataset[index]`` seeds the global generators of Python, numpy and torch (CPU) and restores them afterwards. The run
    calls ``set_epoch`` on each SeededDataset of its training loader, also inside wrappers (``Subset``, ``ConcatDataset``,
    your own). It searches attributes: call ``set_epoch`` yourself if only a closure holds the dataset.

    Other attributes are those of the dataset (``classes``, ``collate_fn``, ``state_dict`` …).

    Args:
        dataset: a map-style dataset.
        seed: the seed of the run.

    Raises:
        ConfigurationError: the seed is not a 64-bit integer.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, SeededDataset]] = weakref.WeakValueDictionary()
    """By id, because a subclass may have no hash, or be equal to another."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the instance here, because copies are made without ``__init__``."""
        new = super().__new__
        made = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        SeededDataset._all[id(made)] = made
        return made

    def __init__(self, dataset: Dataset[Any], seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = checked_seed(seed)
        # In shared memory: persistent workers must see the next epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch: unannotated
        # For StatefulDataLoader, which asks by isinstance for a protocol; from Python 3.12 on, that calls no __getattr__.
        for name in ("state_dict", "load_state_dict"):
            if not hasattr(type(self), name) and callable(method := getattr(dataset, name, None)):
                setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset, such as ``classes`` or ``collate_fn``."""
        # A copy has no dataset at first. Special methods such as __getitems__ would read samples without the seed.
        if "dataset" in vars(self) and not (name.startswith("__") and name.endswith("__")):
            return getattr(self.dataset, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the random numbers depend on; the run calls this."""
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
    """Call ``set_epoch`` on each :class:`SeededDataset` of a loader; a hook does it for samplers."""
    for dataset in _seeded_in(loader):
        dataset.set_epoch(epoch)


def is_seeded(dataset: Any) -> bool:
    """Return whether a dataset is a :class:`SeededDataset`, or has one in it."""
    return any(True for _ in _seeded_in(dataset))


def _seeded_in(data: Any) -> Iterator[SeededDataset]:
    """Search the attributes of every object that can be iterated or indexed, as wrappers of data can."""
    if not SeededDataset._all:
        return  # the usual case: the search would look at each sample of a dataset that is a list
    seen: set[int] = set()
    waiting: list[Any] = [data]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or not (hasattr(type(thing), "__getitem__") or hasattr(type(thing), "__iter__")):
            continue
        seen.add(id(thing))
        if isinstance(thing, SeededDataset):
            yield thing
        state: Any = object.__getstate__(thing)  # a dict of attributes, or a pair of that and a dict of slots
        for value in chain(*(part.values() for part in (state if isinstance(state, tuple) else (state,)) if part)):
            if isinstance(value, list | tuple):
                waiting += value
            else:
                waiting += value.values() if isinstance(value, dict) else [value]


def set_sampler_epoch(loader: Iterable[Any] | None, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on the first object that has it.

    The order: the loader itself, its ``sampler``, its ``batch_sampler``'s sampler, its ``batch_sampler``.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(epoch)
            return
