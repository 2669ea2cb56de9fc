"""Detached events: events for offloaded handlers, with everything but live training state.

The publishing thread makes them at the subscription's priority slot, so nothing that happens later can change them. Nothing
here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast, get_args, get_origin

import msgspec
import torch

from trainbus.eventloop.errors import EventDefinitionError, LiveFieldError
from trainbus.eventloop.events import Event, Progress
from trainbus.eventloop.events.event import ABSENT, declared, hints_of, mixed_fields, name_of, registry, suggest, unspell
from trainbus.eventloop.offload.scalars import DeviceStack, ScalarTaker, Stack
from trainbus.eventloop.offload.snapshot import IMMUTABLE, Copies, Snapshot

_FLOAT = {float}

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


def absent_entry(error: BaseException, event_type: type[Event]) -> str:
    """Return advice for an error that a handler's look at a tensor among the scalars of its event may have caused, or ""."""
    if not (isinstance(error, KeyError) and error.args and isinstance(error.args[0], str)):
        return ""
    entry = repr(error.args[0])
    fields = [f"event.{name}" for name, plan in _plans(event_type).items() if plan == "scalars"]
    return "".join(
        f"an offloaded handler gets only the scalars of {field}: a tensor {entry} takes capture=lambda event: {field}[{entry}]"
        for field in fields
    )


def from_json(data: bytes | str) -> Event:
    """Decode an event that :meth:`Event.to_json` encoded; live fields of the result raise, as in an offloaded handler.

    Raises:
        msgspec.ValidationError: the object is not an event of a declared mount point.
        msgspec.DecodeError: the text is not JSON.
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
    live = [name for name, plan in _plans(event_type).items() if plan == "live"]
    meta: Any = type(event_type)
    common = {name: getattr(event_type, name) for name in ("__module__", "__qualname__", "__doc__")} | {"__detached__": True}
    base = event_type
    defaults = {field.name: field.default for field in msgspec.structs.fields(event_type)}
    if redone := {name: ABSENT for name in live if defaults[name] is not ABSENT}:
        # A user's live field may be required, or have another default. Here it is always unset.
        hints = hints_of(event_type)
        annotations = {"__annotations__": {name: hints[name] for name in redone}}
        base = meta(event_type.__name__, (event_type,), common | annotations | redone, kw_only=True)
    properties = {name: _live_property(event_type, name) for name in live}
    made: type[Event] = meta(event_type.__name__, (base,), common | properties | {"__reduce__": _reduce})
    return made


# ------------------------------------------------------------------------------------------------------ internals


def _reduce(event: Event) -> tuple[Any, ...]:
    """Pickle a detached event by its declared class: its own is made in each process, and not found by name."""
    plain = {name: getattr(event, name) for name, plan in _plans(type(event)).items() if plan != "live"}
    return _event, (registry[event.mount_point], plain)


def _event(event_type: type[Event], plain: dict[str, Any]) -> Event:
    return detached_type(event_type)(**plain)


class _Tag(msgspec.Struct):
    event: str


def _tagged(name: str) -> type[Event]:
    if name not in registry and name not in declared():
        raise msgspec.ValidationError(f"{name!r} is not a mount point{suggest(name)}")
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
    """Detach events like AfterTrainIter, which have one mapping of outputs and plain fields; the hot path."""
    take = ScalarTaker().take

    def detach_tensors(event: Event, outputs: Any) -> Event | Snapshot:
        if outputs is ABSENT:
            return made(event, ABSENT)
        try:
            numbers, stacks = take(outputs)
            detached = made(event, numbers)
        except Exception as error:  # noqa: BLE001 - of the event's class: a failure of the handler, not of the training
            return Snapshot(error, finish=_raise)
        return Snapshot((detached, [(numbers, stacks)]), _pending(stacks), _filled) if stacks else detached

    # Generated: with the names spelled out it takes 0.1 µs, with ``**`` and a dictionary four times as long.
    fields = "".join(f"{name}=event.{name}, " for name in keep)
    source = f"""
def made(event, outputs):
    return target({fields}{scalars}=outputs)

def detach_event(event):
    outputs = event.{scalars}
    if type(outputs) is dict and FLOAT.issuperset(map(type, outputs.values())):  # none, or numbers: the usual case
        return target({fields}{scalars}={{**outputs}})
    return detach_tensors(event, outputs)
"""
    names: dict[str, Any] = {"target": target, "FLOAT": _FLOAT, "detach_tensors": detach_tensors}
    exec(source, names)  # noqa: S102
    made: Callable[[Event, Any], Event] = names["made"]
    return cast("Detach", names["detach_event"])


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
        detached = target(**fields, **{name: numbers for name, (numbers, _) in taken.items()})
        pending = (*copies.fences(), *(fence for _, stacks in taken.values() for fence in _pending(stacks)))
        if any(stacks for _, stacks in taken.values()):
            return Snapshot((detached, [*taken.values()]), pending, _filled)
        return Snapshot(detached, pending) if pending else detached

    return detach_event


def _raise(error: Exception) -> None:
    raise error


def _pending(stacks: list[Stack]) -> tuple[DeviceStack, ...]:
    return tuple([values for _, values in stacks if isinstance(values, DeviceStack)])


def _filled(taken: tuple[Event, list[tuple[dict[str, Any], list[Stack]]]]) -> Event:
    """Return the event with the numbers of its stacks; on the consumer's thread, after they have arrived."""
    event, parts = taken
    for numbers, stacks in parts:
        for names, values in stacks:
            numbers.update(zip(names, values.tolist(), strict=True))
    return event


def unarrived(item: Any) -> tuple[Any, list[tuple[list[str], torch.Tensor]]]:
    """Return the event of a lane's item, and what its scalars still lack: names, and their stacked values on a device."""
    if not isinstance(item, Snapshot) or item.finish is not _filled:
        return (item.value if isinstance(item, Snapshot) else item), []
    event, parts = item.value
    stacks = [stack for _, stacks in parts for stack in stacks]
    return event, [(names, values.tensor if isinstance(values, DeviceStack) else values) for names, values in stacks]


def _live_property(event_type: type[Event], name: str) -> property:
    mount = name_of(event_type)

    def touch(_self: Event) -> Any:
        raise LiveFieldError(
            f"event.{name} of {mount} is live training state, which an offloaded handler cannot see: it would change "
            f"under it. Pick what you need when subscribing: capture=lambda event: event.{name}..., and the handler "
            "gets a copy made at its priority slot; or make the handler a plain function and let it run inline"
            + ("; loop.stop() and other requests to the loop work from any thread" if name == "run" else "")
        )

    return property(touch, doc=f"Raises LiveFieldError: {name} is live training state.")
