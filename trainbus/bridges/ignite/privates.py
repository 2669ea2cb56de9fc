"""The undocumented names of Ignite that this bridge uses."""

from __future__ import annotations

from typing import Any, Final

from trainbus.eventloop.privates import Names, check_names

STEP: Final = "_process_function"
FIRE: Final = "_fire_event"
HANDLE_EXCEPTION: Final = "_handle_exception"
HANDLERS: Final = "_event_handlers"  # by event: for each the function and its arguments

NAMES: Final[Names] = {
    f"engine.{STEP}": ("host.py: the step of an engine", "0.5.3 to 0.5.5"),
    f"engine.{FIRE}": ("host.py: events before and after Ignite's handlers", "0.5.3 to 0.5.5"),
    f"engine.{HANDLE_EXCEPTION}": ("host.py: errors of a training", "0.5.3 to 0.5.5"),
    f"engine.{HANDLERS}": ("files.py, foreign_calls.py: the handlers of an engine", "0.5.3 to 0.5.5"),
}


def check(engine: Any) -> None:
    """Raise ConfigurationError if the installed version lacks a name."""
    check_names("pytorch-ignite", "ignite", NAMES, engine=engine)
