"""Every exception that trainbus raises on purpose.

All errors derive from :class:`TrainbusError`, and also from the builtin that describes them best, so that
``except ValueError`` works for callers that do not know trainbus.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from trainbus.eventloop.spelling import option_meant
from trainbus.eventloop.user_errors import described


class TrainbusError(Exception):
    """Base of every exception raised by trainbus itself (never of those raised by a handler)."""


class SubscribeError(TrainbusError, ValueError):
    """A subscription that cannot work: wrong filter, priority, mode, handler or hook."""


class UnknownEventError(SubscribeError, LookupError):
    """A mount-point name that no event declares; the message lists the nearest ones."""


class EventDefinitionError(TrainbusError, TypeError):
    """An ``Event`` subclass whose mount-point name is taken by another module's event."""


class LiveFieldError(TrainbusError, RuntimeError):
    """An offloaded handler touched live training state (``event.model`` …); ``capture=`` is the way out."""


class BusStateError(TrainbusError, RuntimeError):
    """The bus is in the wrong state for this call (closed, already open, inside a handler)."""


class LaneFullError(TrainbusError, RuntimeError):
    """A full lane refused an event: ``full="raise"``, or waiting would have been a deadlock."""


class LaneClosedError(BusStateError):
    """An offloaded handler takes no event: the bus is not open, its event loop has ended, or it closed meanwhile."""


class OffloadError(TrainbusError, RuntimeError):
    """Several offloaded handlers failed, or events were not delivered in time."""


class RunCancelled(BaseException):  # as in asyncio and trio: `except Exception` must not catch it
    """``run.cancel()`` was called, or ``await loop.arun()`` cancelled; raised on the training thread."""


class RunStopped(BaseException):
    """``run.stop()`` cut an epoch of your own loop short; raised in its body, and ended by ``with Run(...)``."""


class RunPreempted(SystemExit):
    """A run was stopped by ``run.stop(exit_code=...)`` and has ended in order; uncaught, the process exits with that status."""


class HandlerTimeoutError(TrainbusError, TimeoutError):
    """An offloaded handler took longer than its ``timeout=``."""


class WorkerDiedError(OffloadError):
    """The worker process of an ``offload="process"`` handler ended in a call, or did not start (``started`` is False)."""

    def __init__(self, message: str, *, started: bool = True) -> None:
        super().__init__(message)
        self.started = started


class StopIterationError(TrainbusError, RuntimeError):
    """User code raised StopIteration or StopAsyncIteration, which would end the loop around it; PEP 479 does the same."""


class ConfigurationError(TrainbusError, ValueError):
    """An option of a run, loop or hook that cannot work; raised when the object is made or the run starts."""

    @classmethod
    def unknown_option(cls, owner: str, option: str, known: Iterable[str], value: object = None) -> Self:
        """Make the error for an option that ``owner`` does not have; it names the one that was meant, or all."""
        known = list(known)
        hint = option_meant(option, value, known) or (f"its options are {', '.join(known)}" if known else "it has none")
        return cls(f"{owner} has no option {option}=; {hint}")


class RegistrationError(TrainbusError, TypeError):
    """A class that cannot be registered: it is of another kind, or another class has its name."""


class UnknownNameError(ConfigurationError, LookupError):
    """A name under which nothing is registered; the message lists the nearest ones."""


class TrainingError(TrainbusError, RuntimeError):
    """A training step broke its contract (no loss, a missing metric input), or a call came when it cannot work.

    Args:
        message: what is wrong, and what to do.
        instead: what to do instead of resuming the run as it is, if that would only raise the error again.
    """

    def __init__(self, message: str = "", *, instead: str = "") -> None:
        super().__init__(message)
        self.instead = instead


class CheckpointError(TrainbusError, RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointValueError(CheckpointError, TypeError):
    """A value that a checkpoint cannot hold; the message gives its path in the tree."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The named checkpoint does not exist."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint file whose bytes differ from those that were written (truncated, flipped bits, another format)."""


def cannot_import(what: str, library: str, extra: str, error: ImportError, *modules: str) -> ConfigurationError:
    """Return the error of ``what``, which needs a library: it is not installed, or it is and its import fails.

    It is not installed if the missing module is one of ``modules``, the library's names for ``import``. Another missing module,
    or an ImportError of another class, comes from inside of an installed library.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in modules:
        return ConfigurationError(f'{what} needs {library} ({error}): pip install "trainbus[{extra}]"')
    return ConfigurationError(f"{what} needs {library}, which is installed and cannot be imported ({described(error)})")


def stopped(error: Exception, who: str) -> StopIterationError:
    """Return the error to raise instead of a StopIteration (or StopAsyncIteration) of ``who``, with it as the cause."""
    instead = StopIterationError(
        f"{who} raised {type(error).__name__}, which would end the loop around it without an error; next() raises it "
        "when an iterator is used up: give next() a default, or catch it"
    )
    instead.__cause__ = error
    return instead
