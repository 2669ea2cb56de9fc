"""The base of all events: fields, names of mount points, encoding.

An event is a frozen :class:`msgspec.Struct`. Its class name is its mount point: ``AfterTrainIter`` is published at
``"after_train_iter"``. Subclassing :class:`Event` declares a mount point:

    class Densify(Event):
        points: int

    bus.publish(Densify(points=512))        # reaches bus.on("densify") and bus.on(Densify)

Fields are *plain* (numbers, strings, containers of them; an offloaded handler gets a copy), *live* (``Live[...]``: references
to training state, which an offloaded handler must not touch) or *scalars* (``Scalars``: offloaded handlers get the numbers).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

import msgspec
import torch

from trainbus.eventloop.annotations import fields_of, members
from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.errors import EventDefinitionError, UnknownEventError
from trainbus.eventloop.spelling import did_you_mean

T = TypeVar("T")

Live = Annotated[T, msgspec.Meta(extra={"detach": "live"})]
"""Marks a field as a reference to training state: offloaded handlers cannot touch it, encoders leave it out."""

Scalars = Annotated[Mapping[str, Any], msgspec.Meta(extra={"detach": "scalars"})]
"""Marks a mapping of outputs: offloaded handlers and encoders get its scalar entries, as numbers."""

ABSENT: Any = msgspec.UNSET
"""Default of live fields: an event that was decoded, or made by hand in a test, has no live state."""

Stage = Literal["train", "val", "test"]
Counter = Literal["iter", "epoch", "update", "batch", "validation", "publish"]


class Progress(msgspec.Struct, frozen=True):
    """A snapshot of how far a run has come, made once per iteration. All counts are 0-based.

    ``iter`` counts micro-batches, ``update`` optimizer steps (without those that the gradient scaler skipped; where several
    optimizers step, those of the one with the most steps in the iteration), ``batch_idx`` batches within the epoch or
    validation, ``validation`` the validations (or tests) before this one.
    ``run_name`` is the name of the run, which tells apart the encoded events of several runs.
    """

    epoch: int = 0
    iter: int = 0
    update: int = 0
    batch_idx: int = 0
    validation: int = 0
    max_epochs: int | None = None
    max_iters: int | None = None
    stage: Stage = "train"
    run_name: str = ""


registry: dict[str, type[Event]] = {}
"""Mount-point name → event class, in order of definition, which for the built-in ones is the order of a run."""


@cache
def mount_name(class_name: str) -> str:
    """Return the mount point of an event class: ``"AfterTrainIter"`` → ``"after_train_iter"``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


# For type checkers, so that subclasses inherit frozen=True and kw_only=True.
@dataclass_transform(frozen_default=True, kw_only_default=True, eq_default=False)
class Event(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag_field="event", tag=mount_name):
    """Base class of all events. Subclass it to declare your own mount point.

    A subscription to a class also gets its subclasses: ``bus.on(Event)`` gets every event, ``bus.on("after_iter")`` the
    iterations of all three stages. Events are compared by identity. Defining a class again in the same module (a notebook cell)
    replaces it, and its subscriptions stay; a class with the name of another module's event is an EventDefinitionError.
    """

    counts: ClassVar[Counter] = "publish"
    """What ``every``, ``once``, ``after`` and ``before`` count for this event; see :mod:`trainbus.eventloop.bus.filters`."""
    group: ClassVar[bool] = False
    """True for a class that groups others (``BeforeIter``): you subscribe to it, and the run never publishes it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__detached__" in cls.__dict__:
            return  # a detached twin (offload/detach.py), not a mount point
        cls.group = bool(cls.__dict__.get("group", False))
        name = mount_name(cls.__name__)
        taken = Event if name == "event" else registry.get(name)
        if taken is not None and (taken.__module__, taken.__name__) != (cls.__module__, cls.__name__):
            raise EventDefinitionError(
                f"the mount point {name!r} is already declared by {taken.__module__}.{taken.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another name"
            )
        registry[name] = cls

    @property
    def mount_point(self) -> str:
        """Name of this event's mount point."""
        return name_of(type(self))

    def to_json(self) -> bytes:
        """Encode a detached event (what an offloaded handler gets) as one JSON object; raises TypeError for live state.

        Non-finite floats become the strings "NaN", "Infinity" and "-Infinity". In fields that may hold both floats and texts
        (``Any``, ``dict[str, Any]``, ``float | str``), such a text gets a backslash in front. :func:`from_json` undoes both.
        """
        mixed = mixed_fields(type(self))
        fields = msgspec.to_builtins(self, enc_hook=_refuse_live)
        return msgspec.json.encode({name: _spell(value, texts=name in mixed) for name, value in fields.items()})

    def to_msgpack(self) -> bytes:
        """Encode a detached event as a msgpack map; raises TypeError for live state."""
        return msgspec.msgpack.encode(self, enc_hook=_refuse_live)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # A live field of a detached event is a property that raises.
        names = (name for name in self.__struct_fields__ if not isinstance(getattr(type(self), name), property))
        values = ((name, getattr(self, name)) for name in names)
        return [(name, _short(value)) for name, value in values if value is not msgspec.UNSET]


