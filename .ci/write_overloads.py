"""Write eventloop/bus/overloads.pyi, the overloads of ``Bus.on`` and ``Bus.stream`` per mount-point name, from the events.

python .ci/write_overloads.py            # write
python .ci/write_overloads.py --check    # exit 1 if the file is not what would be written
"""

import ast
import subprocess
import sys
from pathlib import Path

from trainbus.eventloop.events.event import registry

TARGET = Path(__file__).parent.parent / "eventloop" / "bus" / "overloads.pyi"

HEAD = """# Written from the events by .ci/write_overloads.py. What the functions do is in overloads.py.
# mypy: disable-error-code="overload-overlap"
# An event class is callable, and so a handler as mypy sees it; but it takes its fields by name only, and no event.

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, Unpack, overload

from trainbus.eventloop import events as ev
from trainbus.eventloop.bus.handler import HandlerOptions, StreamOptions
from trainbus.eventloop.bus.stream import Stream
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.observe import Costs

_E = TypeVar("_E", bound=ev.Event)
_T = TypeVar("_T")
_R = TypeVar("_R")
_Heard = TypeVar("_Heard")

# The decorator that `bus.on(...)` returns; it returns the function unchanged.
class Listens(Protocol[_Heard]):
    def __call__(self, handler: Callable[[_Heard], _R], /) -> Callable[[_Heard], _R]: ...

def decorates(event: Any) -> None: ...

class TypedOn:
    _recorder: Any

    def costs(self) -> Costs: ...

    # What capture= returns, or a list of that or of events, is what the handler takes.
    @overload
    def on(
        self, event: type[_E], /, *, capture: Callable[[_E], _T], batch: int, **options: Unpack[HandlerOptions]
    ) -> Listens[list[_T]]: ...
    @overload
    def on(
        self,
        event: type[_E],
        handler: Callable[[list[_T]], object],
        /,
        *,
        capture: Callable[[_E], _T],
        batch: int,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: str, /, *, capture: Callable[[Any], _T], batch: int, **options: Unpack[HandlerOptions]
    ) -> Listens[list[_T]]: ...
    @overload
    def on(
        self,
        event: str,
        handler: Callable[[list[_T]], object],
        /,
        *,
        capture: Callable[[Any], _T],
        batch: int,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: type[_E], /, *, capture: Callable[[_E], _T], **options: Unpack[HandlerOptions]) -> Listens[_T]: ...
    @overload
    def on(
        self,
        event: type[_E],
        handler: Callable[[_T], object],
        /,
        *,
        capture: Callable[[_E], _T],
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, capture: Callable[[Any], _T], **options: Unpack[HandlerOptions]) -> Listens[_T]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[_T], object], /, *, capture: Callable[[Any], _T], **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[_E], /, *, batch: int, **options: Unpack[HandlerOptions]) -> Listens[list[_E]]: ...
    @overload
    def on(
        self, event: type[_E], handler: Callable[[list[_E]], object], /, *, batch: int, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, batch: int, **options: Unpack[HandlerOptions]) -> Listens[list[Any]]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[list[Any]], object], /, *, batch: int, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[_E], /, **options: Unpack[HandlerOptions]) -> Listens[_E]: ...
    @overload
    def on(self, event: type[_E], handler: Callable[[_E], object], /, **options: Unpack[HandlerOptions]) -> Subscription: ...
"""

NAME = """    @overload
    def on(self, event: Literal["{name}"], /, **options: Unpack[HandlerOptions]) -> Listens[ev.{event}]: ...
    @overload
    def on(
        self, event: Literal["{name}"], handler: Callable[[ev.{event}], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
"""

TAIL = """    # A mount point of the user's own, by name: the checker cannot know its class, so the decorator takes any handler.
    # As a call it takes one of plain Event (or Any): were any allowed, a wrong handler for a name above would fit here.
    @overload
    def on(self, event: str, /, **options: Unpack[HandlerOptions]) -> Listens[Any]: ...
    @overload
    def on(self, event: str, handler: Callable[[ev.Event], object], /, **options: Unpack[HandlerOptions]) -> Subscription: ...
    # Of several classes, the event is of their nearest common base: match tells them apart.
    @overload
    def on(self, event: type[_E], second: type[_E], /, *more: type[_E], **options: Unpack[HandlerOptions]) -> Listens[_E]: ...
    @overload
    def on(
        self, event: type[_E], second: type[_E], handler: Callable[[_E], object], /, **options: Unpack[HandlerOptions]
    ) -> Subscription: ...
    @overload
    def on(
        self,
        event: type[_E],
        second: type[_E],
        third: type[_E],
        handler: Callable[[_E], object],
        /,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    # Names, capture= or batch= of several: the decorator takes any handler, and a call has two or three mount points.
    @overload
    def on(
        self,
        event: type[ev.Event] | str,
        second: type[ev.Event] | str,
        /,
        *more: type[ev.Event] | str,
        capture: Callable[[Any], Any] = ...,
        batch: int = ...,
        **options: Unpack[HandlerOptions],
    ) -> Listens[Any]: ...
    @overload
    def on(
        self,
        event: type[ev.Event] | str,
        second: type[ev.Event] | str,
        handler: Callable[[Any], object],
        /,
        *,
        capture: Callable[[Any], Any] = ...,
        batch: int = ...,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def on(
        self,
        event: type[ev.Event] | str,
        second: type[ev.Event] | str,
        third: type[ev.Event] | str,
        handler: Callable[[Any], object],
        /,
        *,
        capture: Callable[[Any], Any] = ...,
        batch: int = ...,
        **options: Unpack[HandlerOptions],
    ) -> Subscription: ...
    @overload
    def stream(
        self, event: type[_E], /, *more: type[_E], capture: Callable[[_E], _T], **options: Unpack[StreamOptions]
    ) -> Stream[_T]: ...
    @overload
    def stream(
        self,
        event: type[ev.Event] | str,
        /,
        *more: type[ev.Event] | str,
        capture: Callable[[Any], _T],
        **options: Unpack[StreamOptions],
    ) -> Stream[_T]: ...
    @overload
    def stream(self, event: type[_E], /, *more: type[_E], **options: Unpack[StreamOptions]) -> Stream[_E]: ...
"""

STREAMED = """    @overload
    def stream(self, event: Literal["{name}"], /, **options: Unpack[StreamOptions]) -> Stream[ev.{event}]: ...
"""

STREAM_TAIL = """    @overload
    def stream(
        self, event: type[ev.Event] | str, /, *more: type[ev.Event] | str, **options: Unpack[StreamOptions]
    ) -> Stream[Any]: ...
"""


def overloads() -> str:
    """Return the whole module."""
    names = {name: event.__name__ for name, event in registry.items()} | {"event": "Event"}
    named = "".join(NAME.format(name=name, event=event) for name, event in names.items())
    streamed = "".join(STREAMED.format(name=name, event=event) for name, event in names.items())
    return HEAD + named + "\n" + TAIL + streamed + STREAM_TAIL


def in_sync() -> bool:
    """Return True if the file says what would be written, however it is formatted."""
    return ast.dump(ast.parse(TARGET.read_text())) == ast.dump(ast.parse(overloads()))


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(not in_sync())
    TARGET.write_text(overloads())
    subprocess.run([sys.executable, "-m", "ruff", "format", TARGET], check=True)
