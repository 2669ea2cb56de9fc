"""Speak to accelerators. No other module does.

PyTorch has one accelerator per process (``torch.accelerator``). What is used of it are the names that the modules of all types
share (``torch.cuda``, ``torch.xpu``, ``torch.npu`` and others): streams, events, random states, memory. A type whose module has
streams and events, and pinned host memory, is *asynchronous*: copies to the host are queued on a stream, and the thread that
reads them waits for an event. Copies from any other type (MPS) are calls that wait for the device.

Nothing calls ``record_stream``: what reads a tensor on another stream than the current one keeps it until the copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final, Protocol, cast

import torch

from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import raw_stream
from trainbus.eventloop.seams import Seam

log = get_logger()

_NEEDED: Final = ("Stream", "Event", "stream", "current_stream")
NEW_PINNED: Final[Seam[Callable[[Sequence[int], torch.dtype], torch.Tensor]]] = Seam(
    lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=True)
)
IS_PINNED: Final[Seam[Callable[[torch.Tensor], bool]]] = Seam(torch.Tensor.is_pinned)
_on_cpu: Final = attrgetter("is_cpu")  # the devices themselves take longer: they are looked at where a tensor is not


class DeviceEvent(Protocol):
    """A point in the queue of a stream."""

    def query(self) -> bool:
        """Return True if the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait for the work before it."""
        ...


class DeviceStream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any, /) -> None:
        """Make the work that is queued from now on wait for an event."""
        ...

    def wait_stream(self, stream: Any, /) -> None:
        """Make the work that is queued from now on wait for what another stream has now."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...


# ------------------------------------------------------------------------------------------------------ copies, streams


@cache
def is_asynchronous(device: torch.device) -> bool:
    """Return True if copies from and to a device can be queued on streams."""
    return device.type not in ("cpu", "meta") and _has_streams(device.type)


@cache  # which makes the message one per process
def _has_streams(kind: str) -> bool:
    if all(hasattr(getattr(torch, kind, None), name) for name in _NEEDED):
        try:
            empty_pinned((1,), torch.uint8)
        except RuntimeError as error:
            reason = f"no pinned memory: {str(error).partition(chr(10))[0]}"
        else:
            return True
    else:
        reason = "no streams"
    log.info("copies from this type of device make the training wait for it", device=kind, reason=reason)
    return False


def forget_types() -> None:
    """Look anew which types of devices are asynchronous."""
    is_asynchronous.cache_clear()
    _has_streams.cache_clear()


