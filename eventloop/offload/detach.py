"""Detached events: events for offloaded handlers, with everything but live training state.

The publishing thread makes them at the subscription's priority slot, so nothing that happens later can change them. Nothing
here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, get_args, get_origin

import msgspec
import torch

from eventloop.errors import EventDefinitionError, LiveFieldError
from eventloop.events import Event, Progress
from eventloop.events.event import ABSENT, hints_of, mixed_fields, name_of, registry, suggest, unspell
from eventloop.offload.scalars import DeviceStack, ScalarTaker, Taken
from eventloop.offload.snapshot import IMMUTABLE, Copies, Snapshot

Detach = Callable[[Any], Event | Snapshot]


def detacher() -> Detach:
    """Return a function that takes the live fields off events, for the offloaded handler of one lane.

    Events whose fields are all plain and immutable are returned as they are.
    """
    known: dict[type[Event], Detach] = {}

    def detach_one(event: Event) -> Event | Snapshot:
        kind = type(event)
        found = known.get(kind)
        if found is None:
            found = known[kind] = _make(kind)
        return found(event)

    return detach_one


def is_plain(event_type: type[Event]) -> bool:
    """Return True if all fields of ``event_type`` are plain and immutable, so that detaching an event changes nothing."""
    try:
        return all(plan == "keep" for plan in _plans(event_type).values())
    except EventDefinitionError:
        return False  # an error when one is published


def from_json(data: bytes | str) -> Event:
    """Decode an event that :meth:`Event.to_json` encoded; live fields of the result raise, as in an offloaded handler.

    Raises:
        msgspec.ValidationError: not an event of a declared mount point.
        msgspec.DecodeError: not JSON.
    """
    event_type = _tagged(msgspec.json.decode(data, type=_Tag).event)
    # Not strict, so that floats may be spelled as strings: NaN and the infinities are.
    event = msgspec.convert(msgspec.json.decode(data), event_type, strict=False)
    plans = _plans(event_type)
    changes = {name: unspell(getattr(event, name)) for name in mixed_fields(event_type) if plans[name] != "live"}
    decoded: Event = msgspec.structs.replace(event, **changes) if changes else event
    return decoded


def from_msgpack(data: bytes) -> Event:
    """Decode an event that :meth:`Event.to_msgpack` encoded; raises msgspec.ValidationError for other data."""
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


def _plans(event_type: type[Event]) -> dict[str, str]:
    """Map each field to what detaching does with it: "live", "scalars", "keep" (immutable) or "copy"."""
    return {name: _plan(hint) for name, hint in hints_of(event_type).items()}


def _plan(hint: Any) -> str:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra and "detach" in meta.extra:
            return str(meta.extra["detach"])
    parts = get_args(hint) or (hint,)
    immutable = all(part in IMMUTABLE or part is Progress or isinstance(part, str | int) for part in parts)
    return "keep" if immutable and get_origin(hint) not in (list, dict, set, tuple) else "copy"


def _make(event_type: type[Event]) -> Detach:
    """Return the function that detaches events of one class, with no more work than its fields need."""
    plans = _plans(event_type)
    if all(plan == "keep" for plan in plans.values()):
        return lambda event: event
    keep, copied, scalars = ([name for name in plans if plans[name] == kind] for kind in ("keep", "copy", "scalars"))
    target = detached_type(event_type)
    if copied or len(scalars) != 1:
        return _copying(target, keep, copied, scalars)
    return _taking(target, keep, scalars[0])


def _taking(target: type[Event], keep: list[str], scalars: str) -> Detach:
    """Detach events like AfterTrainIter, which have one mapping of outputs and plain fields; the hot path.

    With plain floats for outputs the publisher makes the new event. Else it takes the values only, and the consumer makes it.
    """
    take = ScalarTaker().take
    outputs_of = attrgetter(scalars)
    # Generated: with the names spelled out it takes 0.1 µs, with ``**`` and a dictionary four times as long.
    from_event = ", ".join([*(f"{name}=event.{name}" for name in keep), f"{scalars}=outputs"])
    from_kept = ", ".join([*(f"{name}=kept[{index}]" for index, name in enumerate(keep)), f"{scalars}=outputs"])
    kept = "".join(f"event.{name}, " for name in keep)
    lambdas = f"lambda event, outputs: target({from_event}), lambda kept, outputs: target({from_kept}), lambda event: ({kept})"
    rebuilt: Callable[[Event, Any], Event]
    rebuilt, made, keep_of = eval(lambdas, {"target": target})  # noqa: S307 - fields of a struct

    def detach_event(event: Event) -> Event | Snapshot:
        outputs = outputs_of(event)
        if outputs is ABSENT:
            return rebuilt(event, ABSENT)
        for value in outputs.values():
            if type(value) is not float:
                break
        else:
            return rebuilt(event, {**outputs})
        taken = take(outputs)
        return Snapshot((keep_of(event), taken), tuple(taken[2]) if taken[0].waits else (), finish)

    def finish(snapshot: tuple[tuple[Any, ...], Taken]) -> Any:
        kept, (plan, numbers, stacks) = snapshot
        return made(kept, plan.read(numbers, stacks))

    return detach_event


def _copying(target: type[Event], keep: list[str], copied: list[str], scalars: list[str]) -> Detach:
    takers = {name: ScalarTaker().take for name in scalars}

    def detach_event(event: Event) -> Event | Snapshot:
        fields = {name: getattr(event, name) for name in keep}
        copies = Copies()
        if copied:
            with torch.no_grad():
                fields |= {name: copies.copy(getattr(event, name)) for name in copied}
        outputs = {name: getattr(event, name) for name in scalars}
        taken = {name: takers[name](values) for name, values in outputs.items() if values is not ABSENT}
        stacks = [stack for _, _, stacks in taken.values() for stack in stacks if isinstance(stack, DeviceStack)]
        pending = (*copies.fences(), *stacks)
        if not pending and not taken:
            return target(**fields)

        def finish(fields: dict[str, Any]) -> Event:
            return target(**fields, **{name: plan.read(*values) for name, (plan, *values) in taken.items()})

        return Snapshot(fields, pending, finish)

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
