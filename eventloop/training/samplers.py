"""Samplers of the user's own: those with a state that resumes them, and those with one that nothing saves."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training.rng import get_rng_state, own_generators, random_states, set_random_states, set_rng_state

log = get_logger()

_LARGEST: Final = 2**25  # bytes of a sampler that are compared
_COMPARED: Final = 256  # indices, or batches of them


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
