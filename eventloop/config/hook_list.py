"""Hooks from a configuration: the list ``custom_hooks``, and the table ``default_hooks`` of changes to the default hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from eventloop.bus import Bus
from eventloop.bus.hook import Hook
from eventloop.bus.priority import Priority, PriorityLike
from eventloop.config.make import Maker, Signature, missing_type
from eventloop.config.migrations import priority_scales, translated
from eventloop.config.names import Imports, name_of, registered, registrable
from eventloop.config.read import FromText, did_you_mean, inside, kind_of, settle, wrong
from eventloop.errors import SubscribeError

Chosen = tuple[Hook, PriorityLike | None]
"""A hook, and the priority that the configuration gives it; None keeps the hook's own."""

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
        model: for objects whose required parameter ``model`` the table does not give.
        optimizer: the same for ``optimizer``, which schedulers have; of several, by name, the table names one.

    Raises:
        ConfigurationError: a wrong type, an unknown name or option, something missing: with its position
            (``hooks[2].interval``), what was expected and the nearest name.
        SubscribeError: as for :meth:`Bus.add`.
    """
    bus.add_chosen(hooks_in(hooks, Maker(Imports(imports), model=model, optimizer=optimizer), "hooks"))


def hooks_in(entries: Any, maker: Maker, where: str) -> list[Chosen]:
    """Return the hooks of a list of tables (``type``, ``priority``, ``name``, options), names or hook objects.

    Raises:
        ConfigurationError: one of them is wrong, with its position.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
        raise wrong(where, f"expected a list of hooks, got {kind_of(entries)}")
    return [hook_from(entry, maker, inside(where, index)) for index, entry in enumerate(entries)]


def hook_from(entry: Any, maker: Maker, where: str) -> Chosen:
    """Return the hook that a table, a name or a class describes; a hook is returned as it is."""
    if isinstance(entry, Hook):
        return entry, None
    table = {"type": entry} if isinstance(entry, str | type) else entry
    if not isinstance(table, Mapping):
        raise wrong(where, f"expected a table with the type of a hook, or its name, got {kind_of(entry)}")
    if "type" not in table:
        known = ", ".join(one.name for one in registered("hook"))
        raise wrong(inside(where, "type"), f"is missing{missing_type(table)}: name a hook, one of {known}, or your own")
    cls = maker.class_(table["type"], Hook, inside(where, "type"))
    called = table["type"] if isinstance(table["type"], str) else name_of(cls)
    ours = ("type", "priority", *priority_scales(), "name")
    options = translated(called, {key: value for key, value in table.items() if key not in ours}, where)
    priority = _priority(table, where)
    takes_name = "name" in Signature(cls).options
    if "name" in table and takes_name:
        options["name"] = table["name"]
    hook = maker.call(cls, options, where, also_known=ours)
    if "name" in table and not takes_name:
        if not isinstance(table["name"], str) or not table["name"]:
            raise wrong(inside(where, "name"), f"expected str, got {kind_of(table['name'])}")
        hook.name = str(table["name"])
    return hook, priority


def merged(defaults: Mapping[str, Mapping[str, Any]], changes: Any, where: str) -> dict[str, Any]:
    """Return ``defaults`` with the changes of a configuration.

    By name: a table without ``type`` changes options, one with ``type`` replaces the hook, ``false`` (or null) switches it
    off, and another name with ``type`` is a further hook.

    Raises:
        ConfigurationError: an unknown name without ``type``, or another value.
    """
    if not isinstance(changes, Mapping):
        raise wrong(where, f"expected a table of hooks by name, got {kind_of(changes)}")
    hooks: dict[str, Any] = {name: dict(table) for name, table in defaults.items()}
    for name, change in changes.items():
        here = inside(where, str(name))
        value = settle(change) if isinstance(change, FromText) else change
        is_off = value is False or value is None
        has_type = isinstance(value, Mapping) and "type" in value
        if name not in defaults and (is_off or (isinstance(value, Mapping) and not has_type)):
            hint = did_you_mean(str(name), defaults) or f"; there are {', '.join(defaults)}"
            raise wrong(here, f"there is no default hook {name!r}{hint} (another one needs its type)")
        if is_off:
            del hooks[name]
        elif has_type or isinstance(value, str | type | Hook):
            hooks[name] = value
        elif isinstance(value, Mapping):
            hooks[name] |= value
        else:
            raise wrong(here, f"expected a table of options, or false for no such hook, got {kind_of(value)}")
    return hooks


def _priority(table: Mapping[str, Any], where: str) -> int | None:
    scales = {key: scale for key, scale in priority_scales().items() if table.get(key) is not None}
    for key, scale in scales.items():
        if "priority" in table:
            advice = f"{key} is {scale.system}'s name for it, on {scale.system}'s scale; give one"
            raise wrong(inside(where, key), f"priority is given, too: {advice}")
    key, names = next(((key, scale.names) for key, scale in scales.items()), ("priority", None))
    value = settle(table.get(key))
    if isinstance(value, Enum) and not isinstance(value, int):
        value = value.name  # a member of a foreign enumeration
    try:
        return None if value is None else Priority.parse(value, names)
    except SubscribeError as error:
        raise wrong(inside(where, key), str(error)) from None
