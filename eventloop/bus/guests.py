"""Guests: hooks of other systems on a bus.

    class MyGuest(GuestHook):                        # in my_module: calls the methods of self.guest
        def after_train_iter(self, event): self.guest.on_step(event.progress.iter)

    register_guests(GuestKind("their_library.hooks.Hook", adapter="my_module:MyGuest"))
    bus.add(TheirHook())

The kind of a guest is found by the full names of its class and base classes, so that other systems need not be imported. An
adapter is imported with the first guest of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from trainbus.eventloop.builtin import kind_of, load_object
from trainbus.eventloop.bus.hook import Hook, check_single
from trainbus.eventloop.checks import is_async
from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.seams import Seam


class GuestKind(msgspec.Struct, frozen=True):
    """A kind of hooks of another system.

    Give the ``adapter`` that makes them guests, or the reason for a ``refusal``.
    """

    base: str  # full name of the base class, with the module that defines it
    adapter: str = ""  # module:attribute of a GuestHook
    name: str = ""  # the class as users import it; for messages
    refusal: str = ""  # the reason, and what to do instead


class GuestHook(Hook):
    """Adapt a hook of another system to :class:`Hook`: base class of adapters.

    Attributes:
        guest: the object of the other system. ``bus.off(guest)`` removes its adapter.
    """

    def __init__(self, guest: Any) -> None:
        self.guest = guest

    @property
    def label(self) -> str:
        """The name of this hook in tables, errors and checkpoints: by default the name of the guest's class."""
        return self.name or type(self.guest).__name__


KINDS: Final[Seam[dict[str, GuestKind]]] = Seam({})


def register_guests(*kinds: GuestKind) -> None:
    """Register a kind of hooks that buses accept. A kind with the same base replaces the earlier one."""
    KINDS.value.update({kind.base: kind for kind in kinds})


def guest_kind(cls: type) -> GuestKind | None:
    """Return the kind of guests that a class belongs to; None for a :class:`Hook` and for unknown classes."""
    return None if issubclass(cls, Hook) else kind_of(cls, KINDS.value)


def as_hook(given: object) -> Hook:
    """Return ``given`` if it is a :class:`Hook`, or the adapter of a guest.

    Raises:
        SubscribeError: the object is neither, or its kind is refused.
    """
    check_single(given)
    if isinstance(given, Hook):
        return given
    kind = guest_kind(type(given))
    if kind is None:
        guests = ", ".join(one.name or one.base for one in KINDS.value.values() if one.adapter)
        raise SubscribeError(
            f"bus.add takes Hook objects and guests ({guests}), not {type(given).__name__}; derive the class from "
            "trainbus.eventloop.Hook, or subscribe a function with bus.on"
        )
    if kind.refusal:
        raise SubscribeError(f"{type(given).__name__} is a {kind.name or kind.base}, which cannot be a guest: {kind.refusal}")
    for name in dir(type(given)):
        if name.startswith(("before_", "after_", "on_")) and is_async(getattr(type(given), name)):
            raise SubscribeError(
                f"{type(given).__name__}.{name} is async, but nothing awaits methods of a {kind.name or kind.base}: make it "
                "a plain method, or derive the class from trainbus.eventloop.Hook, whose async methods are offloaded"
            )
    adapter: type[GuestHook] = load_object(kind.adapter)
    return adapter(given)


def owner_of(hook: object) -> object:
    """Return the guest of an adapter, and any other object as it is."""
    return hook.guest if isinstance(hook, GuestHook) else hook


def is_same(hook: Hook, other: object) -> bool:
    """Return True if ``other`` is the hook, its guest, or another adapter of its guest."""
    return hook is other or owner_of(hook) is owner_of(other)


def check_distinct(hooks: Sequence[Hook]) -> None:
    """Raise SubscribeError if a hook is among ``hooks`` twice, or two with state have one name."""
    owners: set[int] = set()
    named: set[str] = set()
    for one in hooks:
        if id(owner_of(one)) in owners:
            raise SubscribeError(f"{one.label} is on this bus already; add each hook once")
        owners.add(id(owner_of(one)))
        if one.stateful and one.label in named:
            raise SubscribeError(
                f"two hooks with state are named {one.label!r}, and a checkpoint keeps state by name; "
                f"give one of them another `name`"
            )
        if one.stateful:
            named.add(one.label)
