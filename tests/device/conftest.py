"""An accelerator for the tests of this folder: the simulated one, and where they are, ``torch_openreg`` and a CUDA device."""

import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import pytest
import torch

from trainbus.testing import DeviceUnderTest, simulated_device

OPENREG, CUDA = find_spec("torch_openreg") is not None, torch.cuda.device_count() > 0
OTHER = torch.accelerator.current_accelerator()  # of torch 2.7 also that for which torch was built
TAKEN = pytest.mark.skipif(OTHER is not None, reason=f"torch takes one accelerator in a process, and {OTHER} is here")
"""Marks what needs the simulated device. On a machine with a card, ``CUDA_VISIBLE_DEVICES=""`` runs it."""
ORDERS = ("eager", "needed", "rivals")
PLAIN = "plain"


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
def accelerator(request: pytest.FixtureRequest) -> Iterator[DeviceUnderTest]:
    """An accelerator; the simulated one in each order in which its streams may run."""
    if request.param in (*ORDERS, PLAIN):
        with simulated_device(request.param) as made:
            yield made
        return
    module = torch.get_device_module(request.param)
    last = torch.device(request.param, module.device_count() - 1)
    yield DeviceUnderTest(request.param, last, module, _no_cuda_waits if request.param == "cuda" else nullcontext)


@pytest.fixture(params=["default", "side"])
def stream(request: pytest.FixtureRequest, accelerator: DeviceUnderTest) -> Iterator[str]:
    """Compute on the default stream, or on another one."""
    with accelerator.side() if request.param == "side" else nullcontext():
        yield request.param
