"""Hosts: trainers of other libraries that a bus can be attached to.

    class MyBridge(Bridge): ...                      # in my_module: publishes when the trainer calls it

    register_host(HostKind("their_library.Trainer", bridge="my_module:MyBridge"))
    bus.attach(their_trainer)

The kind of a trainer is found by the full names of its class and base classes, so that other libraries need not be imported. A
bridge is imported with the first trainer of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import msgspec

from trainbus.eventloop.builtin import kind_of, load_object
from trainbus.eventloop.bus.subscription import Subscription
from trainbus.eventloop.errors import SubscribeError


class HostKind(msgspec.Struct, frozen=True):
    """A kind of trainers, and the bridge that attaches a bus to them."""

    base: str  # full name of the trainer's class, with the module that defines it
    bridge: str  # module:attribute of an trainbus.bridges.Bridge
    name: str = ""  # the class as users import it; for messages
    loops: bool = True  # False for what has no loop: then only its saves are attached to


class Attachment(Protocol):
    """The interface of the :class:`trainbus.bridges.Bridge` that :meth:`trainbus.eventloop.Bus.attach` returns."""

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
    if kind is None:
        known = list(dict.fromkeys(one.name or one.base for one in _kinds.values() if one.loops))
        raise SubscribeError(
            f"bus.attach() knows {', '.join(known)}, not {_shown(trainer)}; with Accelerate, write your loop around "
            "Run(bus, accelerator=accelerator, ...), with torchft around Run(bus, replicas=manager, ...); for another trainer, "
            "write a bridge and register_host() it"
        )
    return load_object(kind.bridge)


def _shown(trainer: object) -> str:
    kind = trainer if isinstance(trainer, type) else type(trainer)
    return f"{'the class' if isinstance(trainer, type) else 'a'} {kind.__module__}.{kind.__qualname__}"
