"""Hooks as other systems write them: what their names and options are here, so that their lists are understood as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from eventloop.config.places import inside, wrong
from eventloop.config.registry import add_aliases, load_builtin
from eventloop.config.values import kind_of, settle


class OptionChange(msgspec.Struct, frozen=True):
    """What an option of another system is here, where another name does not say it.

    Attributes:
        ours: the name of ours; "" where there is none.
        also: what it says beside that, in options of ours.
        says_nothing: values of an option without an equivalent that ask for nothing beyond what is done anyway, such as its
            default there: it is left out. None if all do.
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
        name: what the hook is called there.
        ours: names of what does the same here, the first one in its place; none where we have none, and ``note`` says why.
        options: its options, with the names of ours, or how they are changed.
        preset: options of ours that its name implies there; what is given comes first.
        note: what else there is to know.
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
        key: under which a table of a hook has one there, instead of ``priority``.
        names: in capitals, and their numbers.
    """

    system: str
    key: str
    names: dict[str, int]


_by_name: dict[str, list[Migration]] = {}
_scales: dict[str, PriorityScale] = {}


def register_migrations(table: Iterable[Migration]) -> None:
    """Let lists of hooks use the names and options of other systems. Register the classes that these stand for before."""
    for entry in table:
        names = (entry.name, *entry.aliases)
        for ours in entry.ours[:1]:
            add_aliases(ours, names)
        for name in names:
            known = _by_name.setdefault(name, [])
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
    """Return what is known of a hook of another system that is not here, as the end of a message; "" for other names."""
    absent = [entry for entry in _by_name.get(str(name), ()) if not entry.ours]
    return f" ({absent[0].system}'s: {absent[0].note})" if absent else ""


def translated(name: str | None, options: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return options as ours, where ``name`` is one that other systems have, too. Options of ours stay as they are.

    Raises:
        ConfigurationError: an option without an equivalent that asks for something, or two that are one here.
    """
    entry = _meant(name, options)
    if entry is None:
        return dict(options)
    ours: dict[str, Any] = {}
    also: dict[str, Any] = {}
    for option, value in options.items():
        change = entry.options.get(option, option)
        if isinstance(change, OptionChange) and not change.ours:
            _check_says_nothing(entry, option, change, settle(value), inside(place, option))
            continue
        renamed = change if isinstance(change, str) else change.ours
        if renamed in ours or (renamed != option and renamed in options):
            raise wrong(
                inside(place, option), f"{option} of {entry.system}'s {entry.name} is {renamed} here, which is given, too"
            )
        ours[renamed] = value
        if isinstance(change, OptionChange):
            also |= change.also
    return entry.preset | also | ours


def _meant(name: str | None, options: Mapping[str, Any]) -> Migration | None:
    """Return the hook that is meant: of those of one name the one with most of the options, or that takes none."""
    entries = _by_name.get(name or "", [])
    return max(entries, key=lambda entry: (len(entry.options.keys() & options.keys()), not entry.options), default=None)


def _check_says_nothing(entry: Migration, option: str, change: OptionChange, value: Any, place: str) -> None:
    if change.says_nothing is not None and value not in change.says_nothing:
        raise wrong(
            place,
            f"{option} of {entry.system}'s {entry.name} is not here, and {kind_of(value)} asks for something: "
            f"leave it out; {change.instead}",
        )
