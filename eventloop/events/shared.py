"""A typed place where hooks keep data for each other while a run goes on.

GRADIENT = Slot("gradient direction", torch.Tensor)      # a module says what there is, and of which type

run.shared[GRADIENT] = direction                         # one hook puts it there,
direction = run.shared[GRADIENT]                         # another one takes it, as a torch.Tensor for the type checker

The run owns what is in it and forgets it when it ends; neither the slots nor the hooks keep a run alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, overload

from eventloop.errors import ConfigurationError, TrainingError

T = TypeVar("T")
D = TypeVar("D")


class Slot(Generic[T]):
    """The name and type of something that hooks share. Two slots are two places, whatever they are called.

    Args:
        name: for tables and errors.
        kind: type of what it holds; putting anything else there is an error.
        weak: the run does not keep the value alive: it is gone once the hook that made it lets go of it.

    Raises:
        ConfigurationError: an empty name, or a kind that is no type.
    """

    __slots__ = ("__weakref__", "kind", "name", "weak")

    def __init__(self, name: str, kind: type[T], *, weak: bool = False) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"Slot({name!r}): give what it holds a name")
        if not isinstance(kind, type):
            raise ConfigurationError(f"Slot({name!r}, {kind!r}): give the type of what it holds, such as torch.Tensor")
        self.name = name
        self.kind = kind
        self.weak = weak

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {self.kind.__name__}{', weak=True' if self.weak else ''})"


class Shared:
    """What hooks have put into slots, in ``run.shared``: used on the training thread, forgotten when the run ends.

    It is not in checkpoints: what must survive a resume belongs into the ``state_dict`` of the hook that makes it. Slots
    are held weakly, so that those of a module that was reloaded go.
    """

    def __init__(self) -> None:
        self._values: weakref.WeakKeyDictionary[Slot[Any], Any] = weakref.WeakKeyDictionary()

    def __setitem__(self, slot: Slot[T], value: T) -> None:
        """Put a value there, instead of the one before.

        Raises:
            TypeError: it is not of the slot's type, or the slot is weak and the value's type knows no weak references.
        """
        if not isinstance(value, slot.kind):
            raise TypeError(f"{slot!r} holds a {slot.kind.__name__}, not a {type(value).__name__}")
        self._values[slot] = weakref.ref(value) if slot.weak else value

    def __getitem__(self, slot: Slot[T]) -> T:
        """Return what is there.

        Raises:
            TrainingError: nothing is.
        """
        value = self.get(slot)
        if value is None:
            raise TrainingError(
                f"nothing is in {slot!r}: is the hook that fills it on the bus, and does its turn come earlier (a lower "
                f"priority, an earlier mount point)? shared are {', '.join(one.name for one in self) or 'none'}"
            )
        return value

    def __delitem__(self, slot: Slot[Any]) -> None:
        self._values.pop(slot, None)

    def __contains__(self, slot: Slot[Any]) -> bool:
        return self.get(slot) is not None

    def __iter__(self) -> Iterator[Slot[Any]]:
        """Iterate over the slots that are filled."""
        return (slot for slot in list(self._values) if slot in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def get(self, slot: Slot[T]) -> T | None: ...
    @overload
    def get(self, slot: Slot[T], default: D) -> T | D: ...
    def get(self, slot: Slot[T], default: D | None = None) -> T | D | None:
        """Return what is there, or ``default``."""
        value = self._values.get(slot)
        if slot.weak and value is not None:
            value = value()
        return default if value is None else value

    def clear(self) -> None:
        """Forget everything; the run calls it when it ends, however it ends."""
        self._values.clear()
