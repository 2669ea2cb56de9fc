"""Hooks as other systems write them: their names and options are translated, so that their lists work unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from eventloop.config.names import add_aliases, load_builtin
from eventloop.config.read import inside, kind_of, settle, wrong


class OptionChange(msgspec.Struct, frozen=True):
    """The translation of an option of another system, where a new name alone does not say it.

    Attributes:
        ours: our name; "" where there is none.
        also: further options of ours that it sets.
        says_nothing: values of an option without an equivalent that ask only for the behaviour here, such as its default
            there: it is left out. None for all values.
        instead: what to write for the other values.
    """

    ours: str = ""
    also: dict[str, Any] = {}
    says_nothing: tuple[Any, ...] | None = (None,)
    instead: str = ""


class Migration(msgspec.Struct, frozen=True):
    """One hook (or writer) of another system.

    Attributes:
        system: its name.
        name: of the hook there.
        ours: our names for the same, the first one in its place; empty where we have none, and ``note`` says why.
        options: its options, with our names or their changes.
        preset: options of ours that its name implies there; given ones come first.
        note: further differences.
        aliases: further names that it has there.
    """

    system: str
    name: str
    ours: tuple[str, ...] = ()
    options: dict[str, str | OptionChange] = {}
    preset: dict[str, Any] = {}
    note: str = ""
    aliases: tuple[str, ...] = ()

    def renamed(self, option: str) -> str:
        """Return our name of an option; "" if we have none."""
        change = self.options[option]
        return change if isinstance(change, str) else change.ours


class PriorityScale(msgspec.Struct, frozen=True):
    """The priorities of another system.

    Attributes:
        system: its name.
        key: under which the table of a hook has one there, instead of ``priority``.
        names: in capitals, and their numbers.
    """

    system: str
    key: str
    names: dict[str, int]


_migrations: dict[str, list[Migration]] = {}
_scales: dict[str, PriorityScale] = {}


def register_migrations(table: Iterable[Migration]) -> None:
    """Let lists of hooks use the names and options of other systems. Register the classes that these stand for before."""
    for entry in table:
        names = (entry.name, *entry.aliases)
        for ours in entry.ours[:1]:
            add_aliases(ours, names)
        for name in names:
            known = _migrations.setdefault(name, [])
            if entry not in known:
                known.append(entry)


def register_priorities(scale: PriorityScale) -> None:
    """Let the tables of hooks give their priority on the scale of another system, under its key."""
    _scales[scale.key] = scale


def priority_scales() -> dict[str, PriorityScale]:
    """Return the scales of other systems by their keys."""
    load_builtin()
    return _scales


def why_not_here(name: object) -> str:
    """Return the note on a hook of another system that is not here, as the end of a message; "" for other names."""
    absent = [entry for entry in _migrations.get(str(name), ()) if not entry.ours]
    return f" ({absent[0].system}'s: {absent[0].note})" if absent else ""


def translated(name: str | None, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options as ours, if ``name`` is also a name in another system. Options of ours stay as they are.

    Raises:
        ConfigurationError: an option without an equivalent asks for another behaviour, or two options are one here.
    """
    # Of those of one name the one with most of the options, or that takes none.
    entries = [(len(one.options.keys() & options.keys()), not one.options, one) for one in _migrations.get(name or "", ())]
    if not entries:
        return dict(options)
    entry = max(entries, key=lambda found: found[:2])[2]
    ours: dict[str, Any] = {}
    also: dict[str, Any] = {}
    for option, value in options.items():
        change = entry.options.get(option, option)
        change = OptionChange(change) if isinstance(change, str) else change
        theirs, here = f"{option} of {entry.system}'s {entry.name}", inside(where, option)
        if change.ours in ours or (change.ours != option and change.ours in options):
            raise wrong(here, f"{theirs} is {change.ours} here, which is given, too")
        if change.ours:
            ours[change.ours] = value
            also |= change.also
        elif change.says_nothing is not None and (settled := settle(value)) not in change.says_nothing:
            asks = f"{kind_of(settled)} asks for something"
            raise wrong(here, f"{theirs} is not here, and {asks}: leave it out; {change.instead}")
    return entry.preset | also | ours
