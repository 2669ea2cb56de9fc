"""The subscriptions of one event type, compiled to one function.

A route is straight-line code: a call per subscription, an ``if`` only where a filter needs one, a clock only while timing is
on. Handlers are globals of the function, which has a namespace of its own. As constants of its code they would be a little
faster still, but the garbage collector does not look into code objects: a handler that refers to its bus (most do, by way of
their run) would keep bus, model and all alive for ever.

The try block costs nothing until something raises (CPython ≥ 3.11 keeps exception tables). Which subscription raised is
read from the line number of the route's own frame, so the failing handler needs no bookkeeping on the way.
"""

from __future__ import annotations

import builtins
import linecache
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count as counter
from time import perf_counter_ns
from typing import Any, Protocol

from eventloop.bus.filters import Filter, count_of
from eventloop.bus.priority import Priority
from eventloop.errors import stopped
from eventloop.events import Event
from eventloop.events.event import moment, name_of

Route = Callable[[Any], None]

FUNCTION = """\
def {name}(event):
    {route}
"""
"""The source of a route by itself."""

_serial = counter(1)


class Entry(Protocol):
    """What a route needs to know of a subscription."""

    def call_for(self, event_type: type[Event]) -> Callable[[Any], object]:
        """Return the handler of an inline subscription, the hand-off to its lane of an offloaded one."""

    @property
    def label(self) -> str:
        """Name for comments and errors."""

    @property
    def location(self) -> str:
        """File and line of the handler."""

    @property
    def priority(self) -> int:
        """0 to 100."""

    @property
    def filter(self) -> Filter | None:
        """The condition, if there is one."""

    @property
    def mode(self) -> str:
        """``"inline"`` or where it is offloaded to."""

    @property
    def isolated(self) -> bool:
        """True if an error of this handler is reported instead of raised."""

    def isolate(self, error: Exception, event: Event) -> None:
        """Take an error of an isolated handler."""

    def spent(self, nanoseconds: int) -> None:
        """Take the time of one call, while timing is on."""


