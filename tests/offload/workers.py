"""Handlers for worker processes, which import this module. What they do stands in the event that they get."""

import ctypes
import os
import signal
import sys
import time

import torch

from eventloop import Event, Hook, mount
from eventloop.events import AfterTrainIter

heard: list[int] = []


class Told(Event, kw_only=True):
    """An event of a module that only the handlers' side declares."""

    what: str


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.lock = open(os.devnull)  # noqa: PTH123, SIM115


def act(event: AfterTrainIter) -> None:
    """Do what the metric ``do`` says; raises if an event comes twice or out of order."""
    if heard and event.progress.iter <= heard[-1]:
        raise AssertionError(f"{event.progress.iter} after {heard[-1]}")
    heard.append(event.progress.iter)
    do(int(event.outputs.get("do", 0)))


def act_on_all(events: list[AfterTrainIter]) -> None:
    for event in events:
        act(event)


DEEDS = ["nothing", "raise", "raise something unpicklable", "exit", "kill", "crash", "hang", "leave"]


def do(number: int) -> None:
    match DEEDS[number]:
        case "raise":
            raise ZeroDivisionError("in the worker")
        case "raise something unpicklable":
            raise UnpicklableError("this", "that")
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            ctypes.string_at(0)
        case "hang":
            time.sleep(600)
        case "leave":
            sys.exit(5)


def check_values(values: dict) -> None:
    """Raise unless the values are those of ``values_to_check``, and may be changed."""
    for name, expected in values_to_check().items():
        value = values[name]
        assert type(value) is type(expected), name
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected.dtype, name
            assert value.shape == expected.shape, name
            assert torch.equal(value, expected), name
            value.zero_()


def values_to_check() -> dict:
    return {
        "matrix": torch.arange(6.0).reshape(2, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(True),
        "complex": torch.ones(2, dtype=torch.complex64),
        "name": "weights",
        "list": [1, 2.5, None],
    }


def not_importable(event: Event) -> None: ...


class ProcessHook(Hook):
    @staticmethod
    @mount(offload="process", on_error="log")
    def after_train_iter(event):
        act(event)

    @mount(offload="process")
    @staticmethod
    def after_run(event):
        act(event)


class BoundHook(Hook):
    @mount(offload="process")
    def after_run(self, event): ...
