"""Loaders and samplers: restore state that ``state_dict`` lacks (generators, workers, number of passes), and skip batches.

The loaders of libraries that prepare a loop hold a DataLoader as ``base_dataloader`` and fake its class.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import starts_own_workers
from trainbus.eventloop.training.rng import (
    Generator,
    get_rng_state,
    has_workers,
    is_seeded,
    own_generators,
    random_states,
    set_generators,
    set_random_states,
    set_rng_state,
)
from trainbus.eventloop.training.schema import SavedLoader, SavedPosition
from trainbus.eventloop.training.worker_signals import starting_workers

_LARGEST: Final = 2**25  # bytes of a sampler that are compared
_COMPARED: Final = 256  # indices, or batches of them

log = get_logger()


def length_of(loader: Any) -> int | None:
    """Return the length of a loader or sampler; None if it is unknown or an estimate."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None  # its length is an estimate
    try:
        return len(loader)
    except TypeError:
        return None


def has_one_pass(data: object) -> bool:
    """Return True for a generator, ``zip(...)`` and the like, which yield their values once.

    A class of the user's own may begin anew in an ``__iter__`` that returns the object itself.
    """
    if not isinstance(data, Iterator):
        return False
    code = getattr(type(data).__iter__, "__code__", None)
    return code is None or code.co_code == _returns_self.__code__.co_code


def _returns_self(self: Any) -> Any:
    return self


def start_persistent_workers(loader: Iterable[Any]) -> None:
    """Start persistent workers as in an uninterrupted run, so that later passes make the same random draws."""
    if isinstance(loader, DataLoader) and loader.persistent_workers and not has_workers(loader):
        before = random_states(loader)
        iter(_held(loader))
        set_random_states(loader, before)


