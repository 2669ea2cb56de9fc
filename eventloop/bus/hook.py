"""Subscriptions as an object: :class:`Hook`, :func:`mount`, and the choice of the methods to subscribe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from trainbus.eventloop import notebook
from trainbus.eventloop.bus.priority import Priority, PriorityLike
from trainbus.eventloop.checks import given_to, options_of
from trainbus.eventloop.errors import SubscribeError
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import name_of, registry, resolve, suggest
from trainbus.eventloop.events.mount_points import BUILTIN
from trainbus.eventloop.notebook import brief
from trainbus.eventloop.plain import without_secrets
from trainbus.eventloop.registry import registrable
from trainbus.eventloop.spelling import is_misspelt

Method = TypeVar("Method", bound=Callable[..., Any])
Ranks = Literal["all", "rank0"]


@registrable("hook")
class Hook:
    """A set of subscriptions with state. Methods named like mount points, also your own, are subscribed by ``bus.add(hook)``.

    Plain methods run inline, ``async`` ones are offloaded; :func:`mount` gives one method filters, ``offload`` or
    ``capture``. Offloaded methods of one mode are called one at a time, in the order of their events. ``after_run``, inline or
    not, comes when all offloaded methods are done. ``before_epoch``, ``after_epoch``, ``before_iter`` and ``after_iter`` hear
    all three stages.

    Attributes:
        priority: priority of all methods without their own.
        name: key of ``state_dict`` in checkpoints and label in tables; the class name by default. Two hooks of a kind
            that both have state need two names.
        observes: True for a hook that does not change the state of the run, or puts back what it changed. A checkpoint
            requested after a validation may then be a second name of the file written before it. With any other inline
            handler in between, it is a separate file.
        timing: True for a hook that needs ``bus.costs()``: adding it sets ``bus.timing``.
        ranks: ``"all"``, or ``"rank0"`` for a hook that only the first of several processes calls, such as one that writes.
    """

    priority: PriorityLike = Priority.NORMAL
    name: str = ""
    observes: bool = False
    timing: bool = False
    ranks: Ranks = "all"

    def __repr__(self) -> str:
        options = without_secrets(given_to(self))
        return f"{type(self).__name__}({', '.join(f'{name}={brief(value)}' for name, value in options.items())})"

    def _repr_html_(self) -> str:
        heard = {"heard mount points": ", ".join(mount_points_of(type(self)))}
        options = without_secrets(options_of(self))  # pages of notebooks are committed and shared
        return notebook.card(self.label, {name: brief(value) for name, value in options.items()} | heard)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a resume; {} by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    def unused(self) -> Collection[str]:
        """Return the names of mount-point methods that this hook does not need with its options; none by default.

        ``bus.add`` does not subscribe them, so their events cost nothing.
        """
        return ()

    def needs_metrics(self) -> Collection[str]:
        """Return the names of the validation metrics that this hook acts on; none by default.

        ``TrainLoop`` checks them before the training, when it looks at the first batches of ``val_data``.
        """
        return ()

    def files_of_run(self, work_dir: Path) -> Collection[Any]:
        """Return the files and folders that this hook writes for a run in ``work_dir``; none by default.

        If one of them exists, a new training gets a work dir of its own. In the folder of another trainer they are moved to
        a subfolder ``earlier-1``.
        """
        return ()

    def best_checkpoint(self) -> Any:
        """Return the best checkpoint that this hook keeps, a ``Best`` of path, score and metric; None by default."""
        return None

    def take_weights(self, checkpoint: dict[str, Any]) -> None:
        """Take over the averages in the best checkpoint, whose weights are loaded at the end of a training.

        The model gets ``checkpoint["state_dict"]`` after this call. Nothing else of the file counts.
        """

    def in_check(self) -> Hook | None:
        """Return the hook that takes part in ``loop.check()``; called on a copy of the hook. None leaves it out.

        Override it in a hook that writes outside of the run's work dir, starts a server or talks to a service.
        """
        return self

    def default_work_dir(self) -> Path | None:
        """Return the work dir for a run that is given none, such as the folder that a cluster has for the job; None by default.

        Such a run stays in that folder: a new training moves the files of an earlier one there to ``earlier-1``.
        """
        return None

    def default_checkpoint_dir(self) -> Any:
        """Return the directory or URL of checkpoints without one of their own, if it is not the work dir; None by default."""
        return None

    @property
    def label(self) -> str:
        """The name of this hook in tables, errors and checkpoints."""
        return self.name or type(self).__name__

    @property
    def stateful(self) -> bool:
        """True if the hook's class defines ``state_dict``."""
        return type(self).state_dict is not Hook.state_dict


class Mount(NamedTuple):
    """The options that :func:`mount` stores on a method."""

    events: tuple[type[Event] | str, ...] = ()
    options: Mapping[str, Any] = {}


