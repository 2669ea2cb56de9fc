"""The undocumented names of Ignite that this bridge uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from eventloop.privates import Names, check_names

STEP: Final = "_process_function"
FIRE: Final = "_fire_event"
HANDLE_EXCEPTION: Final = "_handle_exception"

NAMES: Final[Names] = {
    f"engine.{STEP}": ("host.py: the step of an engine", "0.5.3 to 0.5.5"),
    f"engine.{FIRE}": ("host.py: events before and after Ignite's handlers", "0.5.3 to 0.5.5"),
    f"engine.{HANDLE_EXCEPTION}": ("host.py: errors of a training", "0.5.3 to 0.5.5"),
    "engine._event_handlers": ("files.py, foreign_calls.py: the handlers of an engine", "0.5.3 to 0.5.5"),
}


def check(engine: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("pytorch-ignite", "ignite", NAMES, engine=engine)


def step_of(engine: Any) -> Callable[..., Any]:
    """Return the function that an engine calls with each batch."""
    step: Callable[..., Any] = engine._process_function
    return step


def fire_of(engine: Any) -> Callable[..., None]:
    """Return the method that calls an engine's handlers of an event."""
    fire: Callable[..., None] = engine._fire_event
    return fire


def handle_exception_of(engine: Any) -> Callable[[BaseException], None]:
    """Return the method that gets the errors of an engine's run."""
    handle: Callable[[BaseException], None] = engine._handle_exception
    return handle


def handlers_of(engine: Any) -> Mapping[Any, list[tuple[Any, ...]]]:
    """Return an engine's handlers by event: for each the function and its arguments."""
    handlers: Mapping[Any, list[tuple[Any, ...]]] = engine._event_handlers
    return handlers
