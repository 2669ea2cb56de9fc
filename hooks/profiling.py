"""A profiler from its start to its file; one at a time, and one that neither torch nor a run can crash over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from eventloop import ConfigurationError, get_logger

log = get_logger()


def guarded(owner: str, do: Callable[[], object]) -> bool:
    """Have torch's profiler do something. Its errors are logged: a profile is not worth a run.

    Args:
        owner: label of the hook.
        do: what to do.

    Returns:
        True if it worked.
    """
    try:
        do()
    except Exception:
        log.exception("torch's profiler failed; training goes on without this profile", hook=owner)
        return False
    return True


class Session:
    """One use of a profiler of torch. Torch lets a second one begin, and silently loses what the first one has seen.

    Where torch itself fails, that is logged and the session is over; what the user's function raises ends the run.

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
        self._started = self._done(self._profiler.__enter__)

    def step(self) -> None:
        """Tell the profiler of the end of an iteration, at which a schedule may hand a trace over."""
        if not self._started:
            return
        self._started = False  # stopping once more would crash the process if Ctrl-C, say, came between two traces
        with warnings.catch_warnings():
            # Each cycle of a schedule has a trace of its own, which is as it should be.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._started = self._done(self._profiler.step)
        self._raise_failure()

    def close(self, *, write: bool = True) -> None:
        """Stop the profiler, which hands its trace over, and write the file, unless it is not wanted; once."""
        if not self._started:
            return
        self._started = False
        Session._active = None
        guarded(self._owner, lambda: self._profiler.__exit__(None, None, None))
        path = self._json_path
        if write and path is not None:
            guarded(self._owner, lambda: self._write(path))
        self._raise_failure()

    def _done(self, do: Callable[[], object]) -> bool:
        """Return True if the profiler goes on; if not, another one may begin."""
        done = False
        try:
            done = guarded(self._owner, do)
        finally:
            if not done:
                Session._active = None
        return done

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