class _Undeclared:
    """A field that the events of a run have. An event that does not declare it has no such attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, event: object, kind: type[Event]) -> Any:
        way_out = f"derive {kind.__name__} from RunEvent instead of Event, and publish it by run.publish()"
        raise AttributeError(f"{kind.__name__} has no field {self._name!r}; {way_out}", name=self._name, obj=event)


for _name in ("run", "progress"):
    setattr(Event, _name, _Undeclared(_name))


def misfit(event: type[Event], payload: Mapping[str, object]) -> str:
    """Return how the payload of ``run.publish(event, ...)`` does not fit the fields of the event, or ""."""
    fields = [name for name in event.__struct_fields__ if name not in ("run", "progress")]
    for name in payload:
        if name not in fields:
            way_out = "run.publish() fills it in" if name in ("run", "progress") else f"its fields are {', '.join(fields)}"
            return f"{event.__name__} has no field {name}=" + (
                did_you_mean(name, fields) or f"; {way_out if fields else 'it has none'}"
            )
    infos = msgspec.structs.fields(event)
    missing = [one.name for one in infos if one.required and one.name in fields and one.name not in payload]
    return f"run.publish({event.__name__}, ...) lacks the field {', '.join(f'{name}=' for name in missing)}" if missing else ""


def name_of(event: type[Event]) -> str:
    """Return the mount-point name of an event class."""
    return mount_name(event.__name__)


def describe_position(event: type[Event], progress: object) -> str:
    """Return an event's mount point and progress, from 1: ``"after_train_iter, epoch 1, iteration 37"``."""
    name = name_of(event)
    if not isinstance(progress, Progress):
        return name
    match event.counts:
        case "iter" | "update":
            return f"{name}, epoch {progress.epoch + 1}, iteration {progress.iter + 1}"
        case "epoch":
            return f"{name}, epoch {progress.epoch + 1}"
        case "batch":
            return f"{name}, batch {progress.batch_idx + 1}, after iteration {progress.iter}"
        case _:
            return f"{name}, after iteration {progress.iter}"


def lineage(event: type[Event]) -> list[str]:
    """Return the names under which ``event`` can be subscribed to: its own, its groups', and ``"event"``."""
    return [name_of(base) for base in event.__mro__ if issubclass(base, Event)]


def declared() -> dict[str, type[Event]]:
    """Return the events of all mount points by name, with those that hooks declare."""
    load_builtin("hooks")
    return registry


def resolve(event: type[Event] | str) -> type[Event]:
    """Return the event class for a class or a mount-point name; raise UnknownEventError, or TypeError if it is neither."""
    if isinstance(event, str):
        found = Event if event == "event" else registry.get(event) or declared().get(event)
        if found is None:
            raise UnknownEventError(f"{event!r} is not a mount point{suggest(event)}")
        return found
    if isinstance(event, type) and issubclass(event, Event):
        return event
    raise TypeError(_misused(event))


