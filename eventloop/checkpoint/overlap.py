"""Copying beside the training what only ``optimizer.step`` changes.

Parameters and the state of optimizers make up nearly all of a checkpoint, and between two steps nobody changes them. So
they are copied on a thread while the next forward and backward pass run, and the next step waits for the copy: the fence.
(Small tensors of one shape are copied at once all the same: that is sooner done than handed over.)
It stands in torch's own step pre-hook, so it holds wherever the step is called.

A tensor whose version (which torch counts up with every change in place) moved during the copy makes the save fail. What
neither the fence nor the versions see, and what therefore must not be done to weights between a save and the next step:
writes through ``.data`` or into a storage shared by other means (numpy, DLPack, ``.data`` of another tensor), and kernels
that do not count versions up (torch's fused optimizers, run past ``optimizer.step``). An optimizer that steps inside of
backward passes the fence as any other, and the backward waits there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, get_args

import torch

from eventloop.errors import CheckpointError, ConfigurationError

Staging = Literal["block", "overlap"]

# Tensors per call: many, since each call gives the GIL away once; not all, so that their versions are looked at soon.
_LOT: Final = 2048


def check_staging(staging: object) -> None:
    """Raise ConfigurationError unless ``staging`` is a way to stage."""
    if staging not in get_args(Staging):
        raise ConfigurationError(
            f'staging={staging!r}: "block" copies everything while the training waits, "overlap" copies what only optimizers '
            "change during the next forward and backward pass"
        )


class Pair(NamedTuple):
    """A tensor, and the staging memory for it."""

    target: torch.Tensor
    source: torch.Tensor
    position: int
    """In the order of the file."""


class Copy:
    """Tensors that another thread copies."""

    def __init__(self, pairs: Sequence[Pair], name: Callable[[int], str]) -> None:
        self._pairs = pairs
        self._versions = [pair.source._version for pair in pairs]
        self._name = name
        self._moments = [_moment(device) for device in {pair.source.device for pair in pairs} if device.type == "cuda"]
        self._future: Future[None]

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Have it done by one of ``threads``."""
        try:
            self._future = threads.submit(self._run)
        except RuntimeError:  # the interpreter is shutting down; then nothing is left to overlap with
            self._future = Future()
            self._future.set_result(self._run())

    @property
    def done(self) -> bool:
        """True once nothing is read or written any more."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until it is done, well or not."""
        wait([self._future])

    def finish(self) -> None:
        """Wait until it is done.

        Raises:
            CheckpointError: a tensor changed meanwhile.
        """
        self._future.result()

    @torch.no_grad()
    def _run(self) -> None:
        streams = [_side_stream(moment) for moment in self._moments]
        for first in range(0, len(self._pairs), _LOT):
            part = self._pairs[first : first + _LOT]
            _copy(part, streams)
            versions = [pair.source._version for pair in part]
            if versions != self._versions[first : first + _LOT]:
                raise CheckpointError(self._complaint(first, versions))
        self._pairs = ()  # the sources may be gone by now, but for us

    def _complaint(self, first: int, versions: list[int]) -> str:
        index = next(index for index, version in enumerate(versions, first) if version != self._versions[index])
        return (
            f"{self._name(self._pairs[index].position)} was changed while it was being copied, by something other than the "
            'optimizer\'s step; the way out: staging="block", or change it in or after the step'
        )


class Overlap:
    """Divides what is staged into what is copied at once and what is copied until the next step of ``optimizers``.

    Args:
        optimizers: whose parameters and state are copied late. Each gets a step pre-hook, until `close`.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]
        self._under_way: list[Copy] = []
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def divide(self, pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
        """Those to copy at once, and those that only a step changes."""
        owned = self._owned()
        parts: tuple[list[Pair], list[Pair]] = [], []
        for pair in pairs:
            # Inference tensors count no versions.
            parts[pair.source.data_ptr() in owned and not pair.source.is_inference()].append(pair)
        return parts

    def start(self, pairs: Sequence[Pair], name: Callable[[int], str]) -> Copy:
        """Copy on a thread of this object; whoever steps next waits for it.

        Args:
            pairs: what to copy, and where to.
            name: of the tensor at a position, for errors.
        """
        copy = Copy(pairs, name)
        copy.start(self._own_thread())
        self._under_way = [*(other for other in self._under_way if not other.done), copy]
        return copy

    def fence(self) -> None:
        """Wait until nothing is being copied. Free where nothing is."""
        if self._under_way:
            if self._process == os.getpid():  # a fork has no copy of the thread
                for copy in self._under_way:
                    copy.wait()
            self._under_way = []

    def close(self) -> None:
        """Wait for what is being copied, and leave the optimizers alone."""
        self.fence()
        for handle in self._handles:
            handle.remove()
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        self._threads = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.fence()

    def _owned(self) -> set[int]:
        parameters = chain.from_iterable(group["params"] for one in self._optimizers for group in one.param_groups)
        values = chain.from_iterable(state.values() for one in self._optimizers for state in one.state.values())
        pointers = {value.data_ptr() for value in chain(parameters, values) if type(value) in _PLAIN}
        return pointers - {0}

    def _own_thread(self) -> ThreadPoolExecutor:
        if self._threads is None or self._process != os.getpid():
            self._threads, self._process = ThreadPoolExecutor(1, "trainbus-stage"), os.getpid()
            # One processor for the copy, the others are for the training. torch knows the number per thread, and one more
            # for threads to come: that one is put back.
            number = torch.get_num_threads()
            self._threads.submit(torch.set_num_threads, 1).result()
            torch.set_num_threads(number)
        return self._threads


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def _copy(pairs: Sequence[Pair], streams: Sequence[torch.cuda.Stream]) -> None:
    on_cuda = [pair for pair in pairs if pair.source.is_cuda]
    others = [pair for pair in pairs if not pair.source.is_cuda]
    if others:
        torch._foreach_copy_([pair.target for pair in others], [pair.source for pair in others])
    for stream in streams:
        part = [pair for pair in on_cuda if pair.source.device == stream.device]
        if part:
            with torch.cuda.stream(stream):
                torch._foreach_copy_([pair.target for pair in part], [pair.source for pair in part], non_blocking=True)
            stream.synchronize()


def _moment(device: torch.device) -> tuple[torch.device, torch.cuda.Event]:
    """What is enqueued on the current stream of a device up to now."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    event.record(torch.cuda.current_stream(device))
    return device, event


def _side_stream(moment: tuple[torch.device, torch.cuda.Event]) -> torch.cuda.Stream:
    device, event = moment
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    stream.wait_event(event)
    return stream
