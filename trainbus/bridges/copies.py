"""Replace methods of another library's objects, so that copies of the objects have their own methods.

Trainers are copied: by ``copy`` and ``pickle``, cloudpickle, the searches of Ray and Optuna. A bus is not. The copy of a
trainer calls its own methods, not those of the bridge, and says once that it has no bus.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

from trainbus.eventloop.log import get_logger

log = get_logger()

_RECORD: Final = "_trainbus_replaced"  # the attribute of an object that holds its `_Originals`
_ABSENT: Final = object()

attached: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""The bridges of all trainers that have a bus."""


class _Originals(dict[str, Any]):
    """What an object had in the place of each replaced attribute; `_ABSENT` if its class has the method."""

    announced: tuple[str, str] | None = None
    """The method by which a copy trains, and the kind of the trainer; None if copies need not say anything."""


def replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of one object, such as a method; return the function that undoes it.

    Copies of the object have the original: a bound method would be the one of the first object, or would copy the bus.
    """
    originals, former = _originals(owner), vars(owner).get(name, _ABSENT)
    first = name not in originals
    if first:
        originals[name] = former
    setattr(owner, name, value)

    def undo() -> None:
        if former is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
        if first:
            del originals[name]
            if not originals:
                delattr(owner, _RECORD)

    return undo


def announce_copies(owner: Any, method: str, host: str) -> None:
    """Make copies of a trainer say once that they have no bus, when ``method`` is called, which is replaced in the trainer."""
    _originals(owner).announced = method, host


def _originals(owner: Any) -> _Originals:
    copyreg.pickle(type(owner), _reduce)  # for good: it changes nothing for an object without a record
    found: _Originals = vars(owner).setdefault(_RECORD, _Originals())
    return found


def _reduce(owner: Any) -> str | tuple[Any, ...]:
    """Return what ``copy`` and ``pickle`` make a copy from, without what `replaced` has set."""
    reduced, originals = owner.__reduce_ex__(4), vars(owner).get(_RECORD)
    if originals is None or isinstance(reduced, str):
        return reduced  # type: ignore[no-any-return]
    make, arguments, state, *rest = reduced
    if isinstance(state, dict):
        kept = {name: originals.get(name, value) for name, value in state.items() if name != _RECORD}
        state = {name: value for name, value in kept.items() if value is not _ABSENT}
    if originals.announced is not None:
        make, arguments = _make_copy, (make, arguments, *originals.announced)
    return make, arguments, state, *rest


def _make_copy(make: Callable[..., Any], arguments: tuple[Any, ...], method: str, host: str) -> Any:
    """Make a copy of a trainer, whose state comes later."""
    copy = make(*arguments)
    original, bridge = getattr(copy, method), Unattached(host)

    @wraps(original)
    def telling(*arguments: Any, **named: Any) -> Any:
        bridge.tell(copy)
        return original(*arguments, **named)

    replaced(copy, method, telling)
    announce_copies(copy, method, host)
    return copy


class Unattached:
    """The bridge of a copied trainer of some kind: it has no bus, and no state of one."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._warned = False

    def tell(self, trainer: object) -> None:
        """Log once that a trainer has no bus, unless one is attached to it."""
        if not self._warned and not any(one.trainer is trainer for one in attached):
            self._warned = True
            log.warning(
                f"this is a copy of {self._host}, and copies have no bus; attach one to the copy if it needs it",
                id="trainer-is-copy",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a copy has no hooks."""
