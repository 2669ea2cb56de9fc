"""Handle exceptions of every class that user code may raise, so that none of them is replaced by one of ours.

A class may refuse attributes (a frozen dataclass), override ``add_note``, hold ``__notes__`` that are not a list, or have a
``__str__`` that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error. If its class has a ``__notes__`` of its own that cannot be replaced, change nothing."""
    with suppress(Exception):
        BaseException.__setattr__(error, "__notes__", [*notes_of(error), note])  # passes a __setattr__ of the class


def notes_of(error: BaseException) -> tuple[str, ...]:
    """Return the notes of an error, without what is not text."""
    try:
        found = error.__notes__
    except Exception:  # noqa: BLE001 - usually there are none; a property may raise anything
        return ()
    return tuple(note for note in found if isinstance(note, str)) if isinstance(found, list | tuple) else ()


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or what :mod:`traceback` prints if that raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error itself is what matters
        return "<exception str() failed>"


def described(error: BaseException) -> str:
    """Return the class and the text of an error: ``"ValueError: no such file"``."""
    return f"{type(error).__name__}: {text_of(error)}"


def contextmanager(function: Callable[P, Iterator[T_co]]) -> Callable[P, AbstractContextManager[T_co]]:
    """Make a context manager of a generator function, as :func:`contextlib.contextmanager` does.

    That one assigns to ``__traceback__`` of an exception that passes through (CPython 3.11 to 3.14, ``Lib/contextlib.py``).
    A frozen dataclass refuses this, and FrozenInstanceError replaces the exception.
    """

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> _Context[T_co]:
        return _Context(function(*args, **kwargs))

    return make


class _Context(AbstractContextManager[T_co]):
    def __init__(self, generator: Iterator[T_co]) -> None:
        self._generator: Generator[T_co, Any, Any] = generator  # type: ignore[assignment]

    def __enter__(self) -> T_co:
        return next(self._generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if error is None:
                next(self._generator)
            else:
                self._generator.throw(error)
        except StopIteration as end:
            return error is not None and end is not error
        except BaseException as raised:
            # PEP 479: a StopIteration that passes through a generator comes out as the cause of a RuntimeError.
            if error is None or (raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error)):
                raise
            BaseException.with_traceback(error, traceback)  # without the lines of the generator
            return False
        self._generator.close()
        raise RuntimeError(f"{self._generator!r} yields more than once")
