"""An accelerator for the tests of this folder: the simulated one, and where they are, ``torch_openreg`` and a CUDA device."""

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from trainbus.eventloop import device as door

OPENREG, CUDA = find_spec("torch_openreg") is not None, torch.cuda.device_count() > 0
TAKEN = pytest.mark.skipif(OPENREG or CUDA, reason="torch takes one accelerator in a process, and another one is here")
"""Marks what needs the simulated device. On a machine with a card, ``CUDA_VISIBLE_DEVICES=""`` runs it."""
ORDERS = ("eager", "needed", "rivals")
"""See ``sim.streams.ORDERS``, which cannot be imported beside another accelerator: torch takes one in a process."""
PLAIN = "plain"


@dataclass
class Accelerator:
    """A device, and how to tell that a thread waits for it."""

    kind: str
    device: torch.device
    """The last one: not the current one of a thread, if there are several."""
    module: Any
    no_waits: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A wait of this thread for the device is an error in here."""
    waits: list[tuple[int, str]] = field(default_factory=list)
    """The waits so far, as (thread, what), where they can be counted."""

    has_streams: bool = True

    @contextmanager
    def side(self) -> Iterator[Any]:
        """Compute on a stream other than the default one, behind what that has done so far."""
        if not self.has_streams:
            pytest.skip("this type has no streams")
        stream = self.module.Stream(self.device)
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            yield stream


@contextmanager
def simulated(order: str) -> Iterator[Accelerator]:
    """Have the simulated device; for the order PLAIN, one whose module has no streams, so that copies from it wait."""
    from . import sim

    with pytest.MonkeyPatch.context() as monkeypatch:
        door.is_asynchronous.cache_clear()
        door._has_streams.cache_clear()
        yield _simulated(sim, order, monkeypatch)
        sim.reset("eager")
    door.is_asynchronous.cache_clear()
    door._has_streams.cache_clear()


def _simulated(sim: Any, order: str, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    monkeypatch.setattr(sim.module, "available", True, raising=False)
    monkeypatch.setattr(door, "empty_pinned", sim.pinned)
    monkeypatch.setattr(door, "is_pinned", sim.is_pinned)
    device = torch.device(sim.NAME, 1)
    if order == PLAIN:
        for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream"):
            monkeypatch.delattr(type(sim.module), name)
        sim.reset("needed")
        return Accelerator(sim.NAME, device, sim.module, has_streams=False)
    sim.reset(order)
    return Accelerator(sim.NAME, device, sim.module, sim.no_waits, sim.waits)


@contextmanager
def _no_cuda_waits() -> Iterator[None]:
    """Fail if this thread waits for the device. The mode "error" would forbid it to all threads."""
    waits = list[str]()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if threading.get_ident() == mine and "called a synchronizing" in str(message):
            waits.append("".join(traceback.format_stack(limit=8)))

    mine = threading.get_ident()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not waits, "\n".join(waits)


KINDS = [
    *(pytest.param(order, marks=TAKEN) for order in (*ORDERS, PLAIN)),
    pytest.param("openreg", marks=pytest.mark.skipif(not OPENREG, reason="torch_openreg is not installed")),
    pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="needs a CUDA device")),
]


@pytest.fixture(params=KINDS)
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """An accelerator; the simulated one in each order in which its streams may run."""
    if request.param in (*ORDERS, PLAIN):
        with simulated(request.param) as made:
            yield made
        return
    module = torch.get_device_module(request.param)
    last = torch.device(request.param, module.device_count() - 1)
    yield Accelerator(request.param, last, module, _no_cuda_waits if request.param == "cuda" else nullcontext)


@pytest.fixture(params=["default", "side"])
def stream(request: pytest.FixtureRequest, accelerator: Accelerator) -> Iterator[str]:
    """Compute on the default stream, or on another one."""
    with accelerator.side() if request.param == "side" else nullcontext():
        yield request.param
