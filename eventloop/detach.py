"""What an offloaded handler may see: a detached event, or a staged copy of what ``capture=`` picked.

Both are made on the publishing thread at the subscription's priority slot, so nothing that happens later can change them.
Nothing here waits for a device: tensors are copied without a host sync and the consumer waits for the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import torch

from eventloop.errors import LiveFieldError, SubscribeError
from eventloop.events import ABSENT, Event, Progress, name_of, registry, unspell

T = TypeVar("T")

_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), Progress, torch.dtype, torch.device, torch.Size, range)


class Owned(Generic[T]):
    """Wraps what a ``capture=`` returns when it is the handler's own already: it is passed on without a copy.

    The handler receives ``value``. For captures that have made their own copy (a rendered figure, a ``state_dict`` that
    was cloned); what is wrapped must not be changed by anyone else afterwards.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


class Staged:
    """A value under way to another thread; :meth:`resolve` waits for its copies and returns it."""

    __slots__ = ("_copied", "_finish", "_value")

    def __init__(self, value: Any, copied: torch.cuda.Event | None = None, finish: Callable[[Any], Any] | None = None) -> None:
        self._value = value
        self._copied = copied
        self._finish = finish

    def resolve(self) -> Any:
        """Return the value; called on the consumer's thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value if self._finish is None else self._finish(self._value)


def stage(value: Any) -> Staged:
    """Copy what ``capture=`` returned: tensors (and numpy arrays) in any nesting of dicts, lists and tuples.

    Tensors arrive on the CPU, detached from the graph, in the shape they had.

    Raises:
        TypeError: the value holds a live module or optimizer.
    """
    if isinstance(value, Owned):
        return Staged(value.value)
    copies = _Copies()
    with torch.no_grad():
        copied = copies.take(value)
    return Staged(copied, copies.fence())


def detach(event: Event) -> Event | Staged:
    """Return ``event`` without its live fields, for an offloaded handler.

    Events whose fields are all plain and immutable are returned as they are.
    """
    return _detacher(type(event))(event)


def from_json(data: bytes | str) -> Event:
    """Decode an event that :meth:`Event.to_json` encoded; live fields of the result raise, as in an offloaded handler.

    Raises:
        msgspec.ValidationError: not an event of a declared mount point.
    """
    event = msgspec.json.decode(data, type=_union(tuple(registry.values())))
    changes = {
        name: unspell(value)
        for name, plan in _plans(_origin(type(event))).items()
        if plan != "live" and isinstance(value := getattr(event, name), dict)
    }
    decoded: Event = msgspec.structs.replace(event, **changes) if changes else event
    return decoded


def from_msgpack(data: bytes) -> Event:
    """Decode an event that :meth:`Event.to_msgpack` encoded; raises msgspec.ValidationError if it is none."""
    event: Event = msgspec.msgpack.decode(data, type=_union(tuple(registry.values())))
    return event


@cache
def detached_type(event_type: type[Event]) -> type[Event]:
    """Return the subclass of ``event_type`` whose live fields raise :class:`LiveFieldError` when touched.

    The fields stay in the struct, unset, so the class encodes, decodes and passes isinstance like the original.
    """
    namespace: dict[str, Any] = {
        name: _live_property(event_type, name) for name, plan in _plans(event_type).items() if plan == "live"
    }
    namespace |= {name: getattr(event_type, name) for name in ("__module__", "__qualname__", "__doc__")}
    meta: Any = type(event_type)
    made: type[Event] = meta(event_type.__name__, (event_type,), namespace | {"__detached__": True})
    return made


# ------------------------------------------------------------------------------------------------------ internals


def _plans(event_type: type[Event]) -> dict[str, str]:
    """Map each field to what detaching does with it: "live", "scalars", "keep" (immutable) or "copy"."""
    hints = get_type_hints(event_type, include_extras=True)
    return {name: _plan(hints[name]) for name in event_type.__struct_fields__}


def _plan(hint: Any) -> str:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.extra and "detach" in meta.extra:
            return str(meta.extra["detach"])
    parts = get_args(hint) if get_origin(hint) is not None or get_args(hint) else (hint,)
    immutable = all(part in _IMMUTABLE or isinstance(part, str | int) for part in parts) and get_origin(hint) not in (
        list,
        dict,
        set,
        tuple,
    )
    return "keep" if immutable else "copy"


@cache
def _detacher(event_type: type[Event]) -> Callable[[Event], Event | Staged]:
    plans = _plans(event_type)
    if all(plan == "keep" for plan in plans.values()):
        return _same
    keep = tuple(name for name, plan in plans.items() if plan == "keep")
    copied = tuple(name for name, plan in plans.items() if plan == "copy")
    scalars = tuple(name for name, plan in plans.items() if plan == "scalars")
    target = detached_type(event_type)

    def detach_event(event: Event) -> Event | Staged:
        fields = {name: getattr(event, name) for name in keep}
        if not copied and not scalars:
            return target(**fields)
        return _staged_event(target, event, fields, copied, scalars)

    return detach_event


def _staged_event(
    target: type[Event], event: Event, fields: dict[str, Any], copied: tuple[str, ...], scalars: tuple[str, ...]
) -> Event | Staged:
    copies = _Copies()
    with torch.no_grad():
        for name in copied:
            fields[name] = copies.take(getattr(event, name))
        for name in scalars:
            outputs = getattr(event, name)
            fields[name] = copies.scalars(outputs) if outputs is not ABSENT else ABSENT
    if not copies.rows and copies.device is None:
        return target(**fields)

    def finish(fields: dict[str, Any]) -> Event:
        for row in copies.rows:
            row.fill()
        return target(**fields)

    return Staged(fields, copies.fence(), finish)


def _same(event: Event) -> Event:
    return event


def _live_property(event_type: type[Event], name: str) -> property:
    mount = name_of(event_type)

    def touch(_self: Event) -> Any:
        raise LiveFieldError(
            f"event.{name} of {mount} is live training state, which an offloaded handler cannot see: it would change "
            f"under it. Pick what you need when subscribing: capture=lambda event: event.{name}..., and the handler "
            "gets a copy made at its priority slot; or make the handler a plain function and let it run inline"
        )

    return property(touch, doc=f"Raises LiveFieldError: {name} is live training state.")


def _origin(event_type: type[Event]) -> type[Event]:
    return registry[name_of(event_type)]


@cache
def _union(types: tuple[type[Event], ...]) -> Any:
    union: Any = detached_type(types[0])
    for event_type in types[1:]:
        union = union | detached_type(event_type)
    return union


class _ScalarRow:
    """The 0-dim tensors of one event, gathered into one tensor per dtype and device by one foreach copy."""

    __slots__ = ("_into", "_names", "_values")

    def __init__(self, into: dict[str, Any], names: list[str], tensors: list[torch.Tensor]) -> None:
        self._into = into
        self._names = names
        values = torch.empty(len(tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        torch._foreach_copy_(list(values.unbind()), tensors)
        self._values = values

    def fill(self) -> None:
        """Put the numbers into the outputs; on the consumer's thread, which may wait for the device."""
        self._into.update(zip(self._names, self._values.tolist(), strict=True))


