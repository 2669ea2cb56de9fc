"""The bus: subscribe, publish, describe. Module ``lifecycle`` opens and closes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any

import msgspec
import torch

from trainbus.eventloop import notebook
from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.bus.describe import BusStats, Description, describe
from trainbus.eventloop.bus.guests import GuestHook, as_hook, check_distinct, is_same
from trainbus.eventloop.bus.hook import Hook, subscriptions_of
from trainbus.eventloop.bus.internal import Internal
from trainbus.eventloop.bus.lifecycle import forget_routes, log
from trainbus.eventloop.bus.overloads import TypedOn, decorates
from trainbus.eventloop.bus.priority import PriorityLike
from trainbus.eventloop.bus.recording import make_recorder
from trainbus.eventloop.bus.redefined import redefined_hooks
from trainbus.eventloop.bus.routes import Count, Route, compile_route, route_source
from trainbus.eventloop.bus.streams import Streams
from trainbus.eventloop.bus.subscription import Subscription, join_lanes, serve
from trainbus.eventloop.bus.watch import KINDS, Taps, Watch
from trainbus.eventloop.checks import check_options, check_value
from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import lineage, name_of, resolve
from trainbus.eventloop.offload import Backend, Runtime

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Ranges:
    """Whether each call of a handler is a range of torch's profiler. A process has one profiler."""

    on = False


_ranges = _Ranges()


def mark_ranges(on: bool) -> None:
    """Turn ranges of torch's profiler on or off: one for each call of a handler, on all buses, from the next publish on.

    A range has the name that :meth:`Bus.costs` prints. ``ProfilerHook`` does this while it profiles; do it around a
    ``torch.profiler.profile`` of your own.
    """
    check_value("on", on, bool)
    _ranges.on = on
    forget_routes()


