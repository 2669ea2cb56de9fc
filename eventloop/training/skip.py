"""Leaving out the batches of a pass that a run has used up before it was resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

_END: Any = object()


def skip_batches(loader: Iterable[Any], used: int, again: Callable[[], None] | None = None) -> Iterator[Any]:
    """Return an iterator over ``loader`` without its first ``used`` batches, making the same random draws.

    A map-style DataLoader is not asked for the skipped samples. Anything else is read and thrown away, with a warning.

    Args:
        loader: the data.
        used: how many batches to leave out.
        again: puts the random states back that the pass began with, where it began without a draw for its workers.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and _iterates_as_torch(loader):
        return _skip_by_index(loader, used, again)
    if isinstance(loader, list | tuple):
        return iter(loader[used:])
    warnings.warn(
        f"resuming reads and throws away {used} batches, because {type(loader).__name__} can neither skip nor say where it is "
        "(no state_dict); random numbers that it draws while reading are drawn again",
        RuntimeWarning,
        stacklevel=2,
    )
    iterator = iter(loader)
    for _ in range(used):
        if next(iterator, _END) is _END:
            break
    return iterator


def _iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """False for a class of its own that changes batches on their way: another loader in its place would not."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def _skip_by_index(loader: DataLoader[Any], used: int, again: Callable[[], None] | None) -> Iterator[Any]:
    batched = loader.batch_sampler is not None
    sampler = _SkippingSampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, used, again)
    rebuilt: DataLoader[Any] = DataLoader(
        loader.dataset,
        **({"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": None}),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    iterator = iter(rebuilt)
    # With workers the iterator has asked for indices by now; without, it must, before the RNG is set to the present again.
    sampler.skip()
    return iterator


class _SkippingSampler:
    """Yields what a sampler yields after the first ``used``. The draws come after the loader's own, as they did then."""

    def __init__(self, sampler: Iterable[Any], used: int, again: Callable[[], None] | None) -> None:
        self._sampler = sampler
        self._used = used
        self._again = again
        self._iterator: Iterator[Any] | None = None
        self._skipped = False

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._sampler)
        self._skipped = False
        return self

    def __next__(self) -> Any:
        self.skip()
        assert self._iterator is not None  # noqa: S101 - __iter__ made it
        return next(self._iterator)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._used) if isinstance(self._sampler, Sized) else 0

    def skip(self) -> None:
        """Draw and drop the first ``used``, once."""
        if self._skipped or self._iterator is None:
            return
        self._skipped = True
        if self._again is not None:
            self._again()
        for _ in range(self._used):
            next(self._iterator, None)
