"""Copy the tensors that only ``optimizer.step`` changes while the training continues.

Parameters and the state of optimizers make up nearly all of a checkpoint, and between two steps nothing changes them. So
they are copied on a thread while the next forward and backward pass run, and the next step waits for the copy: the fence,
which is torch's own step pre-hook. Small tensors are copied at once, by both threads, since that is faster.

If a tensor's version (which torch counts up with every change in place) moved during the copy, the save fails. Neither the
fence nor the versions see the following changes, which must not be made to weights between a save and the next step:
writes through ``.data`` or into a storage shared by other means (numpy, DLPack, ``.data`` of another tensor), and kernels
that do not count versions up (torch's fused optimizers, run past ``optimizer.step``). An optimizer that steps inside of
backward passes the fence as any other, and the backward waits there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, Final, Literal

import torch

from trainbus.eventloop.checkpoint.layout import Pair, by_device, copy
from trainbus.eventloop.device import DeviceEvent, end_of_queue, is_asynchronous, new_stream, on_stream
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.privates import version_of

Staging = Literal["block", "overlap"]
"""When the state is copied: while training waits, or during the next forward and backward pass."""

# Tensors per call: many, since each call gives the GIL away once; not all, so that their versions are looked at soon.
_LOT: Final = 2048
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class Overlap:
    """Copy the parameters and state of optimizers on a thread. Each optimizer gets a step pre-hook, until ``close``."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._handles = [optimizer.register_step_pre_hook(self.fence) for optimizer in self._optimizers]
        self._under_way: list[Future[None]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def divide(self, pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
        """Return the pairs to copy at once, and the pairs that only a step changes."""
        parameters = chain.from_iterable(group["params"] for one in self._optimizers for group in one.param_groups)
        values = chain.from_iterable(state.values() for one in self._optimizers for state in one.state.values())
        parts_of_all = map(own_part, chain(parameters, values))
        owned = {part.data_ptr() for part in parts_of_all if type(part) in _PLAIN and part.layout is torch.strided} - {0}
        parts: tuple[list[Pair], list[Pair]] = [], []
        for pair in pairs:
            # Inference tensors count no versions.
            parts[pair.source.data_ptr() in owned and not pair.source.is_inference()].append(pair)
        return parts

    def start(self, pairs: Iterable[Pair], path: Callable[[int], str]) -> Future[None]:
        """Copy on a thread; the next step waits for it. If a tensor changes meanwhile, the future fails, with its path."""
        devices = by_device(pairs)
        ends = {device: end_of_queue(device) for device in devices if is_asynchronous(device)}
        lots = [group[first : first + _LOT] for group in devices.values() for first in range(0, len(group), _LOT)]
        versions = [[version_of(pair.source) for pair in lot] for lot in lots]
        threads = self._own_thread()
        try:
            late = threads.submit(_copy_lots, lots, versions, ends, path)
        except RuntimeError:  # the interpreter is shutting down; then nothing is left to overlap with
            late = Future()
            late.set_result(_copy_lots(lots, versions, ends, path))
        self._under_way = [*(other for other in self._under_way if not other.done()), late]
        return late

    def help(self, work: Callable[[], bool]) -> Future[bool]:
        """Run ``work`` on the thread; the caller cancels it or waits for it."""
        try:
            return self._own_thread().submit(work)
        except RuntimeError:  # "cannot schedule new futures after interpreter shutdown"
            return Future()

    @property
    def busy(self) -> bool:
        """True while something is being copied."""
        return any(not one.done() for one in self._under_way)

    def fence(self, *_: object) -> None:
        """Wait until nothing is being copied. Free where nothing is. Optimizers call it before each step."""
        if self._under_way:
            if self._process == os.getpid():  # a fork has no copy of the thread
                wait(self._under_way)
            self._under_way = []

    def close(self) -> None:
        """Wait for the copies under way, and remove the hooks from the optimizers."""
        self.fence()
        for handle in self._handles:
            handle.remove()
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        self._threads = None

    def _own_thread(self) -> ThreadPoolExecutor:
        if self._threads is None or self._process != os.getpid():
            self._threads, self._process = ThreadPoolExecutor(1, "trainbus-stage"), os.getpid()
            # One processor for the copy, the others are for the training. torch has this number per thread, and another one
            # for new threads, which is restored.
            number = torch.get_num_threads()
            self._threads.submit(torch.set_num_threads, 1).result()
            torch.set_num_threads(number)
        return self._threads


def own_part(value: Any) -> Any:
    """Return this process's part of a sharded tensor, which shares its memory; any other value as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


@torch.no_grad()
def _copy_lots(
    lots: list[list[Pair]],
    versions: list[list[int]],
    ends: dict[torch.device, DeviceEvent],
    path: Callable[[int], str],
) -> None:
    streams = {}
    for device, end in ends.items():
        streams[device] = new_stream(device)
        streams[device].wait_event(end)
    for lot, before in zip(lots, versions, strict=True):
        stream = streams.get(device := lot[0].source.device)
        if stream is None:
            copy(lot)
        else:
            with on_stream(device, stream):
                copy(lot, non_blocking=True)
            stream.synchronize()
        for pair, version in zip(lot, before, strict=True):
            if version_of(pair.source) != version:
                raise CheckpointError(
                    f"{path(pair.position)} was changed while it was being copied, by something other than the "
                    'optimizer\'s step; use staging="block", or change it in or after the step'
                )