def _misused(event: Any) -> str:
    if isinstance(event, list | tuple):
        names = ", ".join(one.__name__ if isinstance(one, type) else repr(one) for one in event)
        return f"expected a mount point, got a {type(event).__name__} of them; write bus.on({names}, ...)"
    return (
        f"expected an event class or a mount-point name, got {event!r}; "
        'write bus.on("after_train_iter") or bus.on(AfterTrainIter)'
    )


def suggest(name: str) -> str:
    """Return the end of an error message: the mount points nearest to ``name``."""
    ours = _translated(name.lower())
    found = did_you_mean(ours, [ours] if ours in registry else declared(), most=3)
    return found or "; declare it by subclassing Event, or see the known ones with `trainbus events`"


_OURS = {"fit": "train", "validation": "val", "batch": "iter", "iteration": "iter", "step": "iter"}


def _translated(name: str) -> str:
    """Return our name for a moment that another library names ``on_..._start``, ``_begin`` or ``_end``."""
    match = re.fullmatch(r"on_(.+)_(start|begin|end)", name)
    if match is None:
        return name
    words = [_OURS.get(word, word) for word in match[1].split("_")]
    stage = ["train"] if words in (["iter"], ["epoch"]) else []
    return "_".join(["after" if match[2] == "end" else "before", *stage, *words])


def mount_points() -> list[str]:
    """Return the names of all mount points in the order of a run, users' own last."""
    return [name for name, event in declared().items() if not event.group]


_SPELLED = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _spell(value: Any, *, texts: bool) -> Any:
    """Spell non-finite floats as texts: JSON has no NaN, and a NaN loss must not arrive as null."""
    if isinstance(value, dict):
        return {key: _spell(entry, texts=texts) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_spell(entry, texts=texts) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return f"\\{value}" if texts and isinstance(value, str) and value.lstrip("\\") in _SPELLED else value


def unspell(value: Any) -> Any:
    """Undo what :meth:`Event.to_json` does to non-finite floats and to texts that read like one."""
    if isinstance(value, dict):
        return {key: unspell(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(unspell, value))
    if not isinstance(value, str) or value.lstrip("\\") not in _SPELLED:
        return value
    return value[1:] if value.startswith("\\") else _SPELLED[value]


@cache
def hints_of(event: type[Event]) -> dict[str, Any]:
    """Return the annotation of every field; raise EventDefinitionError for names not at the top level of the event's module."""
    try:
        hints = fields_of(event)
    except NameError as error:
        raise EventDefinitionError(
            f"the annotations of {event.__module__}.{event.__qualname__} cannot be resolved ({error}), so its live "
            "fields are not known; define the event and the types it names at the top level of a module"
        ) from error
    return {name: hints[name] for name in event.__struct_fields__}


@cache
def mixed_fields(event: type[Event]) -> frozenset[str]:
    """Return the fields that may hold both floats and texts, which decoding cannot tell apart by the type."""
    try:
        return frozenset(name for name, hint in hints_of(event).items() if _mixed(hint))
    except EventDefinitionError:
        return frozenset()  # the event can be encoded, but not decoded


def _mixed(hint: Any) -> bool:
    found = members(hint)
    if {float, str} <= {one.annotation for one in found} or any(one.form == "any" for one in found):
        return True
    inner = [one.inner for one in found if one.form in ("list", "table")]
    return any(any(map(_mixed, entry)) if isinstance(entry, list) else _mixed(entry) for entry in inner)


def _refuse_live(value: Any) -> Any:
    raise TypeError(
        f"cannot encode a {type(value).__name__}: this event still refers to live training state. Encode the event that an "
        "offloaded handler receives, or pick plain values with capture="
    )


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | Progress):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    return f"<{type(value).__name__}>"
