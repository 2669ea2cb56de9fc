"""Handlers for worker processes, which import this module. What they do stands in the event that they get."""

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from trainbus.eventloop import Event, Hook, mount
from trainbus.eventloop.events import AfterTrainIter

heard: list[int] = []


def quick() -> BaseContext:
    """Start processes from a fork server that has imported torch already, where there is one: ten times faster.

    The server must run before: a worker that starts it would have it inherit blocked signals.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


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


OUTPUTS = {"operations": 6 * 7 * 10**9 * 2 * 10**12, "least": -(2**70), "text": "NaN", "loss": math.inf}


def check_outputs(event: AfterTrainIter) -> None:
    if event.outputs != OUTPUTS:
        raise AssertionError(event.outputs)


def values() -> list:
    return [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.ones(2, 2, dtype=torch.complex64).conj(),
        torch.ones(1).expand(5),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        {"array": np.arange(4.0), "nested": [(torch.full((1_000_000,), 2.0), Path("a/b"), None)]},
    ]


def check_values(found: list) -> None:
    for one, expected in zip(found, values(), strict=True):
        if isinstance(expected, torch.Tensor):
            assert one.dtype == expected.dtype
            assert one.layout == expected.layout
            assert torch.equal(one.to_dense(), expected.to_dense())
    assert found[-1]["array"].tolist() == [0, 1, 2, 3]
    assert found[-1]["nested"][0][1:] == (Path("a/b"), None)
    assert found[-1]["nested"][0][0].add_(1).eq(3).all()  # it is the handler's own


def is_one(found: list) -> None:
    assert found[0] == 1


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


class Asked(Event, kw_only=True):
    what: list[str]


class Counts(Hook):
    """Two methods that share the memory of one worker."""

    told: ClassVar[list[str]] = []

    @staticmethod
    @mount(Told, offload="process")
    def tell(event: Told) -> None:
        Counts.told.append(event.what)

    @staticmethod
    @mount(Asked, offload="process", batch=1)
    def ask(events: list[Asked]) -> None:
        if events[0].what != Counts.told[-1:]:
            raise AssertionError(f"{Counts.told} when asked for {events[0].what}")
