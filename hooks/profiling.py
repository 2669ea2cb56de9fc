"""Sessions of torch's profiler: one at a time, and an error in torch does not end the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.profiler import profile

from eventloop import ConfigurationError, get_logger
from eventloop.events import RunView

log = get_logger()

TraceHandler = Callable[[profile], object]


@contextmanager
def survived(owner: str) -> Iterator[None]:
    """Log an error of torch's profiler instead of raising it. ``owner`` is the label of the hook."""
    try:
        yield
    except Exception:
        log.exception("torch's profiler failed; training continues without this profile", hook=owner)


def in_work_dir(path: str | Path, run: RunView) -> Path:
    """Return ``path``, relative to the work dir if the run has one."""
    return (run.work_dir or Path()) / path


class ProfilerSession:
    """One use of ``torch.profiler.profile``. A second session at the same time is an error: torch would lose data of the first.

    An error in torch is logged and ends the session. An error in the user's function ends the run.

    Args:
        owner: label of the hook, for errors.
        on_trace_ready: the user's function for traces, or None.
        json_path: file for the last trace, or None.
        **options: further arguments of ``profile``.
    """

    _active: ClassVar[str | None] = None

    def __init__(
        self, owner: str, on_trace_ready: TraceHandler | None = None, json_path: Path | None = None, **options: Any
    ) -> None:
        self._owner = owner
        self._json_path = json_path
        self._failure: BaseException | None = None
        self._running = False
        self._profiler = profile(on_trace_ready=on_trace_ready and partial(self._hand_over, on_trace_ready), **options)

    def start(self) -> None:
        """Start the profiler; raise ConfigurationError if another one is running."""
        if ProfilerSession._active is not None:
            both = f"{self._owner} cannot profile while {ProfilerSession._active} is"
            raise ConfigurationError(f"{both}: torch runs one profiler at a time; remove one of them")
        ProfilerSession._active = self._owner
        self._run(self._profiler.__enter__)

    def step(self) -> None:
        """Step the profiler at the end of an iteration; a schedule may produce a trace here."""
        if self._running:
            with warnings.catch_warnings():
                # The warning is about intended behaviour: each cycle of a schedule has its own trace.
                warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
                self._run(self._profiler.step)
            self._raise_failure()

    def close(self, *, write: bool = True) -> None:
        """Stop the profiler, and write its last trace to the file unless ``write`` is False. A second call does nothing."""
        if not self._running:
            return
        self._running = False
        ProfilerSession._active = None
        with survived(self._owner):
            self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch does not annotate it
            if write and self._json_path is not None and self._profiler.profiler is None:
                log.warning("the profiler recorded nothing; no trace is written", hook=self._owner, path=str(self._json_path))
            elif write and self._json_path is not None:
                self._json_path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(self._json_path))
                log.info("profile written", path=str(self._json_path))
        del self._profiler  # it holds the profile
        self._raise_failure()

    def _run(self, do: Callable[[], object]) -> None:
        """Call the profiler. A failure ends the session, so that another one can begin."""
        # First False: after Ctrl-C between two traces, stopping again would crash the process.
        self._running = False
        try:
            with survived(self._owner):
                do()
                self._running = True
        finally:
            if not self._running:
                ProfilerSession._active = None

    def _hand_over(self, on_trace_ready: TraceHandler, profiler: profile) -> None:
        try:
            on_trace_ready(profiler)
        except BaseException as error:  # noqa: BLE001 - raised when torch has finished its work
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
