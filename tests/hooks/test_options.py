"""Options of every hook, writer and average: a value of the wrong type or out of bounds is an error when the object is made."""

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import hooks  # noqa: F401 - registers them
from eventloop import ConfigurationError
from eventloop.annotations import Signature, members
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


def catalogue() -> Iterator[Any]:
    """Yield every class that comes with trainbus with each of its options and values that the option's annotation refuses."""
    for entry in (one for kind in ("hook", "writer", "average") for one in registered(kind)):
        # The options of an adapter are objects of another library; its own tests have them.
        if entry.cls.__module__.startswith("hooks.") and not issubclass(entry.cls, GuestHook):
            for name, option in Signature(entry.cls).options.items():
                for value in wrong(option.annotation):
                    yield pytest.param(entry.cls, name, value, id=f"{entry.name}-{name}-{value!r}")


def wrong(annotation: Any) -> Iterator[Any]:
    """Yield values that look right in a hurry, such as text for a number, and one beyond each bound."""
    known = members(annotation)
    kinds = {typing.get_origin(one.annotation) or one.annotation for one in known}
    if str in kinds:
        yield 3.5j
    elif typing.Literal in kinds:
        yield "bogus"
    else:
        yield "3" if kinds & {int, float} else "no" if bool in kinds else 3.5j
    if kinds & {int, float} and bool not in kinds:
        yield True
    if int in kinds and float not in kinds:
        yield 1.5
    if bool in kinds and int not in kinds:
        yield 1
    for bounds in (one.bounds for one in known if one.bounds is not None):
        beyond = [bounds.gt, bounds.lt, bounds.le and float("nan"), bounds.ge - 1 if bounds.ge in (0, 1) else None]
        yield from (one for one in beyond if one is not None)
        yield from ([] if bounds.min_length is None else [""])


@pytest.mark.parametrize(("kind", "option", "value"), list(catalogue()))
def test_options_that_their_annotation_refuses_are_errors(kind, option, value):
    required = [one.name for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
    with pytest.raises(ConfigurationError, match=re.escape(f"{option}={value!r}")):
        kind(**{name: GIVEN[name] for name in required if name in GIVEN} | {option: value})
