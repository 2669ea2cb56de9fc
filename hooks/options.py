"""Types of options that hooks and writers share; ``check_options`` keeps to their bounds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from eventloop import ConfigurationError

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max, description="a finite number")]
Distance = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="a finite number of at least 0")]
Share = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(min_length=1, description="a text that is not empty")]


def one_or_more(option: str, given: str | Iterable[str], advice: str = "a name or a list of names") -> tuple[str, ...]:
    """Return one text or several as a tuple, each once.

    Raises:
        ConfigurationError: ``given`` is empty, or one of its members is not a text or is empty.
    """
    chosen = (given,) if isinstance(given, str) else tuple(given)
    if not chosen or not all(isinstance(one, str) and one for one in chosen):
        raise ConfigurationError(f"{option}={given!r}: give {advice}")
    return tuple(dict.fromkeys(chosen))
