"""``Bus.on``, ``Bus.stream`` and ``Bus.costs``. Their types are in ``overloads.pyi``, which is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainbus.eventloop.errors import BusStateError
from trainbus.eventloop.events import Event


def decorates(event: Any) -> None:
    """Placeholder for the handler if ``bus.on`` is used as a decorator; None may be given by mistake."""


class TypedOn:
    """Declare ``on`` and ``stream`` for type checkers, so that a handler of another event is a type error.

    ``costs`` returns what a room above the bus declares.
    """

    _on: Callable[..., Any]
    _stream: Callable[..., Any]
    _recorder: Any

    def on(self, event: type[Event] | str, /, *more: Any, **options: Any) -> Any:
        """Subscribe a handler to an event class or mount-point name, or to several: ``bus.on(event, *more, handler)``.

        As a decorator (``@bus.on("after_train_iter", priority=50)``) it returns the function unchanged; called with a
        function it returns a :class:`Subscription`. Plain functions run inline, on the publisher's thread; async ones on
        the bus's event loop; ``offload="thread"`` gives blocking work a thread of its own, ``offload="process"`` a process.

        Args:
            event: the class or the name; ``Event`` hears everything, a group (``"after_iter"``) all its events.
            *more: further mount points, in the order of an offloaded handler's one lane. Then, unless this is a decorator,
                the handler. It takes one argument: the event, what ``capture`` returned, or with ``batch`` a list of either.
            **options: see :class:`trainbus.eventloop.bus.HandlerOptions`. For an offloaded handler also ``capture``, which
                picks on the publisher's thread what the handler gets a copy of, and ``batch``, the most events per call.

        Raises:
            SubscribeError: an option that cannot work, or (UnknownEventError) a name that no event declares.
        """
        *events, last = (event, *more)
        if not more or isinstance(last, str) or (isinstance(last, type) and issubclass(last, Event)):
            return self._on((*events, last), decorates, options)
        return self._on(events, last, options)

    def stream(self, event: type[Event] | str, /, *more: type[Event] | str, **options: Any) -> Any:
        """Subscribe by iterating: ``async for event in bus.stream("after_train_iter", every=10)``, in asyncio or trio.

        The stream yields what an offloaded handler would get, from this call until the bus closes or the stream is left
        (:class:`trainbus.eventloop.Stream`). The bus need not be open yet. On a bus that has closed and is not open again, the
        iteration ends at once. A slow reader does not hold up the training: a full queue drops its oldest events by default.

        With ``replay=100`` a stream begins with the last 100 events. The bus keeps events only for such streams: from the
        first one with the same mount points, filters, priority and ``capture`` on, until the last one is left. To begin
        earlier, and to keep them in between, call :meth:`Bus.keep` with the same arguments. These streams share their events,
        so do not change them.

        Args:
            event: as for :meth:`on`.
            *more: further mount points, in the order in which their events are published.
            **options: see :class:`trainbus.eventloop.bus.StreamOptions`, and ``capture``.

        Raises:
            BusStateError: no event loop is running here.
            SubscribeError: as for :meth:`on`, or ``replay`` is larger than ``queue``.
        """
        return self._stream((event, *more), options)

    def costs(self) -> Any:
        """Return where the time of the run went, to print or to read; see :class:`trainbus.observe.Costs`.

        Raises:
            BusStateError: nothing was measured; create the bus with ``Bus(timing=True)``.
        """
        if self._recorder is None:
            raise BusStateError(
                "bus.costs() measured nothing: create the bus with Bus(timing=True), or set bus.timing = True before the run"
            )
        return self._recorder.costs()