class Bus(TypedOn, Streams):
    """An in-process event bus. Plain handlers run inline, in order of priority; async and blocking ones are offloaded.

    Inline handlers run at any time. Offloaded handlers need an open bus:

    - ``with bus:`` runs async handlers in an event loop on a thread of the bus. ``Run`` and ``TrainLoop`` open it in this way.
    - ``async with bus:`` runs them as tasks of the surrounding event loop, asyncio's or trio's.

    A clean exit waits until everything is delivered. After the timeout the bus cancels async handlers, and abandons a handler
    that does not end, with a warning that names it.

    Args:
        hooks: hooks to :meth:`add`.
        backend: event loop of the bus's thread, ``"asyncio"`` (on uvloop if it is installed) or ``"trio"``.
        timing: measure every call, for :meth:`costs` and ``stats.seconds``; it takes about 0.3 µs a handler.
        drain_timeout: seconds that a clean exit waits for offloaded handlers before it raises OffloadError.
        abort_timeout: seconds that an exit by exception waits; it then logs undelivered events instead of raising.
    """

    @check_options
    def __init__(
        self,
        *hooks: object,
        backend: Backend = "asyncio",
        timing: bool = False,
        drain_timeout: Seconds = 60.0,
        abort_timeout: Seconds = 5.0,
    ) -> None:
        super().__init__(backend=backend, drain_timeout=drain_timeout, abort_timeout=abort_timeout)
        self.internal = Internal(self, self._known.__getitem__)
        """What the rest of trainbus uses; it may change in any version."""
        for part in ("bridges", "hooks"):  # now, as an open bus may be on an event loop, which must not import
            load_builtin(part)
        self.hooks: tuple[Hook, ...] = ()
        """The hooks that were added, in order."""
        self._stateful: dict[str, Hook] = {}  # by label
        self._counts: dict[str, Count] = {}
        self._recorder: Any = None
        self._rank, self._world_size = 0, 1
        self._joined = 0
        self._watches: list[Watch] = []
        self._taps = Taps()
        self.timing = timing
        self.add(*hooks)

    def __repr__(self) -> str:
        return f"Bus({', '.join(hook.label for hook in self.hooks)}) with {len(self.subscriptions)} subscriptions, {self.state}"

    def _repr_html_(self) -> str:
        facts = {"state": self.state, "hooks": ", ".join(hook.label for hook in self.hooks) or "none"}
        return notebook.card("Bus", facts, self.describe().html())

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """All subscriptions in dispatch order: by priority, then by registration."""
        with self._lock:
            known = self._directory.known
            return self._directory.ordered() if known is None else known

    # ----------------------------------------------------------------------------------------------- subscribing

    def _on(self, events: Sequence[type[Event] | str], handler: Callable[..., Any], options: dict[str, Any]) -> Any:
        types = tuple(dict.fromkeys(map(resolve, events)))
        if handler is decorates:

            def subscribe(function: Callable[..., Any]) -> Callable[..., Any]:
                self._on(types, function, options)
                return function

            return subscribe
        subscription = Subscription(self, types, handler, **options)
        with self._lock:
            if old := self._directory.redefined_by(handler):
                line = "a handler was replaced, because it was defined again"
                self._later.append(partial(log.info, line, handler=old[0].label))
                self._remove(*old)
            self._insert([subscription])
        self._started([subscription])
        return subscription

    def off(self, what: object) -> None:
        """Cancel every subscription of a function or a hook, or one :class:`Subscription`; raises SubscribeError if none."""
        with self._lock:
            gone = self._directory.of(what)
            if not gone:
                raise SubscribeError(f"{what!r} is not subscribed to this bus")
            if any(one.hook is not None for one in gone):
                self._keep(hook for hook in self.hooks if not is_same(hook, what))
            self._remove(*gone)
        self._unlocked()

    def add(self, *hooks: object, priority: PriorityLike | None = None) -> None:
        """Subscribe the mount-point methods of hooks: all hooks, or none if one is invalid, which is a SubscribeError.

        A ``priority`` applies to all their methods and overrides those of the class and ``@mount``. Hooks with state need
        different names.

        In a notebook, a hook whose class a cell has defined again replaces the old one of the same name.

        Hooks of another system are guests: the bus adds an adapter that calls them; see :mod:`trainbus.eventloop.bus.guests`.
        """
        self._add([(hook, priority) for hook in hooks])

    def watch(self, model: torch.nn.Module, *patterns: str) -> Watch:
        """Publish the module events of submodules: ``before_`` and ``after_module_forward``, ``_module_backward``.

        A module has no torch hook while its events have no subscriber. Events are published while the bus is open, and also
        while it is not if all subscribers are inline. Filters count the events of all modules together.

        Backward events have the limits of torch's full backward hooks:

        - An in-place operation on inputs or outputs of the module (``ReLU(inplace=True)`` right before or after it) raises an
          error.
        - The gradient of a tensor that does not require gradients is None.
        - On a GPU, autograd's thread publishes them.

        ``torch.compile`` has a graph break at each watched module, so ``fullgraph=True`` is an error. The first subscription
        after compiling recompiles the model once.

        Args:
            model: a model, also inside a wrapper (``torch.compile``, data parallel), which names do not contain. Held weakly.
            *patterns: patterns of qualified names for :func:`fnmatch.fnmatchcase`: ``"encoder"`` is one module, ``"encoder.*"``
                all modules below it (``*`` also matches dots). Without patterns: all modules, and the model itself as ``""``.

        Raises:
            SubscribeError: a pattern matches nothing, or only containers that are never called.
        """
        watch = Watch(model, patterns, self._unwatch)
        with self._lock:
            self._watches.append(watch)
            self._attach()
        self._unlocked()
        return watch

    # ------------------------------------------------------------------------------------------------ publishing

    def publish(self, event: Event) -> None:
        """Call the inline handlers of ``event`` and queue it for the offloaded ones, in order of priority.

        Safe from any thread; never awaits.

        Raises:
            Exception: the error of an inline handler, with a note that names handler, mount point and iteration; or of an
                offloaded handler with ``on_error="raise"`` since the last publish.
            LaneClosedError: an offloaded handler is subscribed and the bus is not open.
        """
        try:
            route = self._routes[event.__class__]  # 4 ns faster than type(event), of 125 without a subscriber
        except KeyError:
            route = self._publish_unrouted  # called below, so that its errors do not have this KeyError as context
        if route is not None:
            route(event)

    def wants(self, event: type[Event] | str) -> bool:
        """Return True if publishing ``event`` does anything; False lets a caller skip building it."""
        try:
            return self._routes[event] is not None  # type: ignore[index]  # names are looked up below
        except KeyError:
            # Without a subscriber, publishing may still raise the error of an offloaded handler.
            return self._find_route(resolve(event)) is not None or self.internal.raises_here()

    # ------------------------------------------------------------------------------------------------ looking in

    def describe(self, *, stats: bool = False) -> Description:
        """Return the hook table in the order of a run, to print (rich or plain) or to read (``rows``)."""
        check_value("stats", stats, bool)
        return describe(self.subscriptions, stats=stats or self.timing, ranks=self._world_size > 1)

    def explain(self, event: type[Event] | str) -> str:
        """Return the source of the function that is compiled for ``event``."""
        event_type = resolve(event)
        return route_source(event_type, self._subscribers_of(event_type), self._recorder, ranges=_ranges.on)

    def stats(self) -> BusStats:
        """Return the counts of every subscription, to print as a table or to read as a dict."""
        return BusStats((subscription, subscription.stats) for subscription in self.subscriptions)

    @property
    def timing(self) -> bool:
        """True if calls are measured. A change takes effect with the next publish."""
        return self._recorder is not None

    @timing.setter
    def timing(self, on: bool) -> None:
        check_value("timing", on, bool)
        with self._lock:
            if on is self.timing:
                return
            recorder = make_recorder(self) if on else None
            former, self._recorder = self._recorder, recorder
            for subscription in self.subscriptions:
                self._measure(subscription)
            self._forget_routes()
            if self.state != "idle" and recorder is not None:
                self._later += [self._record, self._join_ranks]
        self._unlocked()
        if former is not None:
            former.stop()

    def span(self, name: str, method: str = "") -> AbstractContextManager[None]:
        """Return a context manager that measures a block as a part ``name`` of :meth:`costs`, if ``timing`` is on.

        With ``method``, the block is a call of another library's callback, shown like that of a hook.
        """
        if self._recorder is None:
            return nullcontext()
        span: AbstractContextManager[None] = self._recorder.call(name, method) if method else self._recorder.span(name)
        return span

    # ---------------------------------------------------------------------------------------------- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all hooks by name, and the publish counts that filters compare."""
        hooks = {label: hook.state_dict() for label, hook in self._stateful.items()}
        return {"hooks": hooks, "publishes": {name: count.value for name, count in self._counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every hook; warn about a hook without saved state, and about state without a hook."""
        saved = dict(state["hooks"])
        for label, hook in self._stateful.items():
            if label in saved:
                hook.load_state_dict(saved.pop(label))
            else:
                log.warning("the checkpoint has no state for this hook; it starts anew", id="no-state-for-hook", hook=label)
        if saved:
            log.warning(
                "the checkpoint has state of hooks that are not on the bus", id="state-of-unknown-hooks", hooks=sorted(saved)
            )
        for name, value in state["publishes"].items():
            self._counts.setdefault(name, Count()).value = value

    # -------------------------------------------------------------------------------------------------- internals

    def _remove(self, *subscriptions: Subscription) -> None:
        """End subscriptions that are still active."""
        with self._lock:
            gone = [one for one in subscriptions if one.active]
            for subscription in gone:
                self._directory.discard(subscription)
            self._changed(gone)
            for subscription in gone:
                subscription.ended()
        self._unlocked()

    def _add(self, chosen: Iterable[tuple[object, PriorityLike | None]]) -> None:
        """Add hooks with a priority each (None for the hook's own): all hooks, or none if one is invalid."""
        hooks: list[Hook] = []
        subscriptions: list[Subscription] = []
        for given, priority in chosen:
            hook = as_hook(given)
            hooks.append(hook)
            if priority is not None and isinstance(hook, GuestHook):
                hook.priority, priority = priority, None  # an adapter derives the priorities of its methods from it
            changed = {} if priority is None else {"priority": priority}
            own = [Subscription(self, on, method, hook, **options | changed) for on, method, options in subscriptions_of(hook)]
            join_lanes(hook, own)
            subscriptions += own
        with self._lock:
            replaced = redefined_hooks(hooks, self.hooks)
            check_distinct([*(one for one in self.hooks if one not in replaced), *hooks])
            for old in replaced:
                line = "a hook was replaced, because its class was defined again"
                self._later.append(partial(log.info, line, hook=old.label))
                self.off(old)
            self._insert(subscriptions)
            self._keep((*self.hooks, *hooks))
        self._started(subscriptions, hooks)
        if any(hook.timing for hook in hooks):
            self.timing = True

    def _keep(self, hooks: Iterable[Hook]) -> None:
        self.hooks = tuple(hooks)
        self._stateful = {hook.label: hook for hook in self.hooks if hook.stateful}

    def _insert(self, new: list[Subscription]) -> None:
        with self._lock:
            for subscription in new:
                self._measure(subscription)
            try:
                if self._runtime is not None:
                    serve(self._runtime, new)
            except BaseException:
                for subscription in new:
                    subscription.ended()
                raise
            for subscription in new:
                self._directory.add(subscription)
            self._changed(new)
            self._later += [partial(bridge.warn_of_missing, new) for bridge in self.internal.bridges]

    def _started(self, new: list[Subscription], hooks: Collection[Hook] = ()) -> None:
        """Start the consumers of subscriptions that were inserted, or remove them and their hooks."""
        try:
            self._unlocked()
        except BaseException:
            with self._lock:
                self._keep(one for one in self.hooks if one not in hooks)
            self._remove(*new)
            raise

    def _changed(self, changed: list[Subscription]) -> None:
        """Drop the routes of subscriptions that came or went. A publish in progress keeps its route."""
        self._changes += 1
        names = {name for one in changed for name in one.mount_points}
        for kind in list(self._routes):  # a copy, because a signal handler may publish
            if not names.isdisjoint(lineage(kind)):
                self._forget(kind)
        self._attach()

    def _attach(self) -> None:
        """Attach hooks to watched modules for the events that have subscribers and can be delivered; read spans once open."""
        if self._recorder is not None and self.state != "idle":
            self._later.append(self._record)
        if self._watches or self._taps:
            # On an idle bus an offloaded handler has no consumer, and calling the model must not fail for that.
            unserved = ("async", "thread", "process") if self.state == "idle" else ()
            found = {kind: {one.mode for one in self._subscribers_of(kind)} for kind in KINDS}
            kinds = [kind for kind, modes in found.items() if modes and modes.isdisjoint(unserved)]
            if self._taps.attach(self._watches, kinds, self.publish):
                # Code that torch.compile made from a model without hooks does not check for new hooks.
                self._later.append(torch.compiler.reset)

    def _record(self) -> None:
        """Have the recorder read its spans while the bus is open."""
        if (recorder := self._recorder) is None:
            return
        if self.state != "idle":
            recorder.start()
        if self.state == "idle":  # also where it was closed meanwhile
            recorder.stop()

    def _join_ranks(self) -> None:
        """Compare costs between the ranks until the bus closes."""
        if self._recorder is not None and self._world_size > 1 and self.state == "open":
            self._recorder.join_ranks(str(self._joined), self._rank, self._world_size)

    def _measure(self, subscription: Subscription) -> None:
        if subscription.lane is not None:
            subscription.lane.meter = None if self._recorder is None else self._recorder.meter_of(subscription)

    def _shut(self, runtime: Runtime, grace: float, *, abandon: bool) -> dict[str, int]:
        try:
            return super()._shut(runtime, grace, abandon=abandon)
        finally:
            # Without the lock, because the thread that it waits for publishes costs_measured and may take the lock.
            if self._recorder is not None:
                self._recorder.stop()

    def _become_inert(self) -> None:
        """Disable this copy of a bus and its recorder in a forked child."""
        if self._recorder is not None:
            self._recorder.become_inert()
        super()._become_inert()

    def _unwatch(self, watch: Watch) -> None:
        with self._lock:
            self._watches = [one for one in self._watches if one is not watch]
            self._attach()
        self._unlocked()

    def _subscribers_of(self, event_type: type[Event]) -> list[Subscription]:
        with self._lock:
            found = self._directory.hearing(lineage(event_type))
        return [one for one in found if not self._rank or one.ranks == "all"]

    def _publish_unrouted(self, event: Event) -> None:
        """Publish an event whose route is not cached, after raising errors of offloaded handlers."""
        event_type: type = type(event)
        if not issubclass(event_type, Event):
            what = event_type.__name__
            if isinstance(event, type):
                what = f"a class: bus.publish({event.__name__}(...)), or run.publish({event.__name__}, ...), which makes one"
            raise TypeError(f"bus.publish takes an event, an instance of an Event class, not {what}")
        self.internal.raise_failures()
        route = self._find_route(event_type)
        if route is not None:
            route(event)

    def _find_route(self, event_type: type[Event]) -> Route | None:
        with self._lock:
            while not self._inert:
                changes = self._changes
                found = self._subscribers_of(event_type)
                count = self._counts.setdefault(name_of(event_type), Count())
                recorder = self._recorder
                needed = bool(found) or (recorder is not None and recorder.needs(event_type))
                route = compile_route(event_type, found, count, recorder, ranges=_ranges.on) if needed else None
                if not self.internal.failures:
                    self._routes[event_type] = self._known[event_type] = route
                if self._changes == changes:
                    return route
                self._forget(event_type)  # the handler of a signal has subscribed in between
            return None

    def _forget(self, event_type: type) -> None:
        self._known.pop(event_type, None)
        self._routes.pop(event_type, None)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a bus cannot be copied or pickled, because it has threads and subscribers; create a new bus instead")
