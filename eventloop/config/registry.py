"""Names of hooks, writers and averages, for configurations.

    @register
    class Histograms(Hook): ...                  # {type = "Histograms"} in a configuration

    @register(name="histograms", aliases=("HistogramHook",))
    class Histograms(Hook): ...

A registered class derives from a base that was declared with :func:`registrable`: ``Hook`` is one, the package ``hooks``
declares ``Writer`` and ``WeightAverage``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any, TypeVar, overload

import msgspec

from eventloop.config.words import did_you_mean
from eventloop.errors import RegistrationError, UnknownNameError

C = TypeVar("C", bound=type)


class Registered(msgspec.Struct, frozen=True):
    """A class that configurations can name."""

    kind: str
    name: str
    cls: type
    aliases: tuple[str, ...] = ()


_bases: dict[str, type] = {}
_found: dict[str, dict[str, Registered]] = {}
_loaded = False


def registrable(kind: str) -> Callable[[C], C]:
    """Declare, as a decorator, a base whose subclasses can be registered; ``kind`` names one of them, such as ``"hook"``."""

    def declare(base: C) -> C:
        _bases[kind] = base
        _found.setdefault(kind, {})
        return base

    return declare


@overload
def register(cls: C, /) -> C: ...
@overload
def register(*, name: str | None = None, aliases: Iterable[str] = ()) -> Callable[[C], C]: ...
def register(cls: C | None = None, /, *, name: str | None = None, aliases: Iterable[str] = ()) -> C | Callable[[C], C]:
    """Let configurations name a class: a hook, a writer or an average. As ``@register``, or with options.

    Args:
        cls: the class.
        name: its name in configurations; the name of the class by default.
        aliases: further names.

    Raises:
        RegistrationError: the class derives from no registrable base, or another class has the name. Registering a class of
            the same module and name again (a notebook cell) replaces it.
    """
    if cls is None:
        return lambda found: _register(found, name, tuple(aliases))
    return _register(cls, name, tuple(aliases))


def _register(cls: C, name: str | None, aliases: tuple[str, ...]) -> C:
    entry = Registered(_kind(cls), name or cls.__name__, cls, aliases)
    named = _found[entry.kind]
    for one in (entry.name, *aliases):
        if not isinstance(one, str) or not one or ":" in one:
            raise RegistrationError(
                f"{cls.__qualname__} cannot be registered as {one!r}: give a name without a colon, which marks module:attribute"
            )
        taken = named.get(one)
        if taken is not None and not _same(taken.cls, cls):
            raise RegistrationError(
                f"the {entry.kind} {one!r} is already registered by {taken.cls.__module__}.{taken.cls.__qualname__}; "
                f'give {cls.__module__}.{cls.__qualname__} another name: @register(name="...")'
            )
    for one in [one for one, taken in named.items() if _same(taken.cls, cls)]:
        del named[one]
    named.update(dict.fromkeys((entry.name, *aliases), entry))
    return cls


def add_aliases(name: str, aliases: Iterable[str]) -> None:
    """Let the classes that are registered under a name be found under further ones, unless these are taken."""
    for named in _found.values():
        if name in named:
            entry = named[name]
            fresh = [one for one in aliases if one not in named]
            longer = msgspec.structs.replace(entry, aliases=(*entry.aliases, *fresh))
            named.update({one: longer for one, found in named.items() if found is entry} | dict.fromkeys(fresh, longer))


def _same(one: type, other: type) -> bool:
    return (one.__module__, one.__name__) == (other.__module__, other.__name__)


def _kind(cls: Any) -> str:
    kinds = [kind for kind, base in _bases.items() if isinstance(cls, type) and issubclass(cls, base)]
    if not kinds:
        bases = " or ".join(base.__name__ for base in _bases.values())
        raise RegistrationError(f"@register is for classes derived from {bases}, not for {cls!r}")
    return kinds[0]


def kind_of_base(base: type | None) -> str | None:
    """Return the kind that a base was declared for, ``"writer"`` for ``Writer``; None for any other class."""
    load_builtin()
    return next((kind for kind, declared in _bases.items() if declared is base), None)


def registered(kind: str) -> list[Registered]:
    """Return the registered classes of a kind (``"hook"``, ``"writer"``, ``"average"``), in order of registration.

    Raises:
        UnknownNameError: there is no such kind.
    """
    load_builtin()
    if kind not in _found:
        raise UnknownNameError(f"there is no kind {kind!r}{did_you_mean(kind, _found)}; there are {', '.join(_found)}")
    return list({id(entry): entry for entry in _found[kind].values()}.values())


def name_of(cls: type) -> str | None:
    """Return the name under which a class is registered; None if it is not."""
    load_builtin()
    return next((entry.name for named in _found.values() for entry in named.values() if entry.cls is cls), None)


def find(kind: str, name: str) -> type[Any]:
    """Return the class registered under a name or an alias.

    Raises:
        UnknownNameError: there is none; the message has the nearest names.
    """
    entries = registered(kind)
    try:
        return _found[kind][name].cls
    except KeyError:
        hint = did_you_mean(name, _found[kind])
        nothing = "none (`import hooks` registers those that come with trainbus)"
        known = "" if hint else f"; registered: {', '.join(entry.name for entry in entries) or nothing}"
        raise UnknownNameError(f"no {kind} is registered as {name!r}{hint}{known}") from None


def load_builtin() -> None:
    """Import the hooks of trainbus, once, by the entry point of the distribution: this package must not know them."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    try:
        points = metadata.distribution("trainbus").entry_points.select(group="trainbus")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed: `import hooks` registers them
        return
    for point in points:
        point.load()
