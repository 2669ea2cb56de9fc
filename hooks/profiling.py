"""A profiler from its start to its file; one at a time, and one that torch cannot crash over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from eventloop import ConfigurationError, get_logger

log = get_logger()


class Session:
    """One use of a profiler of torch. Torch lets a second one begin, and silently loses what the first one has seen.

    Args:
        owner: label of the hook, for errors.
        make: makes the profiler, given what to do with a trace (None: nothing).
        on_trace_ready: the user's own function for that.
        json_path: where the trace goes in the end, if anywhere.
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
        self._on_trace_ready = on_trace_ready
        self._json_path = json_path
        self._profiler = make(None if on_trace_ready is None else self._hand_over)
        self._failure: BaseException | None = None
        self._started = False

    def start(self) -> None:
        """Start the profiler.

        Raises:
            ConfigurationError: another one is running.
        """
        if Session._active is not None:
            raise ConfigurationError(
                f"{self._owner} cannot profile while {Session._active} does, as torch has one profiler at a time; remove one "
                "of them"
            )
        Session._active = self._owner
        self._started = True
        self._profiler.__enter__()

    def step(self) -> None:
        """Tell the profiler of the end of an iteration, at which a schedule may hand a trace over."""
        finished = False
        try:
            with warnings.catch_warnings():
                # Each cycle of a schedule has a trace of its own, which is as it should be.
                warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
                self._profiler.step()
            finished = True
        finally:
            if not finished:  # Ctrl-C, say, between stopping and starting anew: stopping once more would crash the process
                self._started = False
                Session._active = None
        self._raise_failure()

    def close(self, *, write: bool = True) -> None:
        """Stop the profiler, which hands its trace over, and write the file, unless it is not wanted; once."""
        if not self._started:
            return
        self._started = False
        Session._active = None
        self._profiler.__exit__(None, None, None)
        if write and self._json_path is not None:
            self._write(self._json_path)
        self._raise_failure()

    def _hand_over(self, profiler: Any) -> None:
        assert self._on_trace_ready is not None  # noqa: S101 - else the profiler does not know of this method
        try:
            self._on_trace_ready(profiler)
        except BaseException as error:  # noqa: BLE001 - torch must come to the end of what it does; raised right after it
            self._failure = error

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
