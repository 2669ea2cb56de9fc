"""What an offloaded handler may see of an event: everything but live training state.

A detached event is made on the publishing thread at the subscription's priority slot, so nothing that happens later can
change it, and nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import torch

from eventloop.errors import EventDefinitionError, LiveFieldError
from eventloop.events import ABSENT, Event, Progress, name_of, registry, suggest, unspell
from eventloop.scalars import Gathered, fill, take_scalars
from eventloop.staged import IMMUTABLE, Copies, Owned, Staged, fences, stage

__all__ = ["Owned", "Staged", "detach", "detached_type", "from_json", "from_msgpack", "is_plain", "stage"]


def detach(event: Event) -> Event | Staged:
    """Return ``event`` without its live fields, for an offloaded handler.

    Events whose fields are all plain and immutable are returned as they are.
    """
    return _detacher(type(event))(event)


def is_plain(event_type: type[Event]) -> bool:
    """True if all fields of ``event_type`` are plain and immutable, so that :func:`detach` has nothing to do."""
    try:
        return all(plan == "keep" for plan in _plans(event_type).values())
    except EventDefinitionError:
        return False  # told when one is published


def from_json(data: bytes | str) -> Event:
    """Decode an event that :meth:`Event.to_json` encoded; live fields of the result raise, as in an offloaded handler.

    Raises:
        msgspec.ValidationError: not an event of a declared mount point.
        msgspec.DecodeError: not JSON.
    """
    event_type = _tagged(msgspec.json.decode(data, type=_Tag).event)
    # Not strict, so that floats may be spelled as strings: NaN and the infinities are.
    event = msgspec.convert(msgspec.json.decode(data), event_type, strict=False)
    changes = {
        name: unspell(value)
        for name, hint in _hints(event_type).items()
        if _plan(hint) != "live" and _untyped(hint) and isinstance(value := getattr(event, name), dict | list)
    }
    decoded: Event = msgspec.structs.replace(event, **changes) if changes else event
    return decoded


def from_msgpack(data: bytes) -> Event:
    """Decode an event that :meth:`Event.to_msgpack` encoded; raises msgspec.ValidationError if it is none."""
    event: Event = msgspec.msgpack.decode(data, type=_tagged(msgspec.msgpack.decode(data, type=_Tag).event))
    return event


@cache
def detached_type(event_type: type[Event]) -> type[Event]:
    """Return the subclass of ``event_type`` whose live fields raise :class:`LiveFieldError` when touched.

    The fields stay in the struct, unset, so the class encodes, decodes and passes isinstance like the original.
    """
    if "__detached__" in event_type.__dict__:
        return event_type
    namespace: dict[str, Any] = {
        name: _live_property(event_type, name) for name, plan in _plans(event_type).items() if plan == "live"
    }
    namespace |= {name: getattr(event_type, name) for name in ("__module__", "__qualname__", "__doc__")}
    meta: Any = type(event_type)
    made: type[Event] = meta(event_type.__name__, (event_type,), namespace | {"__detached__": True})
    return made


# ------------------------------------------------------------------------------------------------------ internals


class _Tag(msgspec.Struct):
    event: str


def _tagged(name: str) -> type[Event]:
    if name not in registry:
        raise msgspec.ValidationError(f"there is no mount point {name!r}{suggest(name)}")
    return detached_type(registry[name])


@cache
def _hints(event_type: type[Event]) -> dict[str, Any]:
    try:
        hints = get_type_hints(event_type, include_extras=True)
    except NameError as error:
        raise EventDefinitionError(
            f"the annotations of {event_type.__module__}.{event_type.__qualname__} cannot be resolved ({error}), so its live "
            "fields are not known; define the event and the types it names at the top level of a module"
        ) from error
    return {name: hints[name] for name in event_type.__struct_fields__}


def _plans(event_type: type[Event]) -> dict[str, str]:
    """Map each field to what detaching does with it: "live", "scalars", "keep" (immutable) or "copy"."""
    return {name: _plan(hint) for name, hint in _hints(event_type).items()}


def _plan(hint: Any) -> str:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra and "detach" in meta.extra:
            return str(meta.extra["detach"])
    parts = get_args(hint) or (hint,)
    immutable = all(part in IMMUTABLE or part is Progress or isinstance(part, str | int) for part in parts)
    return "keep" if immutable and get_origin(hint) not in (list, dict, set, tuple) else "copy"


def _untyped(hint: Any) -> bool:
    """True if decoding leaves values in it as they came."""
    parts = get_args(hint)
    return any(_untyped(part) for part in parts) if parts else hint in (Any, object, dict, list)


@cache
def _detacher(event_type: type[Event]) -> Callable[[Event], Event | Staged]:
    """Return the function that detaches events of one class: as little work as its fields ask for."""
    plans = _plans(event_type)
    if all(plan == "keep" for plan in plans.values()):
        return _same
    keep, copied, scalars = ([name for name in plans if plans[name] == kind] for kind in ("keep", "copy", "scalars"))
    target = detached_type(event_type)
    if copied or len(scalars) > 1:
        return _copying(target, keep, copied, scalars)
    return _taking(target, keep, scalars[0]) if scalars else _keeping(target, keep)


def _same(event: Event) -> Event:
    return event


def _keeping(target: type[Event], keep: list[str]) -> Callable[[Event], Event]:
    def detach_event(event: Event) -> Event:
        return target(**{name: getattr(event, name) for name in keep})

    return detach_event


def _taking(target: type[Event], keep: list[str], scalars: str) -> Callable[[Event], Staged]:
    """For events like AfterTrainIter: one mapping of outputs, the rest plain. The one that has to be fast.

    The consumer makes the new event; the publisher takes values only.
    """
    kept = attrgetter(*keep, scalars)
    fields = (*keep, scalars)

    def detach_event(event: Event) -> Staged:
        *values, outputs = kept(event) if keep else (kept(event),)
        copied: tuple[torch.cuda.Event, ...] = ()
        gathered: Gathered = []
        if outputs is not ABSENT:
            outputs, gathered = take_scalars(outputs)
            for _, tensor in gathered:
                if tensor.is_cuda:
                    copied += fences({tensor.device})
        values.append(outputs)
        return Staged((values, gathered), copied, finish)

    def finish(taken: tuple[list[Any], Gathered]) -> Event:
        values, gathered = taken
        fill(values[-1], gathered)
        return target(**dict(zip(fields, values, strict=True)))

    return detach_event


def _copying(target: type[Event], keep: list[str], copied: list[str], scalars: list[str]) -> Callable[[Event], Event | Staged]:
    def detach_event(event: Event) -> Event | Staged:
        fields = {name: getattr(event, name) for name in keep}
        copies = Copies()
        with torch.no_grad():
            fields |= {name: copies.take(getattr(event, name)) for name in copied}
        waiting: list[tuple[dict[str, Any], Gathered]] = []
        for name in scalars:
            outputs = fields[name] = getattr(event, name)
            if outputs is not ABSENT:
                fields[name], gathered = take_scalars(outputs)
                waiting.append((fields[name], gathered))
                copies.devices |= {values.device for _, values in gathered if values.is_cuda}

        def finish(fields: dict[str, Any]) -> Event:
            for taken, gathered in waiting:
                fill(taken, gathered)
            return target(**fields)

        if copies.devices or any(gathered for _, gathered in waiting):
            return Staged(fields, fences(copies.devices), finish)
        return target(**fields)

    return detach_event


def _live_property(event_type: type[Event], name: str) -> property:
    mount = name_of(event_type)

    def touch(_self: Event) -> Any:
        raise LiveFieldError(
            f"event.{name} of {mount} is live training state, which an offloaded handler cannot see: it would change "
            f"under it. Pick what you need when subscribing: capture=lambda event: event.{name}..., and the handler "
            "gets a copy made at its priority slot; or make the handler a plain function and let it run inline"
        )

    return property(touch, doc=f"Raises LiveFieldError: {name} is live training state.")
