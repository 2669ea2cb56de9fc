"""``EmptyCacheHook``: returns memory that torch's allocator caches to the device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from eventloop import ConfigurationError, Hook, check_options, register
from eventloop.events import AfterEpoch, AfterIter, BeforeEpoch, RunEvent


@register
class EmptyCacheHook(Hook):
    """Empties the cache of the accelerator's allocator, in all stages. Without an accelerator it does nothing.

    The run itself gets no more memory by it; other processes on the device do, and fragmentation goes. The allocator waits
    for the device meanwhile, so ``after_iter=True`` makes iterations much slower.

    Args:
        before_epoch: before each epoch, validation and test.
        after_epoch: after each of them.
        after_iter: after each iteration.

    Raises:
        ConfigurationError: an option that is neither True nor False, or all of them False.
    """

    observes = True

    @check_options
    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        if not (before_epoch or after_epoch or after_iter):
            raise ConfigurationError(
                "EmptyCacheHook(before_epoch=False, after_epoch=False, after_iter=False) would never do anything; choose one "
                "of them, or leave the hook out"
            )
        self._wanted = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}

    def unused(self) -> Collection[str]:
        return [name for name, wanted in self._wanted.items() if not wanted]

    def before_epoch(self, event: BeforeEpoch) -> None:
        self._empty(event)

    def after_iter(self, event: AfterIter) -> None:
        self._empty(event)

    def after_epoch(self, event: AfterEpoch) -> None:
        self._empty(event)

    def _empty(self, event: RunEvent) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
