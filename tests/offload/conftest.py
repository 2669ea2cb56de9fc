import gc
import multiprocessing
import signal
import threading

import pytest
import torch

from eventloop.offload import process


@pytest.fixture
def quick_workers(monkeypatch):
    """Worker processes from a fork server that has imported torch already: ten times as fast as spawned ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eventloop.offload.child"])
    monkeypatch.setattr(process, "_spawn", context)


@pytest.fixture
def no_worker_is_left():
    """Fails if a worker process, or a thread of the bus, is there afterwards that was not there before."""
    before = set(threading.enumerate())
    yield
    assert multiprocessing.active_children() == []
    assert not process._processes
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


class CtrlC:
    """KeyboardInterrupts at arbitrary instructions of whoever publishes through this."""

    def __init__(self, in_our_code):
        self.strikes = 0
        self._in_our_code = in_our_code
        self._armed = False

    def strike(self, number, frame):
        if self._armed and self._in_our_code(frame):
            raise KeyboardInterrupt

    def every(self, seconds):
        """Strike again and again; with 0 no more."""
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

    def once(self, seconds):
        """Strike after ``seconds``."""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def publish(self, bus, event):
        try:
            self._armed = True
            bus.publish(event)
            self._armed = False
        except KeyboardInterrupt:
            self._armed = False
            self.strikes += 1


@pytest.fixture
def ctrl_c(in_our_code):
    if not hasattr(signal, "setitimer"):
        pytest.skip("no interval timer")
    ctrl_c = CtrlC(in_our_code)
    previous = signal.signal(signal.SIGALRM, ctrl_c.strike)
    gc.disable()  # what is raised in a callback of the garbage collector (hypothesis has one) is reported as unraisable
    yield ctrl_c
    ctrl_c.every(0)
    signal.signal(signal.SIGALRM, previous)
    gc.enable()
    torch.set_grad_enabled(True)  # Ctrl-C in torch's own no_grad() leaves it off
