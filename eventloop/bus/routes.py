"""The subscriptions of one event type, compiled to one function.

A route is straight-line code: a call per subscription, an ``if`` only for a filter, a clock only while the bus measures.
Handlers are globals of the function, which has its own namespace. As constants of its code they would be slightly faster, but
the garbage collector does not traverse code objects: a handler that refers to its bus would keep bus and model alive for
ever.

The try block costs nothing until something raises (CPython ≥ 3.11 keeps exception tables). Which subscription raised is
read from the line number of the route's own frame, so the failing handler needs no bookkeeping on the way.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import linecache
import re
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol

from torch.profiler import record_function

from trainbus.eventloop.bus.filters import COUNTS
from trainbus.eventloop.bus.priority import Priority
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.eventloop.bus.titles import title
from trainbus.eventloop.checks import check_returned
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import name_of
from trainbus.eventloop.measure.spans import packer

Route = Callable[[Any], None]
Owner = Callable[[int], Subscription | None]
"""Returns the subscription that a line of a route calls."""

OWNER = "__trainbus_owner__"  # name of a route's ``Owner`` among its globals

_serial = itertools.count(1)


class SpanRecorder(Protocol):
    """Records publishes: ``note(pack(number(), id, thread(), began, *ends, ended))``.

    See :mod:`trainbus.eventloop.measure.spans`.
    """

    note: Callable[[bytes], object]
    number: Callable[[], int]
    thread: Callable[[], int]

    def mark(self, name: int, event: Event | None = None) -> None:
        """Record the moment of an event without subscribers, by its id."""

    def id_of_publish(self, event_type: type[Event], heard: Sequence[Subscription]) -> int:
        """Return the id of the records of a route."""


class TimestampRoute(partial[None]):
    """The route of an event without subscribers that the recorder notes the time of; it can be called without the event."""


class Count:
    """Counts the publishes of one event type, from 1."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.RLock()  # re-entrant: the handler of a signal may publish in here

    def next(self) -> int:
        """Count one more publish, and return the count."""
        with self._lock:
            self.value += 1
            return self.value


def compile_route(
    event_type: type[Event], heard: Sequence[Subscription], count: Count, recorder: SpanRecorder | None, *, ranges: bool = False
) -> Route:
    """Return the function that calls ``heard`` in the order of their priorities.

    ``count`` counts publishes; it increases only if a filter compares it. A ``recorder`` gets the span of the event and of
    each call that does not raise. With ``ranges``, each call is a range of torch's profiler.
    """
    if not heard and recorder is not None:
        return TimestampRoute(recorder.mark, recorder.id_of_publish(event_type, heard))
    lines, bound, owners = _write(event_type, heard, recorder, ranges=ranges)
    source = "\n".join(lines) + "\n"
    filename = f"<trainbus {name_of(event_type)} #{next(_serial)}>"
    namespace = {
        # C code that imports or warns (pickle.dumps; "never awaited") looks these up in the frame that called it.
        "__builtins__": builtins.__dict__,
        "__name__": __name__,
        "count": count.next,
        OWNER: (owner := _owner(heard, owners)),
        "blame": _blame(owner),
        "check": check_returned,
        "record_function": record_function,
    }
    if recorder is not None:
        named = {name: getattr(recorder, name) for name in ("note", "number", "thread")}
        namespace |= {"clock": perf_counter_ns, "pack": packer(len(heard)), **named}
    module = compile(source, filename, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, types.CodeType))
    # Not executed, because a function in its own globals would be a reference cycle.
    route = types.FunctionType(code, namespace | bound)
    # Tracebacks show the generated line with its comment, which names the user's function and its location.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(route, linecache.cache.pop, filename, None).atexit = False
    return route


def route_source(
    event_type: type[Event], heard: Sequence[Subscription], recorder: SpanRecorder | None, *, ranges: bool = False
) -> str:
    """Return the source that :func:`compile_route` compiles for these arguments."""
    if not heard:
        return f"def {name_of(event_type)}(event):\n    {'pass' if recorder is None else 'mark()'}  # no subscriber\n"
    return "\n".join(_write(event_type, heard, recorder, ranges=ranges)[0]) + "\n"


