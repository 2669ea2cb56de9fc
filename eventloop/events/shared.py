"""Typed slots for data that hooks share during a run.

GRADIENT = Slot("gradient direction", torch.Tensor)      # in a module that both hooks import

run.shared[GRADIENT] = direction                         # one hook puts a value there,
direction = run.shared[GRADIENT]                         # another one takes it, as a torch.Tensor for the type checker

The run owns the values and drops them when it ends; neither the slots nor the hooks keep a run alive.
"""

from __future__ import annotations

import weakref
from typing import Annotated, Any, Generic, TypeVar, overload

from msgspec import Meta

from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import TrainingError

T = TypeVar("T")
D = TypeVar("D")

_Name = Annotated[str, Meta(min_length=1, description="a name of the value")]


class Slot(Generic[T]):
    """The name (for tables and errors) and the type of a shared value. A value of another type is an error.

    Two slots hold two values, even under one name.
    """

    __slots__ = ("__weakref__", "kind", "name")

    @check_options
    def __init__(self, name: _Name, kind: type[T]) -> None:
        self.name = name
        self.kind = kind

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {self.kind.__name__})"


class Shared(weakref.WeakKeyDictionary[Slot[Any], Any]):
    """The values of slots, in ``run.shared``. Use it on the training thread; the run drops the values when it ends.

    Checkpoints do not contain them: put state that must survive a resume into the hook's ``state_dict``. Slots are held weakly,
    so that slots of a reloaded module disappear.
    """

    def __setitem__(self, slot: Slot[T], value: T) -> None:
        if not isinstance(value, slot.kind):
            raise TypeError(f"{slot!r} holds a {slot.kind.__name__}, not a {type(value).__name__}")
        super().__setitem__(slot, value)

    def __getitem__(self, slot: Slot[T]) -> T:
        try:
            value: T = super().__getitem__(slot)
        except KeyError:
            raise TrainingError(
                f"{slot!r} is empty: is the hook that fills it on the bus, and does its turn come earlier (a lower "
                f"priority, an earlier mount point)? shared are {', '.join(one.name for one in self) or 'none'}"
            ) from None
        return value

    @overload  # type: ignore[override]  # only slots are keys
    def get(self, slot: Slot[T]) -> T | None: ...
    @overload
    def get(self, slot: Slot[T], default: D) -> T | D: ...
    def get(self, slot: Slot[T], default: D | None = None) -> T | D | None:
        """Return the value of ``slot``, or ``default``."""
        value: T | D | None = super().get(slot, default)
        return value
