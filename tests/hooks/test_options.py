"""Options of every hook, writer and average: what is of the wrong type is an error when the object is made."""

import inspect
import re
import typing
from typing import Any

import pytest
from torch import nn

import hooks  # noqa: F401 - registers them
from eventloop import ConfigurationError
from eventloop.bus import GuestHook
from eventloop.config import registered

GIVEN = {
    "enable_predicate": lambda event: False,
    "function": dict,
    "model": nn.Linear(1, 1),
    "monitor": "loss",
    "period": 1,
}
"""Options without a default."""


def catalogue() -> list[tuple[type, str, Any]]:
    """Return every class that comes with trainbus with each of its options and the option's annotation."""
    found = []
    for entry in (one for kind in ("hook", "writer", "average") for one in registered(kind)):
        # The options of an adapter are objects of another library; its own tests have them.
        if entry.cls.__module__.startswith("hooks.") and not issubclass(entry.cls, GuestHook):
            annotations = typing.get_type_hints(entry.cls.__init__)
            for name, parameter in inspect.signature(entry.cls).parameters.items():
                if parameter.kind is not parameter.VAR_KEYWORD:
                    found.append(pytest.param(entry.cls, name, annotations[name], id=f"{entry.name}-{name}"))
    return found


def wrong(annotation: Any) -> Any:
    """Return a value that looks right in a hurry: text for a flag or a number, else a number."""
    kinds = [*typing.get_args(annotation), annotation]
    if bool in kinds:
        return "no"
    return "3" if (int in kinds or float in kinds) and str not in kinds else 3.5j


@pytest.mark.parametrize(("kind", "option", "annotation"), catalogue())
def test_options_of_a_wrong_type_are_errors(kind, option, annotation):
    value = wrong(annotation)
    required = [one.name for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
    with pytest.raises(ConfigurationError, match=re.escape(f"{option}={value!r}: give ")):
        kind(**{name: GIVEN[name] for name in required if name in GIVEN} | {option: value})
