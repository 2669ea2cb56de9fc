"""``bus.publish``: look up the function compiled for an event, and call it.

The event with the most handlers, in a training mostly ``after_train_iter``, needs neither look-up nor second call: its route
is written into ``publish`` itself, which makes a publish to ten handlers some 10 % cheaper. CPython calls a method at full
speed only if it finds the function on the class, so every bus has a class of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, ClassVar, Self, cast

from eventloop.bus.routes import Route
from eventloop.events import Event

INLINED = """\
def publish(self, event):
    kind = type(event)
    if kind is event_type:
        {route}
        return
    try:
        return self._routes[kind](event)
    except KeyError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
    return self._route(kind)(event)
"""
"""The source of :meth:`Publisher.publish` with the route of ``event_type`` inlined."""


class Publisher:
    """The part of a bus that publishes.

    Subclasses of ``Bus`` get no class of their own and nothing inlined: what they make of ``publish`` holds. So does what
    is patched in its place, on one bus at any time, on ``Bus`` for every bus that has not published yet.
    """

    _made_from: ClassVar[type[Publisher] | None] = None
    _routes: dict[type, Route]
    _inlined: Any = None  # a function of this bus's own class
    _inlined_type: type[Event] | None = None
    _inlined_handlers: int = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an object of a class of its own, which looks like ``cls``."""
        own = cls
        if Publisher in cls.__bases__:
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_made_from": cls}
            own = cast("type[Self]", type(cls.__name__, (cls,), names))
        return super().__new__(own)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a bus cannot be copied or pickled: it has threads and subscribers; make one where it is needed")

    def publish(self, event: Event) -> None:
        """Call or hand over to everyone who hears ``event``, in order of priority. Safe from any thread; never awaits.

        Raises:
            Exception: whatever an inline handler raised, as it was, with a note that names handler, mount point and
                iteration; or what an offloaded handler with ``on_error="raise"`` raised since the last publish.
            LaneClosedError: somebody offloaded listens and the bus is not open.
        """
        # In step with INLINED. No name of this module may occur here: see _outline.
        try:
            return self._routes[type(event)](event)
        except KeyError as error:
            # The look-up's own KeyError has no frame below this one. A handler's has, and is none of our business.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
        return self._route(type(event))(event)

    # CPython begins the error of a call with wrong arguments with this. Taking any, to explain it, costs each publish 10 %.
    publish.__qualname__ = (
        "bus.publish takes an event that was made, bus.publish(Ev(x=1)); run.publish(Ev, x=1) makes one: publish"
    )

    def _route(self, event_type: type) -> Route:
        """Find the route of an event that has none in ``_routes``."""
        raise NotImplementedError

    def _use_routes(self, routes: dict[type, Route]) -> None:
        """Look into ``routes`` from the next publish on; an event that is not there comes by :meth:`_route`."""
        if self._inlined_type not in routes:
            self._outline()
        self._routes = routes

    def _may_inline(self, handlers: int) -> bool:
        """Return True if a route with so many handlers should be part of ``publish``."""
        made_from = self._made_from
        unpatched = made_from is not None and made_from.publish is Publisher.publish
        return unpatched and handlers > self._inlined_handlers

    def _inline(self, event_type: type[Event], publish: Callable[..., None], handlers: int) -> None:
        """Make ``publish`` that of this bus. It was compiled from :data:`INLINED`."""
        self._outline()
        if "publish" in vars(type(self)):
            return  # patched
        self._inlined = update_wrapper(publish, Publisher.publish)
        self._inlined_type = event_type
        self._inlined_handlers = handlers
        type(self).publish = self._inlined  # type: ignore[method-assign]

    def _outline(self) -> None:
        """Have every event looked up again."""
        if self._inlined is None:
            return
        # Somebody may hold the bound method. A call that is under way keeps the code that it has.
        self._inlined.__code__ = Publisher.publish.__code__
        if vars(type(self)).get("publish") is self._inlined:
            del type(self).publish
        self._inlined = self._inlined_type = None
        self._inlined_handlers = 0
