"""Write eventloop/bus/overloads.py, the overloads of ``Bus.on`` and ``Bus.stream`` per mount-point name, from the events.

python .ci/write_overloads.py            # write
python .ci/write_overloads.py --check    # exit 1 if the file is not what would be written
"""

import ast
import subprocess
import sys
from pathlib import Path

from eventloop.events.event import registry

TARGET = Path(__file__).parent.parent / "eventloop" / "bus" / "overloads.py"

HEAD = '''"""``Bus.on`` and ``Bus.stream``, by mount-point name. Written from the events by .ci/write_overloads.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, Unpack, overload

from eventloop import events as ev
from eventloop.bus.options import Options, StreamOptions, decorates
from eventloop.bus.stream import Stream
from eventloop.bus.subscription import Subscription

E = TypeVar("E", bound=ev.Event)
T = TypeVar("T")
R = TypeVar("R")
Heard = TypeVar("Heard")


class Listens(Protocol[Heard]):
    """The decorator that ``bus.on(...)`` returns; it returns the function unchanged."""

    def __call__(self, handler: Callable[[Heard], R], /) -> Callable[[Heard], R]:
        """Subscribe ``handler``."""


class TypedOn:
    """Carries the signatures of ``Bus.on`` and ``Bus.stream``, so that wrong annotations fail the type checker."""

    def _on(self, event: type[ev.Event] | str, handler: Callable[..., Any], options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _stream(self, event: type[ev.Event] | str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    # What capture= returns, or a list of that or of events, is what the handler takes.
    @overload
    def on(
        self, event: type[E], /, *, capture: Callable[[E], T], batch: int, **options: Unpack[Options]
    ) -> Listens[list[T]]: ...
    @overload
    def on(
        self,
        event: type[E],
        handler: Callable[[list[T]], object],
        /,
        *,
        capture: Callable[[E], T],
        batch: int,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(
        self, event: str, /, *, capture: Callable[[Any], T], batch: int, **options: Unpack[Options]
    ) -> Listens[list[T]]: ...
    @overload
    def on(
        self,
        event: str,
        handler: Callable[[list[T]], object],
        /,
        *,
        capture: Callable[[Any], T],
        batch: int,
        **options: Unpack[Options],
    ) -> Subscription: ...
    @overload
    def on(self, event: type[E], /, *, capture: Callable[[E], T], **options: Unpack[Options]) -> Listens[T]: ...
    @overload
    def on(
        self, event: type[E], handler: Callable[[T], object], /, *, capture: Callable[[E], T], **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, capture: Callable[[Any], T], **options: Unpack[Options]) -> Listens[T]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[T], object], /, *, capture: Callable[[Any], T], **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[E], /, *, batch: int, **options: Unpack[Options]) -> Listens[list[E]]: ...
    @overload
    def on(
        self, event: type[E], handler: Callable[[list[E]], object], /, *, batch: int, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: str, /, *, batch: int, **options: Unpack[Options]) -> Listens[list[Any]]: ...
    @overload
    def on(
        self, event: str, handler: Callable[[list[Any]], object], /, *, batch: int, **options: Unpack[Options]
    ) -> Subscription: ...
    @overload
    def on(self, event: type[E], /, **options: Unpack[Options]) -> Listens[E]: ...
    @overload
    def on(self, event: type[E], handler: Callable[[E], object], /, **options: Unpack[Options]) -> Subscription: ...
'''

NAME = """    @overload
    def on(self, event: Literal["{name}"], /, **options: Unpack[Options]) -> Listens[ev.{event}]: ...
    @overload
    def on(
        self, event: Literal["{name}"], handler: Callable[[ev.{event}], object], /, **options: Unpack[Options]
    ) -> Subscription: ...
"""

TAIL = '''    # A mount point of the user's own, by name: the checker cannot know its class, so the decorator takes any handler.
    # As a call it takes one of plain Event (or Any): were any allowed, a wrong handler for a name above would fit here.
    @overload
    def on(self, event: str, /, **options: Unpack[Options]) -> Listens[Any]: ...
    @overload
    def on(self, event: str, handler: Callable[[ev.Event], object], /, **options: Unpack[Options]) -> Subscription: ...
    def on(
        self, event: type[ev.Event] | str, handler: Callable[..., Any] = decorates, /, **options: Any
    ) -> Any:
        """Subscribe a handler to an event class or mount-point name.

        As a decorator (``@bus.on("after_train_iter", priority=50)``) it returns the function unchanged; called with a
        function it returns a :class:`Subscription`. Plain functions run inline, on the publisher's thread; async ones on
        the bus's event loop; ``offload="thread"`` gives blocking work a thread of its own, ``offload="process"`` a process.

        Args:
            event: the class or the name; ``Event`` hears everything, a group (``"after_iter"``) all its events.
            handler: takes one argument: the event, what ``capture`` returned, or with ``batch`` a list of either.
            **options: ``priority`` and filters, ``offload``, ``queue``, ``full``, ``linger``, ``max_bytes``, ``timeout``,
                ``on_error`` and ``disable_after`` (:class:`eventloop.Options`), and for offloaded handlers ``capture``, which
                picks on the publisher's thread what the handler gets a copy of, and ``batch``, the most events per call.

        Raises:
            UnknownEventError: no event declares the name.
            SubscribeError: an option that cannot work.
        """
        return self._on(event, handler, options)

    @overload
    def stream(
        self, event: type[E], /, *, capture: Callable[[E], T], **options: Unpack[StreamOptions]
    ) -> Stream[T]: ...
    @overload
    def stream(self, event: str, /, *, capture: Callable[[Any], T], **options: Unpack[StreamOptions]) -> Stream[T]: ...
    @overload
    def stream(self, event: type[E], /, **options: Unpack[StreamOptions]) -> Stream[E]: ...
'''

STREAMED = """    @overload
    def stream(self, event: Literal["{name}"], /, **options: Unpack[StreamOptions]) -> Stream[ev.{event}]: ...
"""

STREAM_TAIL = '''    @overload
    def stream(self, event: str, /, **options: Unpack[StreamOptions]) -> Stream[Any]: ...
    def stream(self, event: type[ev.Event] | str, /, **options: Any) -> Any:
        """Subscribe by iterating: ``async for event in bus.stream("after_train_iter", every=10)``, in asyncio or trio.

        The events are those that an offloaded handler gets. Heard from this call on until the bus closes, which ends the
        iteration, or the stream is left (:class:`eventloop.Stream`). The bus need not be open yet; one that has closed,
        and is not open again, has nothing more to say: the iteration ends at once. An application that reads
        slowly does not hold up the training: unlike a handler's lane, a full one drops its oldest events by default.

        Args:
            event: as for :meth:`on`.
            **options: filters, ``priority``, ``queue``, ``full``, ``linger``, ``max_bytes``
                (:class:`eventloop.StreamOptions`), and ``capture``.

        Raises:
            BusStateError: no event loop is running here.
            UnknownEventError: no event declares the name.
            SubscribeError: an option that cannot work.
        """
        return self._stream(event, options)
'''


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
