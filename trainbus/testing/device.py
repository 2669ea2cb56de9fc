"""``simulated_device``: an accelerator in pure Python, whose streams run late, for code that works with streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from trainbus.eventloop import device as door
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.user_errors import contextmanager

Order = Literal["eager", "needed", "rivals", "plain"]
_STREAMS = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream")


@dataclass
class DeviceUnderTest:
    """A device, and how to tell that a thread waits for it.

    ``waits`` lists the waits of all threads so far, as (thread, what). In ``with no_waits():`` a wait of this thread raises.
    """

    kind: str
    device: torch.device
    """The last one: not the current one of a thread, if there are several."""
    module: Any
    """``torch.get_device_module(kind)``."""
    no_waits: Callable[[], AbstractContextManager[Any]] = nullcontext
    waits: list[tuple[int, str]] = field(default_factory=list)
    has_streams: bool = True

    @contextmanager
    def side(self) -> Iterator[Any]:
        """Compute on a stream other than the default one, behind what that has done so far; skip the test if it has none."""
        if not self.has_streams:
            import pytest

            pytest.skip("this type has no streams")
        stream = self.module.Stream(self.device)
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            yield stream


@contextmanager
def simulated_device(order: Order = "needed") -> Iterator[DeviceUnderTest]:
    """Have the devices ``sim:0`` and ``sim:1`` in this process, as ``torch.accelerator``.

        with simulated_device("rivals") as accelerator:
            model.to(accelerator.device)

    Tensors are plain ones, so autograd and optimizers work. Work is queued on streams, and runs when a thread waits for it: a
    missing wait, event or reference gives a wrong value each time, without sleeps. Freed memory is filled with NaN.

    Args:
        order: what runs when a thread waits for a stream. ``"needed"``: what that stream needs, and nothing else.
            ``"rivals"``: first all that other streams may do. ``"eager"``: everything, as soon as it is queued. ``"plain"``: a
            type of device without streams, whose copies wait.

    Raises:
        ConfigurationError: ``order`` is none of these, or the process has another accelerator: torch takes one.
    """
    if order not in get_args(Order):
        raise ConfigurationError(f"simulated_device({order!r}): the orders are {', '.join(map(repr, get_args(Order)))}")
    other = torch.accelerator.current_accelerator()
    if other is not None and other.type != "sim":
        raise ConfigurationError(f"torch takes one accelerator in a process, and {other} is here; set CUDA_VISIBLE_DEVICES=")
    from trainbus.testing import sim

    module: Any = sim.module
    with ExitStack() as undo:
        undo.callback(door.forget_types)
        door.forget_types()
        undo.callback(sim.reset, "eager")
        undo.enter_context(door.NEW_PINNED.replaced(sim.pinned))
        undo.enter_context(door.IS_PINNED.replaced(sim.is_pinned))
        module.available = True
        undo.callback(setattr, module, "available", False)
        device = torch.device(sim.NAME, 1)
        if order == "plain":
            for name in _STREAMS:
                undo.callback(setattr, type(module), name, vars(type(module))[name])
                delattr(type(module), name)
            sim.reset("needed")
            yield DeviceUnderTest(sim.NAME, device, module, has_streams=False)
        else:
            sim.reset(order)
            yield DeviceUnderTest(sim.NAME, device, module, sim.no_waits, sim.waits)
