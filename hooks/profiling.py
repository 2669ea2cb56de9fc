"""A use of torch's profiler from its start to its file: one at a time, and failing without harm to the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from eventloop import ConfigurationError, get_logger

log = get_logger()


@contextmanager
def survived(owner: str) -> Iterator[None]:
    """Log errors of torch's profiler, and go on: a profile is not worth a run. ``owner`` is the label of the hook."""
    try:
        yield
    except Exception:
        log.exception("torch's profiler failed; training goes on without this profile", hook=owner)


class ProfilerSession:
    """One use of a profiler. Torch lets a second one begin, and silently loses the data of the first.

    An error in torch is logged and ends the session; an error of the user's function ends the run.

    Args:
        owner: label of the hook, for errors.
        make: makes the profiler, given the function for traces (None: no function).
        on_trace_ready: the user's own function for traces.
        json_path: file for the last trace, None for no file.
    """

    _active: ClassVar[str | None] = None

    def __init__(
        self,
        owner: str,
        make: Callable[[Callable[[Any], None] | None], Any],
        on_trace_ready: Callable[[Any], object] | None = None,
        json_path: Path | None = None,
    ) -> None:
        self._owner = owner
        self._json_path = json_path
        self._failure: BaseException | None = None
        self._running = False

        def hand_over(profiler: Any) -> None:
            assert on_trace_ready is not None  # noqa: S101 - else the profiler does not know this function
            try:
                on_trace_ready(profiler)
            except BaseException as error:  # noqa: BLE001 - torch must come to the end of its work; raised right after it
                self._failure = error

        self._profiler = make(None if on_trace_ready is None else hand_over)

    def start(self) -> None:
        """Start the profiler.

        Raises:
            ConfigurationError: another one is running.
        """
        if ProfilerSession._active is not None:
            raise ConfigurationError(
                f"{self._owner} cannot profile while {ProfilerSession._active} does, as torch has one profiler at a time; "
                "remove one of them"
            )
        ProfilerSession._active = self._owner
        self._run(self._profiler.__enter__)

    def step(self) -> None:
        """Tell the profiler that an iteration has ended; a schedule may hand a trace over then."""
        if self._running:
            with warnings.catch_warnings():
                # Each cycle of a schedule has a trace of its own, as it should be.
                warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
                self._run(self._profiler.step)
            self._raise_failure()

    def close(self, *, write: bool = True) -> None:
        """Stop the profiler, which hands its trace over, and write the file, unless ``write`` is False; once."""
        if not self._running:
            return
        self._running = False
        ProfilerSession._active = None
        with survived(self._owner):
            self._profiler.__exit__(None, None, None)
        if write and self._json_path is not None:
            with survived(self._owner):
                self._write(self._json_path)
        self._raise_failure()

    def _run(self, do: Callable[[], object]) -> None:
        """Call the profiler. The session is over if that fails: then another one may begin."""
        # Stopping a second time would crash the process if Ctrl-C, say, came between two traces.
        self._running = False
        try:
            with survived(self._owner):
                do()
                self._running = True
        finally:
            if not self._running:
                ProfilerSession._active = None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, path: Path) -> None:
        if getattr(self._profiler, "profiler", self) is None:  # torch.profiler's has one inside once it records
            log.warning("nothing was recorded, so there is no trace to write", hook=self._owner, path=str(path))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        log.info("profile written", path=str(path))
