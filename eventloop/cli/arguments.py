"""Types of arguments that several commands take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from eventloop.checkpoint import AnyPath, as_path
from eventloop.config.words import shortened


def _as_path(_: Any, tokens: Sequence[Token]) -> AnyPath:
    return as_path(tokens[0].value)


def _as_integer(_: Any, tokens: Sequence[Token]) -> int:
    """Return an integer; cyclopts itself would round 1.5."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"expected an integer, got {shortened(tokens[0].value)!r}") from None


Positive = Annotated[int, Parameter(converter=_as_integer, validator=Number(gte=1, lt=2**63))]
Seed = Annotated[int, Parameter(converter=_as_integer, validator=Number(gte=0, lt=2**63))]
"""As Python's, numpy's and torch's generators take it."""
FileOrURL = Annotated[AnyPath, Parameter(converter=_as_path, accepts_keys=False, metavar="PATH|URL")]
