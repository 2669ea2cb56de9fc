"""Handlers for worker processes, which import this module. What they do stands in the event that they get."""

import ctypes
import os
import signal
import sys
import time
from typing import ClassVar

from trainbus.eventloop import Event, Hook, mount
from trainbus.eventloop.events import AfterTrainIter

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