def has_state(loader: Iterable[Any]) -> bool:
    """Return True if the loader (inside its wrapper, if any) has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(_held(loader), name, None)) for name in ("state_dict", "load_state_dict"))


def stateful_part(loader: Any) -> Any:
    """Return what has the state of the position in the data: the loader, or its sampler; None without one."""
    if has_state(loader):
        return loader
    return stateful_sampler(loader) if is_plain(loader) else None


def sampler_epoch(loader: Any) -> int | None:
    """Return the epoch of the loader's sampler, as ``set_epoch`` sets it; None if it has none."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler)
    found = next((one for one in samplers if callable(getattr(one, "set_epoch", None))), None)
    epoch = getattr(found, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def restore_loader(loader: Any, saved: SavedLoader, restored: set[Generator], *, workers: bool) -> None:
    """Make the next pass continue a saved run's, except for generators in ``restored`` (loaders may share one)."""
    with starting_workers(loader):
        _restore_loader(loader, saved, restored, workers=workers)


def _restore_loader(loader: Any, saved: SavedLoader, restored: set[Generator], *, workers: bool) -> None:
    if workers:
        start_persistent_workers(loader)
    position = saved if isinstance(saved, SavedPosition) else None
    if saved.counted is not None and _held(loader) is not loader:
        loader.iteration = saved.counted
    part: Any = None if position is None or position.loader is msgspec.UNSET else stateful_part(loader)
    own = part is not None
    if position is None or not (position.used and own) or position.samples is not None:
        set_generators(loader, saved.generators, restored)
    elif position.start is not None:  # a loader whose state has none of its generators draws the order of the pass again
        set_generators(loader, position.start.generators, restored)
    if position is not None and own:
        if part is loader:
            loader.load_state_dict(position.loader)
        else:
            over = position.used in (0, position.length) and not position.left
            load_sampler(part, position.loader, loader.dataset, between_passes=over)
        if position.left:
            _leave_pass(loader, position, restored)
    restored.update(filter(None, own_generators(loader)))


def _leave_pass(loader: Any, saved: SavedPosition, restored: set[Generator]) -> None:
    """Read the batch at which the saved run left a pass, so that the loader begins a new pass next."""
    now = get_rng_state()
    for _ in islice(iter(loader), 1):
        pass
    set_rng_state(now)
    set_generators(loader, saved.generators, restored)


def _held(loader: Iterable[Any]) -> Iterable[Any]:
    held: Iterable[Any] = getattr(loader, "base_dataloader", loader)
    return held


def rebuilt(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Return a DataLoader of the same dataset; ``changed`` must hold all sampling options."""
    parts = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "in_order")
    kept = {part: getattr(loader, part) for part in ("dataset", *parts, "generator", "prefetch_factor")}
    return DataLoader(**(kept | changed))


def is_plain(loader: Iterable[Any]) -> bool:
    """Return True for a DataLoader that makes batches as torch's own does: a subclass may change them."""
    kind: Any = type(loader)
    plain = isinstance(loader, DataLoader) and kind.__iter__ is DataLoader.__iter__
    return plain and not starts_own_workers(kind)


def skip_batches(loader: Iterable[Any], used: int, again: Callable[[], None] | None = None) -> Iterator[Any]:
    """Return an iterator over ``loader`` without its first ``used`` batches, making the same random draws.

    A map-style DataLoader loads no skipped samples. Batches of other loaders are read and dropped, with a warning. ``again``
    restores the random states of the pass's start, if that pass drew no seed for its workers.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and is_plain(loader):
        return _skip_by_index(loader, used, again)
    if isinstance(loader, list | tuple | range | torch.Tensor | np.ndarray):
        return iter(loader[used:])
    if isinstance(loader, Sequence):
        return (loader[index] for index in range(used, len(loader)))
    warnings.warn(
        f"resuming reads and drops {used} batches, because {type(loader).__name__} has no state_dict and cannot skip; it "
        "draws the random numbers of these batches again",
        RuntimeWarning,
        stacklevel=2,
    )
    iterator = iter(loader)
    for _ in islice(iterator, used):
        pass
    return iterator


def _skip_by_index(loader: DataLoader[Any], used: int, again: Callable[[], None] | None) -> Iterator[Any]:
    if loader.num_workers and not is_seeded(loader.dataset):
        log.info(
            "the epoch goes on; if its samples draw random numbers, the workers draw other ones than without the interruption: "
            "SeededDataset(dataset, seed) repeats them"
        )
    batched = loader.batch_sampler is not None
    sampler = _SkippingSampler(loader.batch_sampler if batched else loader.sampler, used, again)
    sampling: dict[str, Any] = {"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": None}
    iterator = iter(rebuilt(loader, **sampling))
    # Without workers the iterator has not drawn indices yet; it must before the caller restores the present RNG state.
    sampler.skip()
    return iterator


class _SkippingSampler(Iterator[Any]):
    """Yield the indices of a sampler after the first ``used``; it draws after the loader, as in the first run."""

    def __init__(self, sampler: Any, used: int, again: Callable[[], None] | None) -> None:
        self._iterator = iter(sampler)
        self._left = used
        self._again = again

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Draw and drop the first ``used`` indices, once."""
        again, self._again = self._again, None
        if again is not None:
            again()
        for _ in islice(self._iterator, self._left):
            pass
        self._left = 0


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a map-style DataLoader, the outermost first."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return []
    batch_sampler = loader.batch_sampler
    return [loader.sampler] if batch_sampler is None else [batch_sampler, getattr(batch_sampler, "sampler", None)]


def takes_state(thing: object) -> bool:
    """Return True if an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def stateful_sampler(loader: Iterable[Any]) -> Any:
    """Return the sampler with a state that is the position in the data; None without one.

    With workers a sampler is ahead of the batches, so its state is not their position.
    """
    if getattr(loader, "num_workers", 0):
        return None
    return next(filter(takes_state, samplers_of(loader)), None)


def load_sampler(sampler: Any, state: Any, dataset: Any, *, between_passes: bool) -> None:
    """Give a sampler its saved state. ``between_passes``: its next pass is a new one, not the rest of the last."""
    sampler.load_state_dict(state)
    if not between_passes:
        return
    now = get_rng_state()
    try:
        # A sampler may take the state as that of a pass that has nothing left, and needs to be asked for that.
        probe = copy.deepcopy(sampler, {id(dataset): dataset})
        if not any(True for _ in islice(iter(probe), 1)):
            for _ in sampler:
                pass
    except (TypeError, RuntimeError, NotImplementedError) as error:
        log.debug("a sampler cannot be copied", error=str(error))
    finally:
        set_rng_state(now)


class SamplerWatch:
    """Warn of a sampler whose order depends on a state that no checkpoint has."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        samplers = samplers_of(loader)
        known = stateful_sampler(loader) is not None or any(callable(getattr(one, "set_epoch", None)) for one in samplers)
        self._watched = [] if known else [one for one in samplers if _is_own(one)]
        self._first: list[bytes | None] | None = None

    def begin_pass(self) -> None:
        """Before the second pass, look whether samplers as they were before the first would draw the same order."""
        if not self._watched:
            return
        now = [self._attributes(one) for one in self._watched]
        first, self._first = self._first, now
        if first is None:
            return
        watched, self._watched, self._first = self._watched, [], None
        for sampler, before, after in zip(watched, first, now, strict=True):
            if before and after and before != after and self._order(sampler, before) != self._order(sampler, after):
                log.warning(
                    "the order of this sampler depends on attributes that checkpoints do not hold, so a resumed run gets other "
                    "data from its second epoch on; give it set_epoch(epoch), or let the order come from an attribute that is "
                    "a generator, or, in a loader without workers, give it state_dict() and load_state_dict()",
                    id="sampler-order-lost",
                    sampler=type(sampler).__name__,
                )

    def _kept(self, sampler: Any) -> dict[int, Any]:
        """Return what copies of a sampler share: data, and the generators that checkpoints hold."""
        shared = [self._loader.dataset, getattr(sampler, "data_source", None), *own_generators(self._loader)]
        return {id(one): one for one in shared if one is not None}

    def _attributes(self, sampler: Any) -> bytes | None:
        """Return the attributes of a sampler as bytes; None if they cannot be copied, or are large."""
        kept, file = self._kept(sampler), _Bounded()

        class Pickler(pickle.Pickler):
            def persistent_id(self, thing: Any) -> int | None:
                return id(thing) if id(thing) in kept else None

        try:
            pickler = Pickler(file)
            pickler.fast = True  # equal values are equal bytes
            pickler.dump(vars(sampler))
        except Exception as error:  # noqa: BLE001 - any: attributes of the user's
            log.debug("a sampler cannot be compared", sampler=type(sampler).__name__, error=str(error))
            return None
        return file.getvalue()

    def _order(self, sampler: Any, attributes: bytes) -> list[Any] | None:
        """Return the first indices that the sampler would draw with these attributes."""
        kept, now = self._kept(sampler), random_states(self._loader)

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: int) -> Any:
                return kept[number]

        try:
            copied = object.__new__(type(sampler))
            vars(copied).update(Unpickler(io.BytesIO(attributes)).load())
            return list(islice(iter(copied), _COMPARED))
        except Exception as error:  # noqa: BLE001 - any: code of the user's
            log.debug("a copy of a sampler fails", sampler=type(sampler).__name__, error=str(error))
            return None
        finally:
            set_random_states(self._loader, now)


class _Bounded(io.BytesIO):
    """A file of limited size."""

    def write(self, part: Any) -> int:
        if self.tell() + memoryview(part).nbytes > _LARGEST:
            raise ValueError(f"the sampler has more than {_LARGEST} bytes")
        return super().write(part)


def _is_own(sampler: Any) -> bool:
    return sampler is not None and not type(sampler).__module__.startswith("torch.") and not isinstance(sampler, Iterator)
