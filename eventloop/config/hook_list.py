"""Hooks from a configuration: the list ``custom_hooks``, and the mapping ``default_hooks`` over what is there by default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from eventloop.bus import Bus
from eventloop.bus.hook import Hook
from eventloop.bus.priority import Priority, PriorityLike
from eventloop.config.described import missing_type
from eventloop.config.elsewhere import priority_scales, translated
from eventloop.config.make import Maker
from eventloop.config.options import Options
from eventloop.config.places import inside, wrong
from eventloop.config.references import Imports
from eventloop.config.registry import did_you_mean, name_of, registered, registrable
from eventloop.config.values import FromText, kind_of, settle
from eventloop.errors import SubscribeError

Chosen = tuple[Hook, PriorityLike | None]
"""A hook, and the priority that the configuration gives it; None leaves it the hook's own."""

registrable("hook")(Hook)


def add_hooks(
    bus: Bus,
    hooks: Iterable[Any],
    *,
    imports: Sequence[str] = (),
    model: Any = None,
    optimizer: Any = None,
) -> None:
    """Add the hooks that a configuration describes to a bus; all of them, or none if one is wrong.

        add_hooks(bus, [{"type": "EMAHook", "momentum": 0.001}, {"type": "LoggerHook", "priority": "LOW"}])

    Args:
        bus: gets them.
        hooks: tables with the ``type`` of a hook (its registered name, its class, or ``module:attribute``), its options,
            and perhaps a ``priority`` and a ``name``; or a name alone.
            Options are typed by the constructor's signature. One that is an object is a table with a ``type`` of its own.
        imports: modules that ``module:attribute`` may name.
        model: what objects with a parameter ``model`` get, if they need one.
        optimizer: the same for ``optimizer``, such as schedulers have it; of several, by name, the table names one.

    Raises:
        ConfigurationError: a wrong type, an unknown name or option, something missing: with its place
            (``hooks[2].interval``), what was expected and the nearest name.
        SubscribeError: as for :meth:`Bus.add`.
    """
    bus.add_chosen(hooks_in(hooks, Maker(Imports(imports), model=model, optimizer=optimizer), "hooks"))


def hooks_in(entries: Any, maker: Maker, place: str) -> list[Chosen]:
    """Return the hooks of a list of tables (``type``, ``priority``, ``name``, options), names or hook objects.

    Raises:
        ConfigurationError: whatever is wrong with one, with its place.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
        raise wrong(place, f"expected a list of hooks, got {kind_of(entries)}")
    return [hook_from(entry, maker, inside(place, index)) for index, entry in enumerate(entries)]


def hook_from(entry: Any, maker: Maker, place: str) -> Chosen:
    """Return the hook that a table or a name describes; one that is a hook already, or a class of one, will do, too."""
    if isinstance(entry, Hook):
        return entry, None
    table = {"type": entry} if isinstance(entry, str | type) else entry
    if not isinstance(table, Mapping):
        raise wrong(place, f"expected a table with the type of a hook, or its name, got {kind_of(entry)}")
    if "type" not in table:
        known = ", ".join(one.name for one in registered("hook"))
        raise wrong(
            inside(place, "type"),
            f"is missing{missing_type(table)}: name a hook, one of {known}, or your own",
        )
    cls = maker.class_(table["type"], Hook, inside(place, "type"))
    called = table["type"] if isinstance(table["type"], str) else name_of(cls)
    ours = ("type", "priority", *priority_scales(), "name")
    options = translated(called, {key: value for key, value in table.items() if key not in ours}, place)
    priority = _priority(table, place)
    if "name" in table and "name" in Options(cls).known:
        options["name"] = table["name"]
    hook = maker.call(cls, options, place, also_known=ours)
    if "name" in table and "name" not in options:
        hook.name = _name(table["name"], inside(place, "name"))
    return hook, priority


def merged(defaults: Mapping[str, Mapping[str, Any]], changes: Any, place: str) -> dict[str, Any]:
    """Return ``defaults`` with what a configuration says about them.

    By name: a table without ``type`` changes options, one with ``type`` replaces the hook, ``false`` (or null) switches it
    off, and another name with ``type`` is a further hook.

    Raises:
        ConfigurationError: an unknown name without ``type``, or another value.
    """
    if not isinstance(changes, Mapping):
        raise wrong(place, f"expected a table of hooks by name, got {kind_of(changes)}")
    hooks: dict[str, Any] = {name: dict(table) for name, table in defaults.items()}
    for name, change in changes.items():
        here = inside(place, str(name))
        value = settle(change) if isinstance(change, FromText) else change
        if value is False or value is None:
            _check_known(name, defaults, here)
            hooks.pop(name, None)
        elif isinstance(value, Mapping) and "type" not in value:
            _check_known(name, defaults, here)
            hooks[name] = {**defaults[name], **value}
        elif isinstance(value, Mapping | str | type | Hook):
            hooks[name] = value
        else:
            raise wrong(here, f"expected a table of options, or false for no such hook, got {kind_of(value)}")
    return hooks


def _check_known(name: str, defaults: Mapping[str, Any], place: str) -> None:
    if name not in defaults:
        hint = did_you_mean(str(name), defaults) or f"; there are {', '.join(defaults)}"
        raise wrong(place, f"there is no default hook {name!r}{hint} (another one needs its type)")


def _priority(table: Mapping[str, Any], place: str) -> int | None:
    scales = {key: scale for key, scale in priority_scales().items() if table.get(key) is not None}
    for key, scale in scales.items():
        if "priority" in table:
            advice = f"{key} is {scale.system}'s name for it, on {scale.system}'s scale; give one"
            raise wrong(inside(place, key), f"priority is given, too: {advice}")
        return _parsed(table[key], inside(place, key), scale.names)
    return None if table.get("priority") is None else _parsed(table["priority"], inside(place, "priority"))


def _parsed(value: Any, place: str, names: Mapping[str, int] | None = None) -> int:
    try:
        return Priority.parse(_plain(value), names)
    except SubscribeError as error:
        raise wrong(place, str(error)) from None


def _plain(value: Any) -> Any:
    if isinstance(value, FromText):
        return settle(value)
    # A member of somebody else's enumeration, goes by its name.
    return value.name if isinstance(value, Enum) and not isinstance(value, int) else value


def _name(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(place, f"expected str, got {kind_of(value)}")
    return str(value)
