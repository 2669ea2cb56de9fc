"""Hosts: objects of other libraries that a bus can be attached to, or that lead a run around the user's own loop.

    class MyBridge(Bridge): ...                      # in my_module: publishes when the trainer calls it

    register_host(HostKind("their_library.Trainer", bridge="my_module:MyBridge"))
    attach(bus, their_trainer)

The kind of an object is found by the full names of its class and base classes, so that other libraries need not be imported. A
bridge is imported with the first object of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import msgspec

from trainbus.eventloop.builtin import kind_of, load_object
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.eventloop.errors import ConfigurationError, SubscribeError


class HostKind(msgspec.Struct, frozen=True):
    """A kind of trainers, and the bridge that attaches a bus to them; or a kind of objects that an option of ``Run`` takes."""

    base: str  # full name of the class, with the module that defines it
    bridge: str = ""  # module:attribute of an trainbus.bridges.Bridge; none if a bus cannot be attached
    name: str = ""  # the class as users import it; for messages
    option: str = ""  # the option of Run that takes it, if it has no loop of its own
    leads: str = ""  # module:attribute of the class that speaks for it in a run, whose of(given) returns one


class Attachment(Protocol):
    """The interface of the :class:`trainbus.bridges.Bridge` that :func:`trainbus.attach` returns."""

    @property
    def missing(self) -> Mapping[str, str]:
        """The mount points that the trainer cannot publish, with the reason."""

    def detach(self) -> None:
        """Restore the trainer."""

    def warn_of_missing(self, subscriptions: Iterable[Subscription]) -> None:
        """Log a warning for each missing mount point that has a subscription."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


_kinds: dict[str, HostKind] = {}


def register_host(*kinds: HostKind) -> None:
    """Register a kind of trainers that buses can be attached to. A kind with the same base replaces the earlier one."""
    _kinds.update({kind.base: kind for kind in kinds})


def bridge_for(trainer: object) -> Any:
    """Return the class of the bridge for a trainer.

    Raises:
        SubscribeError: no bridge is registered for its class.
    """
    kind = kind_of(type(trainer), _kinds)
    if kind is None or not kind.bridge:
        known = dict.fromkeys(one.name or one.base for one in _kinds.values() if not one.option)
        loops = "".join(
            f"; with {_name(one)}, write your loop around Run(bus, {one.option}=...)" for one in _kinds.values() if one.option
        )
        raise SubscribeError(
            f"attach() knows {', '.join(known)}, not {_shown(trainer)}{loops}; for another trainer, write a bridge and "
            "register_host() it"
        )
    return load_object(kind.bridge)


def leader_of(option: str, given: object) -> Any:
    """Return what speaks in a run for the object that its ``option`` was given.

    Raises:
        ConfigurationError: nothing is registered for its class.
    """
    kind = kind_of(type(given), _kinds)
    if kind is None or kind.option != option:
        wanted = " or ".join(_name(one) for one in _kinds.values() if one.option == option)
        raise ConfigurationError(f"{option}= is {_shown(given)}; give {wanted or 'an object of a library with a bridge'}")
    return load_object(kind.leads).of(given)


def _name(kind: HostKind) -> str:
    name = kind.name or kind.base
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(trainer: object) -> str:
    kind = trainer if isinstance(trainer, type) else type(trainer)
    return f"{'the class' if isinstance(trainer, type) else 'a'} {kind.__module__}.{kind.__qualname__}"
