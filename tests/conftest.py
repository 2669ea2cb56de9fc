import functools
import gc
import multiprocessing
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple
from zlib import crc32

import fsspec
import pytest
import structlog
import torch
from blockbuster import blockbuster_ctx
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, Event
from trainbus.eventloop.events.event import registry as registered
from trainbus.eventloop.seams import Seam

from .scripts import run_script

# Here, and in the processes that tests start: the models are so small that waiting for a second thread takes most of the time.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `pytest --hypothesis-profile nightly` looks longer.
for profile, examples in (("quick", 50), ("nightly", 300)):
    settings.register_profile(profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quick")

# Of the one fork server that the tests of a run share: with these a process of theirs starts in a tenth of a second.
multiprocessing.set_forkserver_preload(
    [
        "pytest",  # by the modules of jobs, as structlog.testing: each takes half as long as all of ours
        "structlog.testing",
        "torch._dynamo",  # by the first optimizer that is made: more than a second
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.nn.parallel",
        "torchtitan.hf_datasets.text_datasets",  # where it is installed, as the next ones: five seconds
        "torchtitan.models.llama3",
        "torchtitan.trainer",
        "trainbus.bridges",
        "trainbus.cli",
        "trainbus.eventloop.offload.process",
        "trainbus.eventloop.training.loop",
        "trainbus.hooks.checkpoint",
        "trainbus.hooks.publishing",
        "trainbus.observe.run_record",
    ]
)

# Tests whose programs train in several processes at once run one after the other, on one of pytest's two workers: two such
# tests at once need more cores than there are, and some would come near their time limit. None needs it to pass.
ALONE = (
    "bridges/ray/",
    "bridges/test_processes.py",
    "bridges/test_rounds.py",
    "bridges/torchft/test_groups.py",
    "bridges/torchft/test_kills.py",
    "bridges/torchtitan/test_ranks.py",
    "ranks/",
    "test_alone.py",
    "device/test_ddp.py",
    "examples/",
    "cli/test_torchrun.py",
    "observe/test_dashboard_browser.py",
    "observe/test_dashboard_proxies.py",
    "hooks/test_sync_buffers.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-every", type=int, default=1, help="one of N long tests: the same ones if others are added")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("long_every")
    items[:] = [item for item in items if not (item.get_closest_marker("long") and crc32(item.nodeid.encode()) % every)]
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(ALONE):
            item.add_marker(pytest.mark.xdist_group("alone"))


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collections: Accelerate makes one in each training, which took most of its time."""
    gc.collect()
    gc.freeze()


UVLOOP = pytest.mark.skipif(find_spec("uvloop") is None, reason="uvloop is not installed")


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails if a thread is there afterwards that was not there before; other tests may have left some."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """The file system of ``memory://``, empty."""
    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]
    yield file_system
    file_system.store.clear()
    file_system.pseudo_dirs[:] = [""]


@pytest.fixture
def change() -> Iterator[Callable[[Seam[Any], Any], None]]:
    """``change(INTERVAL, 0.02)`` replaces a limit, a pause or a clock of a module for the test."""
    with ExitStack() as stack:
        yield lambda seam, value: stack.enter_context(seam.replaced(value))


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture(params=["asyncio", pytest.param("uvloop", marks=UVLOOP), "trio"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The event loop that a bus runs on a thread of its own, of all kinds."""
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    return "trio" if request.param == "trio" else "asyncio"


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop", marks=UVLOOP),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The event loop of a host, of all kinds: what tests marked with ``anyio`` run in."""
    return request.param


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """On asyncio, a call of the package that blocks an event loop raises BlockingError."""
    with blockbuster_ctx("trainbus"):
        yield


@pytest.fixture(autouse=True)
def _log_not_configured() -> Iterator[None]:
    """Where lines of the log go depends on no other test: ``capture_logs`` leaves structlog configured.

    And so configured it has rich draw each traceback: a tenth of a second.
    """
    yield
    structlog.reset_defaults()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one, and a screen of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


class Printed(NamedTuple):
    out: str
    err: str


@pytest.fixture
def trainbus(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """``trainbus(*words, status=0)`` runs the command, which ends with a status; returns what it prints."""
    from trainbus.cli import main

    def run(*words: object, status: int = 0) -> Printed:
        capsys.readouterr()
        assert main([str(word) for word in words]) == status, capsys.readouterr()
        return Printed(*capsys.readouterr())

    return run


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """What is logged during the test."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture
def registry() -> Iterator[dict[str, type[Event]]]:
    """The registry of mount points, as it was afterwards."""
    before = dict(registered)
    yield registered
    registered.clear()
    registered.update(before)


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CompletedProcess[str]]:
    """``script(source)`` runs it as a program of its own."""
    return functools.partial(run_script, folder=tmp_path_factory.mktemp("script"))


@pytest.fixture
def in_our_code():
    """Tells whether a signal struck in code of ours (or a test's), not in a destructor that happened to run just then.

    An exception in a destructor cannot reach anyone: Python prints it, and pytest makes it an error.
    """

    def look(frame) -> bool:
        name = frame.f_code.co_filename
        return "eventloop" in name or "tests" in name or name.startswith("<trainbus")

    return look


class CtrlC:
    """KeyboardInterrupts at arbitrary instructions of what is called through this."""

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
        self.call(bus.publish, event)

    def publish_all(self, bus, events, seconds):
        """Publish events to a bus, with a strike each so many seconds, and drain it."""
        with bus:
            self.every(seconds)
            for event in events:
                self.publish(bus, event)
            self.every(0)
            assert bus.drain(timeout=30).pending == 0
        assert self.strikes

    def call(self, function, *arguments):
        """Return what it returns; None if it was struck."""
        try:
            self._armed = True
            result = function(*arguments)
            self._armed = False
        except KeyboardInterrupt:
            self._armed = False
            self.strikes += 1
            return None
        return result


@pytest.fixture
def ctrl_c(in_our_code):
    if not hasattr(signal, "setitimer"):
        pytest.skip("no interval timer")
    if sys.version_info[:2] == (3, 14):
        pytest.skip("a lock stays taken if Ctrl-C strikes as a `with` statement takes it (python/cpython#148874)")
    ctrl_c = CtrlC(in_our_code)
    previous = signal.signal(signal.SIGALRM, ctrl_c.strike)
    gc.disable()  # what is raised in a callback of the garbage collector (hypothesis has one) is reported as unraisable
    yield ctrl_c
    ctrl_c.every(0)
    signal.signal(signal.SIGALRM, previous)
    gc.enable()
    torch.set_grad_enabled(True)  # Ctrl-C in torch's own no_grad() leaves it off


class HeldDisk:
    """Holds each sync of a file by the thread that writes checkpoints until it is let go, and can fail it.

    Not those of directories: a test that sees a new name goes on while its directory is being synced.
    """

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        self.error: OSError | None = None

    def fsync(self, descriptor: int) -> None:
        if threading.current_thread().name == "trainbus-saver" and stat.S_ISREG(os.fstat(descriptor).st_mode):
            self.reached.set()
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    held = HeldDisk()
    monkeypatch.setattr(os, "fsync", held.fsync)
    yield held
    held.go.set()
