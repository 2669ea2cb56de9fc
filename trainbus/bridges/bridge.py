"""``Bridge``: the common part of all bridges."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Self

from trainbus.bridges.copies import Unattached, announce_copies, attached, replaced
from trainbus.eventloop.bus import Bus, Subscription
from trainbus.eventloop.bus.hosts import bridge_for
from trainbus.eventloop.errors import ConfigurationError, SubscribeError, TrainingError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.training import HostedRun

log = get_logger()


class Bridge(ABC):
    """A bus in another library's trainer, from ``attach(bus, trainer)`` to :meth:`detach`.

    A subclass installs itself in :meth:`install`, makes a run with a :class:`TrainerHost` when the trainer begins, and drives
    it. It changes the trainer with :meth:`replace` and :meth:`on_detach` only, so that :meth:`detach` undoes everything.
    Keyword-only arguments of its constructor are options of :func:`attach`. First of all it refuses
    a library that lacks a name of its ``privates.py``.
    """

    host: ClassVar[str] = "the trainer"
    """Name of the trainer's class, for messages."""
    missing: ClassVar[Mapping[str, str]] = {}
    """The mount points that this trainer cannot publish, with the reason."""
    trains: ClassVar[str] = ""
    """The replaced method by which the trainer begins; a copy of the trainer says there that it has no bus."""
    instead: ClassVar[Mapping[str, str]] = {}
    """What to write instead of an option that only other bridges have."""

    def __init__(self, bus: Bus, trainer: Any) -> None:
        self.bus = bus
        self.trainer = trainer
        self.run: HostedRun | None = None
        """The run of the trainer's present or last training, validation or test."""
        self._undo = ExitStack()

    @classmethod
    def attach(cls, bus: Bus, trainer: Any, **options: Any) -> Self:
        """Return the bridge between a bus and a trainer; :func:`attach` calls this.

        Raises:
            SubscribeError: a bus is attached to this trainer already.
            ConfigurationError: an unknown or invalid option, or the installed library lacks a name that the bridge uses.
        """
        for one in attached:
            if one.trainer is trainer:
                whose = "this bus" if one.bus is bus else "another bus"
                raise SubscribeError(
                    f"{whose} is attached to this {type(trainer).__name__} already: add your hooks to it, or detach its bridge"
                )
        cls._check_options(options)
        bridge = cls(bus, trainer, **options)
        bridge.on_detach(partial(attached.discard, bridge))
        try:
            bridge.on_detach(partial(bus.internal.remove_bridge, bridge))
            bridge.install()
            if cls.trains:
                announce_copies(trainer, cls.trains, cls.host)
            bus.internal.add_bridge(bridge)
        except BaseException:
            bridge.detach()
            raise
        attached.add(bridge)
        return bridge

    @classmethod
    def _check_options(cls, options: Iterable[str]) -> None:
        signature = inspect.signature(cls)
        known = [one.name for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                way_out = cls.instead.get(name) or f"the options are: {', '.join(known) or 'none'}"
                raise ConfigurationError(f"attach(bus, trainer, {name}=...) is not an option for {cls.host}; {way_out}")

    @abstractmethod
    def install(self) -> None:
        """Make the trainer call this bridge."""

    @property
    def running(self) -> HostedRun | None:
        """The run, if it has begun and not ended."""
        return self.run if self.run is not None and self.run.running else None

    def detach(self) -> None:
        """Restore the trainer. Idempotent.

        Raises:
            TrainingError: the trainer is running.
        """
        if self.running is not None:
            raise TrainingError(f"bridge.detach() was called while {self.host} is running: call it before or after")
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return Unattached, (self.host,)  # in a copy of the trainer

    def warn_of_missing(self, subscriptions: Iterable[Subscription]) -> None:
        """Log a warning for each missing mount point that has a subscription."""
        heard = [(name, one.label) for one in subscriptions for name in one.mount_points if name in self.missing]
        for name in dict.fromkeys(name for name, _ in heard):
            handlers = list(dict.fromkeys(label for other, label in heard if other == name))
            log.warning(
                f"{self.host} cannot publish this mount point, so its handlers are never called",
                id="mount-point-missing",
                mount_point=name,
                reason=self.missing[name],
                handlers=handlers,
            )

    # ----------------------------------------------------------------------------------------------- for subclasses

    def on_detach(self, undo: Any) -> None:
        """Call ``undo`` when the bridge is detached; last registered, first called."""
        self._undo.callback(undo)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of one object, such as a method, until the bridge is detached."""
        self.on_detach(replaced(owner, name, value))


def attach(bus: Bus, trainer: object, **options: Any) -> Bridge:
    """Publish the mount points of another library's trainer on a bus, while it trains, validates or tests.

        bus = Bus(EMAHook(), LoggerHook())
        attach(bus, trainer)                        # before trainer.fit(), train() or run()
        attach(Bus(), trainer, checkpoints=True)    # no hooks: checkpoints are written beside the training

    The bus publishes, and its hooks may stop the training and request checkpoints. The trainer does everything else: it
    steps the optimizers, and it saves and resumes, with the state of the bus in its own checkpoints.

    Args:
        bus: the bus with the hooks.
        trainer: a trainer of a library with a bridge, see :mod:`trainbus.bridges`, or a trainer derived from it.
        **options: options of the bridge.

    Returns:
        The bridge. ``bridge.detach()``, or the end of a block ``with attach(bus, trainer):``, restores the trainer.
        ``bridge.missing`` has the mount points that the trainer cannot publish. Subscribing to one logs a warning.

    Raises:
        SubscribeError: another kind of object, or a trainer with a bus.
        ConfigurationError: an unknown or invalid option.
    """
    if not isinstance(bus, Bus):
        raise SubscribeError(f"attach() takes a bus and a trainer, attach(Bus(), trainer), and was given {bus!r} as the bus")
    bridge: Bridge = bridge_for(trainer).attach(bus, trainer, **options)
    return bridge