class Source(str):
    """Generated source; shows itself as it is at an interactive prompt."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Count:
    """Counts the publishes of one event type; 1-based."""

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """Count one more, and return the count."""
        with self._lock:
            self.value += 1
            return self.value


def compile_route(
    event_type: type[Event],
    entries: Sequence[Entry],
    *,
    count: Callable[[], int],
    timing: bool = False,
    template: str = FUNCTION,
) -> Callable[..., None]:
    """Return the function that calls ``entries`` in their order.

    Args:
        event_type: the event; its ``counts`` says what filters compare.
        entries: subscriptions in the order of their priorities.
        count: next value of the publish counter; called only where a filter compares it.
        timing: measure each call.
        template: source of the function that the route is part of; knows its ``event`` and the ``event_type``.
    """
    writer = _Writer(event_type, entries, timing=timing, template=template)
    source = writer.source()
    filename = f"<trainbus {name_of(event_type)} #{next(_serial)}>"
    namespace = {
        # C code that imports or warns (pickle.dumps; "never awaited") looks these up in the frame that called it.
        "__builtins__": builtins.__dict__,
        "__name__": __name__,
        "event_type": event_type,
        "count": count,
        "clock": perf_counter_ns,
        "blame": _blame(entries, writer.owners),
    }
    module = compile(source, filename, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, types.CodeType))
    # Not executed: a function in its own globals would be a cycle, and replaced routes would wait for the garbage collector.
    route = types.FunctionType(code, namespace | writer.bound)
    # Tracebacks show the generated line with its comment, which names the user's function and where it is.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(route, linecache.cache.pop, filename, None).atexit = False
    return route


def route_source(event_type: type[Event], entries: Sequence[Entry], *, timing: bool = False) -> Source:
    """Return the source that :func:`compile_route` compiles for these arguments."""
    return Source(_Writer(event_type, entries, timing=timing, template=FUNCTION).source())


class _Writer:
    """Writes a route's source and remembers which line belongs to which entry."""

    def __init__(self, event_type: type[Event], entries: Sequence[Entry], *, timing: bool, template: str) -> None:
        self._event_type = event_type
        self._timing = timing
        self.bound: dict[str, Any] = {}
        self.owners: dict[int, int] = {}
        before, after = template.replace("{name}", name_of(event_type)).split("{route}\n")
        *self._lines, self._margin = before.split("\n")
        self._write(entries)
        self._lines += after.splitlines()

    def source(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _write(self, entries: Sequence[Entry]) -> None:
        if not entries:
            self._put("pass  # nobody listens")
            return
        self._put("try:")
        if any(entry.filter is not None and entry.filter.counted for entry in entries):
            self._put(f"    v = {count_of(self._event_type)}")
        for index, entry in enumerate(entries):
            first = len(self._lines) + 1
            self._put(*_indent(self._entry(index, entry)))
            self.owners.update(dict.fromkeys(range(first, len(self._lines) + 1), index))
        self._put("except Exception as error:", "    blame(error, event)", "    raise")

    def _put(self, *lines: str) -> None:
        self._lines += [self._margin + line for line in lines]

    def _entry(self, index: int, entry: Entry) -> list[str]:
        terms, bound = entry.filter.terms(str(index)) if entry.filter is not None else ([], {})
        call = f"{_identifier(entry.label)}_{index}"
        self.bound |= bound | {call: entry.call_for(self._event_type)}
        block = [f"{call}(event)  # {_comment(entry)}"]
        if self._timing:
            self.bound[f"_spent_{index}"] = entry.spent
            block = ["started = clock()", *block, f"_spent_{index}(clock() - started)"]
        if terms:
            block = [f"if {' and '.join(terms)}:", *_indent(block)]
        if entry.isolated:
            self.bound[f"_isolate_{index}"] = entry.isolate
            handled = [f"_isolate_{index}(error, event)"]
            block = ["try:", *_indent(block), "except Exception as error:", *_indent(handled)]
        return block


def annotate(error: BaseException, entry: Entry, event: Event) -> None:
    """Add a note to ``error`` that says whose it is, where and when."""
    where = f"{entry.label} ({entry.mode}, priority {entry.priority}, {entry.location}) at "
    where += moment(type(event), getattr(event, "progress", None))
    error.add_note(f"raised later, in {where}" if is_offloaded(error) else f"in {where}")


def note_offloaded(error: BaseException, entry: Entry, events: str) -> None:
    """Add a note to ``error`` that says which offloaded handler raised it, and at which moment."""
    note = f"{_OFFLOADED} ({entry.mode}) handler {entry.label} of "
    if not any(other.startswith(note) for other in getattr(error, "__notes__", ())):  # it may raise the same object every time
        error.add_note(f"{note}{events}, {entry.location}")


def is_offloaded(error: BaseException) -> bool:
    """True for what an offloaded handler raised, which a later publish raises again wherever that happens to be."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_offloaded, error.exceptions))
    return any(note.startswith(_OFFLOADED) for note in getattr(error, "__notes__", ()))


_OFFLOADED = "in the offloaded"


def _blame(entries: Sequence[Entry], owners: Mapping[int, int]) -> Callable[[Exception, Event], None]:
    def find(error: Exception, event: Event) -> None:
        # The innermost traceback entry of the handler is further down; the first one is the route's own frame.
        index = owners.get(error.__traceback__.tb_lineno) if error.__traceback__ is not None else None
        if index is None:
            return
        entry = entries[index]
        if isinstance(error, StopIteration | StopAsyncIteration):  # by design no error to the iterators that publish
            error = stopped(error, f"{entry.label} of {name_of(type(event))}")
            annotate(error, entry, event)
            raise error
        annotate(error, entry, event)

    return find


def _identifier(label: str) -> str:
    """Return ``label`` as the beginning of a name. Names of ours begin with an underscore or have no number at the end."""
    return re.sub(r"\W", "_", label, flags=re.ASCII) if re.match("[A-Za-z]", label) else "handler"


def _comment(entry: Entry) -> str:
    text = f"{entry.priority} {Priority.label(entry.priority)}: {entry.label}, {entry.location}"
    # One line, whatever a hook is named and wherever its file is.
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


def _indent(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]
