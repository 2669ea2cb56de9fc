"""``trainbus run CONFIG lr=0.1,0.01 -n 2``: all products of several values, a process and a folder each, and one table."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from threading import Event, Lock
from types import FrameType
from typing import Any, Final, NamedTuple

from trainbus.cli.common import say
from trainbus.cli.runs import show_best
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.platform import cores, pass_signal
from trainbus.eventloop.user_errors import contextmanager
from trainbus.observe import find_runs

OUTPUT: Final = "output.log"
_LONGEST: Final = 120  # characters of a folder's name
_LAST_LINES: Final = 5  # of the output of a training that failed
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "\"'"


class Training(NamedTuple):
    """One training of a sweep."""

    name: str
    changes: tuple[str, ...]


def alternatives(change: str) -> list[str]:
    """Return the changes that ``lr=0.1,0.01`` means, one a value. Commas in brackets and quotes are parts of a value."""
    key, equals, text = change.partition("=")
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and not depth:
            values.append("")
            continue
        values[-1] += character
    return [f"{key}{equals}{value.strip()}" for value in values] if equals else [change]


def trainings(changes: Sequence[str]) -> list[Training]:
    """Return the trainings of all products of values, in order. A name says what varies."""
    several = [alternatives(change) for change in changes]
    found = []
    for chosen in product(*several):
        varied = [one.partition("=") for one, some in zip(chosen, several, strict=True) if len(some) > 1]
        told = [f"{key.rpartition('.')[2]}={value}" for key, _, value in varied]
        name = re.sub(r"[^\w.=+-]+", "_", "+".join(told))[:_LONGEST].strip("_")
        found.append(Training(name, chosen))
    names = Counter(one.name for one in found)
    return [one if names[one.name] == 1 else one._replace(name=f"{number}+{one.name}") for number, one in enumerate(found, 1)]


def sweep(config: Path, several: Sequence[Training], folder: Path, options: Sequence[str], number: int) -> int:
    """Train all of them, ``number`` at the same time; return the exit status: 1 if any has failed.

    Ctrl-C and SIGTERM go to the trainings, which save if their hooks do; no further one begins.

    Raises:
        ConfigurationError: the name of the folder has a comma, which would be several values.
    """
    if "," in str(folder):
        raise ConfigurationError(f"loop.work_dir={folder}: the folder of trainings with several values cannot have a comma")
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{len(several)} trainings, {number} at a time → {folder}/")
    processes = _Processes(number)
    with ThreadPoolExecutor(number) as threads, processes.passing_signals():
        running = {}
        for one in several:
            own = folder / one.name
            command = [
                sys.executable,
                "-m",
                "trainbus",
                "run",
                str(config),
                *one.changes,
                f"loop.work_dir={own}",
                *options,
            ]
            running[threads.submit(processes.run, command, own)] = one
        failed = 0
        for done, future in enumerate(as_completed(running), 1):
            one, status = running[future], future.result()
            if status is None:
                continue  # interrupted before it began
            failed += status != 0
            output = folder / one.name / OUTPUT
            how = "" if not status else f"  exit status {status}, see {output}"
            say(f"{done} of {len(several)}  {one.name}{how}")
            if status and not processes.stopped:
                for line in output.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
                    say((f"    {line}", "dim"))
    say("")
    show_best(find_runs(folder), folder)
    if processes.stopped:
        raise KeyboardInterrupt
    return 1 if failed else 0


class _Processes:
    """The trainings that are under way."""

    def __init__(self, number: int) -> None:
        self._environment = os.environ | {"COLUMNS": "120"}
        # Each would otherwise take all cores, and together they would be slower than one after the other.
        self._environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // number)))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = Lock()
        self._stop = Event()

    @property
    def stopped(self) -> bool:
        """True once a signal has come."""
        return self._stop.is_set()

    def run(self, command: Sequence[str], folder: Path) -> int | None:
        """Run a training to its end; return its exit status, or None if a signal has come before."""
        with ExitStack() as stack:
            with self._lock:
                if self.stopped:
                    return None
                folder.mkdir(exist_ok=True)
                output = stack.enter_context((folder / OUTPUT).open("ab"))
                # A session of its own: the terminal's Ctrl-C comes to this process alone, which passes it on, once.
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                process = subprocess.Popen(command, **streams, env=self._environment, start_new_session=True)  # noqa: S603 - ours
                self._running.add(process)
            status = process.wait()
            with self._lock:
                self._running.discard(process)
            return status

    @contextmanager
    def passing_signals(self) -> Iterator[None]:
        """Pass SIGINT and SIGTERM on to the trainings."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._stop.set()
            for process in [*self._running]:
                pass_signal(process, number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