class _Copies:
    """The copies that one event or capture needs, and the CUDA event that tells when they are done."""

    __slots__ = ("device", "rows")

    def __init__(self) -> None:
        self.rows: list[_ScalarRow] = []
        self.device: torch.device | None = None

    def fence(self) -> torch.cuda.Event | None:
        """Mark this moment on the stream the copies were queued on, if any were queued on a GPU."""
        if self.device is None:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def take(self, value: Any) -> Any:
        """Copy ``value`` so that nobody else can change it."""
        if isinstance(value, _IMMUTABLE):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            return {key: self.take(entry) for key, entry in value.items()}
        if isinstance(value, list | set | frozenset):
            return type(value)(self.take(entry) for entry in value)
        if isinstance(value, tuple):
            entries = [self.take(entry) for entry in value]
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            raise TypeError(
                f"capture= returned a live {type(value).__name__}; return the tensors you need, for instance "
                "event.run.model.head.weight or event.run.model.state_dict()"
            )
        return np.array(value) if isinstance(value, np.ndarray) else copy.deepcopy(value)

    def scalars(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scalar entries of ``outputs``; tensors among them are filled in by the consumer."""
        taken: dict[str, Any] = {}
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], list[torch.Tensor]]] = {}
        for name, value in outputs.items():
            if isinstance(value, torch.Tensor):
                if value.dim() == 0:
                    names, tensors = groups.setdefault((value.dtype, value.device), ([], []))
                    names.append(name)
                    tensors.append(value)
                    taken[name] = None  # keeps the order of the outputs
            elif isinstance(value, int | float | str):
                taken[name] = value
            elif isinstance(value, np.generic):
                taken[name] = value.item()
        for (_, device), (names, tensors) in groups.items():
            self.rows.append(_ScalarRow(taken, names, tensors))
            if device.type == "cuda":
                self.device = device
        return taken

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda":
            return tensor.detach().clone().cpu()
        self.device = tensor.device
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)


def check_capture(capture: object) -> None:
    """Raise SubscribeError unless ``capture`` can be called."""
    if not callable(capture):
        raise SubscribeError(
            f"capture={capture!r}: give a function that picks what the handler needs from the event, such as "
            'lambda event: event.outputs["logits"]'
        )