def any_elsewhere(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if a tensor is not on the CPU."""
    return not all(map(_on_cpu, tensors))


def any_asynchronous(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if a tensor is on an asynchronous device."""
    return any(map(is_asynchronous, {tensor.device for tensor in tensors if not tensor.is_cpu}))


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in pinned host memory, which torch's allocator keeps until the copies to it are done."""
    return NEW_PINNED.value(shape, dtype)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is in pinned host memory."""
    return IS_PINNED.value(tensor)


def pinned_bytes(size: int) -> torch.Tensor:
    """Return ``size`` uninitialised bytes, as :func:`empty_pinned` does."""
    return empty_pinned((size,), torch.uint8)


def queue_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy of ``tensor`` to pinned memory on the current stream of its device, and return where it will be."""
    return empty_pinned(tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``; from pinned memory to an asynchronous device the copy is only queued."""
    return tensor.to(device, non_blocking=tensor.is_cpu and is_asynchronous(device) and is_pinned(tensor))


def end_of_queue(device: torch.device) -> DeviceEvent:
    """Record an event on the current stream of an asynchronous device, after the work queued so far."""
    module = torch.get_device_module(device)
    # CUDA: a thread that waits sleeps. By default it would spin, and take a processor from the training.
    event = module.Event(blocking=True) if device.type == "cuda" else module.Event()
    event.record(module.current_stream(device))
    return cast("DeviceEvent", event)


def synchronize(device: torch.device) -> None:
    """Wait for all streams of an asynchronous device; for any other do nothing, since its copies wait."""
    if is_asynchronous(device):
        torch.get_device_module(device).synchronize(device)


def new_stream(device: torch.device) -> DeviceStream:
    """Return another stream of an asynchronous device."""
    return cast("DeviceStream", torch.get_device_module(device).Stream(device))


def on_stream(device: torch.device, stream: DeviceStream) -> AbstractContextManager[object]:
    """Make a stream the current one of this thread."""
    return cast("AbstractContextManager[object]", torch.get_device_module(device).stream(stream))


def stream_finder(device: torch.device) -> Callable[[], DeviceStream]:
    """Return a function that returns the current stream of an asynchronous device."""
    module = torch.get_device_module(device)
    find: Callable[[], DeviceStream] = partial(module.current_stream, device)
    if device.type != "cuda":
        return find
    index = module.current_device() if device.index is None else device.index
    streams: dict[int, DeviceStream] = {}

    def find_by_number() -> DeviceStream:  # CUDA has a number for a stream, in a fraction of the time that an object takes
        number = raw_stream(index)
        stream = streams.get(number)
        if stream is None:
            stream = streams[number] = find()
        return stream

    return find_by_number


# ----------------------------------------------------------------------------------------------- the accelerator of a process


def _accelerator(*, started: bool = False) -> tuple[str, Any]:
    """Return the type and module of the accelerator: of one that is here, or that this process has used; else "" and None."""
    device = torch.accelerator.current_accelerator()  # what torch was built for, or a backend that was registered
    module: Any = None if device is None else getattr(torch, device.type, None)  # DirectML has none
    if device is None or module is None:
        return "", None
    # Not is_available(), which initialises CUDA's driver: forked workers could not use it then (torch.cuda.is_available: it
    # poisons forks). MPS has no is_initialized().
    is_there = getattr(module, "is_initialized", module.device_count) if started else module.device_count
    return (device.type, module) if is_there() else ("", None)


def device_names() -> list[str]:
    """Return the names of all accelerators of this machine: ``"NVIDIA H100"``, or ``"mps:0"`` where the type tells no name."""
    kind, module = _accelerator()
    name: Callable[[int], str] = getattr(module, "get_device_name", lambda index: f"{kind}:{index}")
    return [name(index) for index in range(module.device_count())] if kind else []


def devices() -> list[str]:
    """Return all accelerators of this machine as torch writes them: ``"cuda:0"``."""
    kind, module = _accelerator()
    return [f"{kind}:{index}" for index in range(module.device_count())] if kind else []


def current_device() -> torch.device | None:
    """Return the accelerator of this thread, such as ``cuda:1``; without an index if its type has one device (MPS)."""
    kind, module = _accelerator()
    if hasattr(module, "current_device"):
        return torch.device(kind, module.current_device())
    return torch.device(kind) if kind else None


def use_device(index: int) -> None:
    """Make an accelerator the current one of this thread: ``index``, modulo their number. Without several, do nothing."""
    _, module = _accelerator()
    if hasattr(module, "set_device") and (count := module.device_count()):
        module.set_device(index % count)


def handed_over() -> Callable[[], None]:
    """Return a function that makes the current device of this thread the one of another thread: each has its own."""
    _, module = _accelerator(started=True)
    return partial(module.set_device, module.current_device()) if hasattr(module, "set_device") else lambda: None


def memory_allocated(device: torch.device) -> int | None:
    """Return the bytes that tensors occupy on an accelerator; None on the CPU, and where the type does not count them."""
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "memory_allocated"):
        return int(module.memory_allocated(device))
    return int(module.current_allocated_memory()) if hasattr(module, "current_allocated_memory") else None  # MPS


def most_memory_allocated(device: torch.device) -> int | None:
    """Return the most bytes that tensors on a device have taken so far; None if its allocator does not tell."""
    module: Any = getattr(torch, device.type, None)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else None


def empty_cache() -> None:
    """Return the memory that the accelerator's allocator caches; without one do nothing."""
    _, module = _accelerator()
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def random_states_of_devices() -> dict[str, list[torch.Tensor]]:
    """Return the states of all generators of the accelerator that this process uses, by its type; {} without one."""
    kind, module = _accelerator(started=True)
    if hasattr(module, "get_rng_state_all"):
        return {kind: module.get_rng_state_all()}
    return {kind: [module.get_rng_state()]} if hasattr(module, "get_rng_state") else {}  # MPS: it has one device


def seed_devices(seed: int) -> None:
    """Seed all generators of the accelerator that this process uses; without one do nothing."""
    _, module = _accelerator(started=True)
    if module is not None:
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(seed)  # MPS has one device


def set_random_states_of_devices(states: Mapping[str, Sequence[torch.Tensor]]) -> None:
    """Restore the result of :func:`random_states_of_devices`, for each device, by index, that is here."""
    kind, module = _accelerator()
    several = hasattr(module, "get_rng_state_all")
    for saved_kind, saved in states.items():
        here = 0 if saved_kind != kind else module.device_count() if several else 1
        if here != len(saved):
            log.info("the number of devices with saved random states differs", device=saved_kind, saved=len(saved), here=here)
        if here and several:
            for index, state in enumerate(saved[:here]):
                module.set_rng_state(state, torch.device(kind, index))
        elif here:
            module.set_rng_state(saved[0])