_UNMARKED = Mount()


def mount(*events: type[Event] | str, **options: Any) -> Callable[[Method], Method]:
    """Give one method of a :class:`Hook` its own options.

    Args:
        *events: one or several mount points, if the method's name is not the mount point. An offloaded method of several has
            one lane for all of them, so that they arrive in the order in which they were published.
        **options: options of ``bus.on``, such as a ``priority`` other than the hook's (``offload="process"`` only for a
            ``@staticmethod``: the hook itself stays in this process). An ``operator.attrgetter``, except as ``when`` or
            ``capture``, takes the value from the hook when it is added to a bus: ``every=attrgetter("interval")``.
    """

    def mark(method: Method) -> Method:
        # Over or under @staticmethod, which a handler for a worker process has to be.
        vars(getattr(method, "__func__", method))["__trainbus_mount__"] = Mount(events, options)
        return method

    return mark


def subscriptions_of(hook: Hook) -> Iterator[tuple[tuple[type[Event], ...], Callable[..., Any], dict[str, Any]]]:
    """Yield events, bound method and options for every subscription of ``hook``; raise SubscribeError for mistakes in it."""
    _check_state(hook)
    found = False
    marks = dict(_marks(type(hook)))
    named = hook.unused()
    unused = {named} if isinstance(named, str) else set(named)
    for name in sorted(unused - marks.keys()):
        raise SubscribeError(f"{hook.label}.unused() names {name!r}, which is not one of its methods: {', '.join(marks)}")
    for name, mark in marks.items():
        if not mark.events and name not in registry:
            _check_spelling(hook, name, marked=mark is not _UNMARKED)
            continue
        found = True
        if name not in unused:
            options = {
                option: value(hook) if isinstance(value, attrgetter) and option not in ("when", "capture") else value
                for option, value in mark.options.items()
                if value is not None
            }
            events = tuple(map(resolve, mark.events or (name,)))
            yield events, getattr(hook, name), {"priority": hook.priority, "ranks": hook.ranks, **options}
    if not found:
        raise SubscribeError(
            f"{hook.label} has no method named like a mount point, so it would never be called; "
            "name one after_train_iter, say, or mark it with @mount(...)"
        )


def mount_points_of(cls: type[Hook]) -> list[str]:
    """Return the mount points that hooks of a class subscribe to, in order of definition, with any options."""
    events = (mark.events or (name,) for name, mark in _marks(cls) if mark.events or name in registry)
    return list(dict.fromkeys(name_of(resolve(event)) for heard in events for event in heard))


def _marks(cls: type[Hook]) -> Iterator[tuple[str, Mount]]:
    """Yield the methods of a hook's class, base classes first, each with its ``@mount`` options."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base not in (object, Hook):
            names.update(dict.fromkeys(name for name in vars(base) if not name.startswith("_")))
    for name in names:
        if inspect.isroutine(inspect.getattr_static(cls, name)) and not hasattr(Hook, name):
            yield name, getattr(getattr(cls, name), "__trainbus_mount__", _UNMARKED)


def check_single(hook: object) -> None:
    """Raise SubscribeError for a class, a list of hooks, or the description of a hook."""
    if isinstance(hook, type):
        raise SubscribeError(f"bus.add takes a hook object: write bus.add({hook.__name__}(...))")
    if isinstance(hook, list | tuple | set | frozenset | Iterator):
        raise SubscribeError(f"bus.add takes the hooks one by one, not in a {type(hook).__name__}: write bus.add(*hooks)")
    if isinstance(hook, str | Mapping):
        raise SubscribeError(f"bus.add takes hook objects; write add_hooks(bus, [{hook!r}]) to create them")


def _check_state(hook: Hook) -> None:
    saves, loads = type(hook).state_dict is not Hook.state_dict, type(hook).load_state_dict is not Hook.load_state_dict
    if saves and not loads:
        raise SubscribeError(
            f"{hook.label} has a state_dict but no load_state_dict, so its saved state would be lost; define both"
        )
    if loads and not saves:
        raise SubscribeError(f"{hook.label} has a load_state_dict but no state_dict, so there is nothing to load; define both")


def _check_spelling(hook: Hook, name: str, *, marked: bool) -> None:
    if marked:
        raise SubscribeError(f"{hook.label}.{name} is marked with @mount, but {name!r} is not a mount point{suggest(name)}")
    if name.startswith(("before_", "after_", "on_")):
        raise SubscribeError(
            f"{hook.label}.{name} looks like a handler, but {name!r} is not a mount point{suggest(name)}. "
            "The name of a helper method must not start with before_, after_ or on_"
        )
    if is_misspelt(name, BUILTIN):
        raise SubscribeError(
            f"{hook.label}.{name} would never be called: {name!r} is not a mount point{suggest(name)}. "
            "Give a helper method a less similar name, or one that begins with an underscore"
        )