def _write(
    event_type: type[Event], heard: Sequence[Subscription], recorder: SpanRecorder | None, *, ranges: bool
) -> tuple[list[str], dict[str, Any], dict[int, int]]:
    """Return a route's lines, the objects that they name, and the subscription's index by line number."""
    lines = [f"def {name_of(event_type)}(event):"]
    ends = ", ".join([*(f"_end_{index}" for index in range(len(heard))), "ended"])
    if recorder is not None:
        lines += ["    began = clock()", f"    {ends.replace(',', ' =')} = 0"]
    lines.append("    try:")
    bound: dict[str, Any] = {}
    owners: dict[int, int] = {}
    if any(one.filter is not None and one.filter.counted for one in heard):
        lines.append(f"        v = {COUNTS[event_type.counts]}")
    for index, one in enumerate(heard):
        first = len(lines) + 1
        block, names = _write_call(index, one, event_type, timed=recorder is not None, ranges=ranges)
        lines += _indent(block, by=8)
        bound |= names
        owners.update(dict.fromkeys(range(first, len(lines) + 1), index))
    if recorder is not None:
        lines.append("        ended = clock()")
    lines += ["    except Exception as error:", "        blame(error, event)", "        raise"]
    if recorder is not None:
        number = recorder.id_of_publish(event_type, heard)
        lines += ["    finally:", f"        note(pack(number(), {number}, thread(), began, {ends}))"]
    return lines, bound, owners


def _write_call(
    index: int, one: Subscription, event_type: type[Event], *, timed: bool, ranges: bool
) -> tuple[list[str], dict[str, Any]]:
    terms, bound = one.filter.terms(str(index)) if one.filter is not None else ([], {})
    # The route's own names begin with an underscore or do not end with a number.
    name = re.sub(r"\W", "_", one.label, flags=re.ASCII) if re.match("[A-Za-z]", one.label) else "handler"
    bound[f"{name}_{index}"] = one.call_for(event_type)
    # One line, because names of hooks and paths may contain newlines.
    comment = " ".join(f"{one.priority} {Priority.label(one.priority)}: {one.label}, {one.location}".split())
    call = f"{name}_{index}(event)  # {comment.encode('utf-8', 'backslashreplace').decode()}"
    # Two lines: `got := ...` in the condition takes twice the time. A handler annotated with `-> None` pays nothing.
    block = [call] if one.returns_no_coroutine else [f"got = {call}", "if got is not None: check(got)"]
    if ranges:
        block = [f"with record_function({title(one.label, name_of(event_type))!r}):", *_indent(block)]
    if timed:
        block.append(f"_end_{index} = clock()")
    if terms:
        block = [f"if {' and '.join(terms)}:", *_indent(block)]
    if one.on_error == "log":
        bound[f"_isolate_{index}"] = one.isolate
        block = ["try:", *_indent(block), "except Exception as error:", f"    _isolate_{index}(error, event)"]
        if timed:
            block.append(f"    _end_{index} = -clock()  # no call that counts, and the next one begins here")
    return block, bound


def _owner(heard: Sequence[Subscription], owners: Mapping[int, int]) -> Owner:
    def find(line: int) -> Subscription | None:
        index = owners.get(line)
        return None if index is None else heard[index]

    return find


def _blame(owner: Owner) -> Callable[[Exception, Event], None]:
    def find(error: Exception, event: Event) -> None:
        # The first traceback entry is the route's own frame.
        one = owner(error.__traceback__.tb_lineno) if error.__traceback__ is not None else None
        if one is not None:
            one.blame(error, event)

    return find


def caller() -> Subscription | None:
    """Return the subscription whose handler calls this, in the innermost publish on this thread; None outside of handlers.

    Routes keep no note of what they call, so it is read from their frames; this takes some microseconds.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if (owner := frame.f_globals.get(OWNER)) is not None:
            found: Subscription | None = owner(frame.f_lineno)
            return found
        frame = frame.f_back
    return None


def _indent(lines: Sequence[str], by: int = 4) -> list[str]:
    return [" " * by + line for line in lines]
