"""Classes by the names that configurations give them: hooks, writers and averages.

    @register
    class Histograms(Hook): ...                  # {type = "Histograms"} in a configuration

    @register(name="histograms", aliases=("HistogramHook",))
    class Histograms(Hook): ...

A registered class derives from a base that was declared with :func:`registrable`: ``Hook``, ``Writer`` or ``WeightAverage``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import msgspec

from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.errors import RegistrationError, UnknownNameError
from trainbus.eventloop.spelling import did_you_mean

C = TypeVar("C", bound=type)


class Registered(msgspec.Struct, frozen=True):
    """A class that configurations can name."""

    name: str
    cls: type
    aliases: tuple[str, ...] = ()


_bases: dict[str, type] = {}
_found: dict[str, dict[str, Registered]] = defaultdict(dict)
_finders: list[Callable[[str, str], type | str | None]] = []


def registrable(kind: str) -> Callable[[C], C]:
    """Declare a base class whose subclasses can be registered (a decorator); ``kind`` is a word such as ``"hook"``."""

    def declare(base: C) -> C:
        _bases[kind] = base
        return base

    return declare


@overload
def register(cls: C, /, *, name: str | None = None, aliases: Iterable[str] = ()) -> C: ...
@overload
def register(*, name: str | None = None, aliases: Iterable[str] = ()) -> Callable[[C], C]: ...
def register(cls: C | None = None, /, *, name: str | None = None, aliases: Iterable[str] = ()) -> C | Callable[[C], C]:
    """Register a hook, a writer or an average for configurations: ``@register``, or ``@register(name=...)``.

    A class of the same module and name replaces the earlier one (a notebook cell that runs again).

    Args:
        cls: the class.
        name: its name in configurations; by default the name of the class.
        aliases: further names.

    Raises:
        RegistrationError: the class does not derive from a registrable base, or another class has the name.
    """
    if cls is None:
        return lambda found: register(found, name=name, aliases=aliases)
    kind = next((kind for kind, base in _bases.items() if isinstance(cls, type) and issubclass(cls, base)), None)
    if kind is None:
        bases = " or ".join(base.__name__ for base in _bases.values())
        raise RegistrationError(f"@register takes classes derived from {bases}, not {cls!r}")
    entry, named, full = Registered(name or cls.__name__, cls, tuple(aliases)), _found[kind], _full_name(cls)
    for one in (entry.name, *entry.aliases):
        if not isinstance(one, str) or not one or ":" in one:
            raise RegistrationError(f"{cls.__qualname__} cannot be registered as {one!r}: give a name without a colon")
        if one in named and (taken := _full_name(named[one].cls)) != full:
            way_out = f'give {full} another name: @register(name="...")'
            raise RegistrationError(f"the {kind} {one!r} is already registered by {taken}; {way_out}")
    for one in [one for one, taken in named.items() if _full_name(taken.cls) == full]:
        del named[one]
    named.update(dict.fromkeys((entry.name, *entry.aliases), entry))
    return cls


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def kind_of_base(base: type | None) -> str | None:
    """Return the kind of a declared base, such as ``"writer"`` for ``Writer``; None for any other class."""
    load_builtin("hooks")  # which declare them
    return next((kind for kind, declared in _bases.items() if declared is base), None)


def registered(kind: str) -> list[Registered]:
    """Return the registered classes of a kind (``"hook"``, ``"writer"``, ``"average"``), in order of registration.

    Raises:
        UnknownNameError: the kind is unknown.
    """
    load_builtin()
    if kind not in _bases:
        raise UnknownNameError(f"{kind!r} is not a kind{did_you_mean(kind, _bases)}; the kinds are {', '.join(_bases)}")
    return list({id(entry): entry for entry in _found[kind].values()}.values())


def find(kind: str, name: str) -> type[Any]:
    """Return the class registered under a name or alias; raise UnknownNameError with the nearest names."""
    for part in ("hooks", "observe"):  # most names are there, and the other parts take as long to import
        load_builtin(part)
        if name in _found[kind]:
            return _found[kind][name].cls
    names = ", ".join(entry.name for entry in registered(kind))
    if name in _found[kind]:
        return _found[kind][name].cls
    elsewhere = next(filter(None, (look(kind, name) for look in _finders)), "")
    if isinstance(elsewhere, type):
        return elsewhere
    hint = did_you_mean(name, _found[kind])
    known = "" if hint else f"; registered: {names or 'none (`from trainbus.hooks import *` registers the built-in ones)'}"
    raise UnknownNameError(f"{name!r} is not a registered {kind}{hint}{known}{elsewhere and f' ({elsewhere})'}")


def register_finder(look: Callable[[str, str], type | str | None]) -> None:
    """Ask ``look(kind, name)`` for a name that is not registered.

    It returns the class, because another system may have one of that name; or a phrase that says why there is none; or None,
    and the next one is asked.
    """
    if look not in _finders:
        _finders.append(look)


def add_aliases(name: str, aliases: Iterable[str]) -> None:
    """Give the class that is registered under a name further names, as far as they are free."""
    for named in [named for named in _found.values() if name in named]:
        entry = named[name]
        longer = msgspec.structs.replace(entry, aliases=(*entry.aliases, *(one for one in aliases if one not in named)))
        named.update(dict.fromkeys((longer.name, *longer.aliases), longer))
