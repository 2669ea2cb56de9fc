"""``EmptyCacheHook``: return the memory that torch's allocator caches to the device."""

from __future__ import annotations

from collections.abc import Collection

from trainbus.eventloop import ConfigurationError, Hook, check_options
from trainbus.eventloop.device import empty_cache
from trainbus.eventloop.events import AfterEpoch, AfterIter, BeforeEpoch
from trainbus.eventloop.registry import register


@register
class EmptyCacheHook(Hook):
    """Empty the cache of the accelerator's allocator, in all stages. Without an accelerator the hook does nothing.

    This frees memory for other processes on the device and reduces fragmentation; the run itself gets no more memory. The
    allocator waits for the device, so ``after_iter=True`` makes iterations much slower.

    Args:
        before_epoch: empty it before each epoch, validation and test.
        after_epoch: empty it after each of them.
        after_iter: empty it after each iteration of any stage.

    Raises:
        ConfigurationError: all three are False.
    """

    observes = True

    @check_options
    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        if not (before_epoch or after_epoch or after_iter):
            advice = "set one of them to True, or remove the hook"
            raise ConfigurationError(f"EmptyCacheHook: before_epoch, after_epoch and after_iter are all False; {advice}")
        self._wanted = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}

    def unused(self) -> Collection[str]:
        return [name for name, wanted in self._wanted.items() if not wanted]

    def before_epoch(self, event: BeforeEpoch) -> None:
        empty_cache()

    def after_iter(self, event: AfterIter) -> None:
        empty_cache()

    def after_epoch(self, event: AfterEpoch) -> None:
        empty_cache()
