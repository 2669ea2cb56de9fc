"""The JSON schema of configurations, from which editors complete and check them; and a configuration with all defaults.

Both come from the signatures of the loop and of the registered hooks. An option that is an object is a name, or a table with
``type``. Arguments of the user's own classes are not checked here, because that needs an import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from trainbus.config.names import option_descriptions, priority_scales
from trainbus.config.setup import STAGES, Tables, loop_signature, merged
from trainbus.eventloop.annotations import Member, Signature, members
from trainbus.eventloop.bus.priority import Priority
from trainbus.eventloop.registry import registered
from trainbus.eventloop.training.loop import TrainLoop

Schema = dict[str, Any]

_OBJECT: Final[Schema] = {"$ref": "#/$defs/object"}
_STEP: Final = "the function of (model, batch) that returns the loss"


def schema_of(default_hooks: Tables) -> Schema:
    """Return the JSON schema (draft 2020-12) of a configuration whose default hooks are these."""
    hooks = {entry.name: entry.cls for entry in registered("hook")}
    defaults = {name: _changes(hooks[str(table["type"])]) for name, table in default_hooks.items()}
    loop = loop_signature()
    told = option_descriptions(TrainLoop)
    options = {name: _option(loop, name, told) for name in loop.options}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a configuration for trainbus run",
        "type": "object",
        "properties": {
            "imports": {"type": "array", "items": {"type": "string"}, "description": "modules that names may come from"},
            "model": {**_one_or_several(), "description": "the model, or several by name"},
            "wrap": {"anyOf": [{"const": False}, _OBJECT], "description": "wraps the model under torchrun"},
            "optimizer": {**_one_or_several(), "description": "the optimizer, or several by name"},
            "data": _closed(dict.fromkeys(STAGES, _OBJECT), "the batches of each stage"),
            "step": {**_OBJECT, "description": _STEP},
            **{name: {**_OBJECT, "description": f"{_STEP}, for this stage"} for name in ("val_step", "test_step")},
            "metrics": {"type": "object", "additionalProperties": _OBJECT, "description": "metrics by name"},
            "loop": _closed(options, "options of the loop"),
            "default_hooks": {"type": "object", "properties": defaults, "additionalProperties": {"$ref": "#/$defs/hook"}},
            "custom_hooks": {"type": "array", "items": {"$ref": "#/$defs/hook"}},
        },
        "required": ["model", "optimizer", "data", "step"],
        "additionalProperties": False,
        "$defs": {
            "object": {
                "description": "module:attribute, or a table with type and its arguments",
                "anyOf": [{"type": "string"}, {"type": "object", "required": ["type"]}],
            },
            "hook": {
                "anyOf": [
                    {"enum": [*hooks]},
                    {"type": "string", "pattern": ":"},
                    *(_hook(name, cls) for name, cls in hooks.items()),
                    {
                        "type": "object",
                        "required": ["type"],
                        "properties": {"type": {"type": "string", "not": {"enum": [*hooks]}}},
                    },
                ]
            },
        },
    }


def _closed(properties: Mapping[str, Schema], description: str = "") -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False, "description": description}


def _one_or_several() -> Schema:
    return {"anyOf": [_OBJECT, {"type": "object", "additionalProperties": _OBJECT}]}


def _hook(name: str, cls: type) -> Schema:
    made = _options(cls)
    made["properties"] = {"type": {"const": name}, **made["properties"]}
    return {**made, "required": ["type"]}


def _changes(cls: type) -> Schema:
    """Return the schema of a default hook: false, options, or another hook."""
    return {"anyOf": [{"const": False}, _options(cls), {"$ref": "#/$defs/hook"}]}


def _options(cls: type) -> Schema:
    signature, descriptions = Signature(cls), option_descriptions(cls)
    options = {name: _option(signature, name, descriptions) for name in signature.options}
    priority: Schema = {"anyOf": [{"type": "integer"}, {"enum": [one.name for one in Priority]}]}
    more: dict[str, Schema] = {"priority": priority, **{key: {} for key in priority_scales}, "name": {"type": "string"}}
    made = _closed({**more, **options}, (cls.__doc__ or "").partition("\n\n")[0].replace("\n", " ").strip())
    if signature.rest is not None:
        made["additionalProperties"] = True
    return made


def _option(signature: Signature, name: str, descriptions: Mapping[str, str]) -> Schema:
    option = signature.options[name]
    kinds = [_member(one) for one in members(option.annotation)]
    made: Schema = {} if {} in kinds else dict(kinds[0]) if len(kinds) == 1 else {"anyOf": kinds}
    if name in descriptions:
        made["description"] = descriptions[name]
    if _is_plain(option.default):
        made["default"] = option.default
    return made


def _member(one: Member) -> Schema:
    match one.form:
        case "any" | "record":
            return {}
        case "text" if isinstance(one.annotation, type) and issubclass(one.annotation, Enum):
            return {"anyOf": [{"enum": [each.name for each in one.annotation]}, {"type": "integer"}]}
        case "text":
            try:
                made: Schema = msgspec.json.schema(one.annotation)
            except TypeError:  # a bytes default, for example
                return {}
            bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
            given = {theirs: getattr(one.bounds, ours, None) for ours, theirs in bounds.items()}
            return made | {name: value for name, value in given.items() if value is not None}
        case "list":
            return {"type": "array"}
        case "table":
            return {"type": "object"}
        case "path":
            return {"type": "string"}
        case _:
            return _OBJECT


def with_defaults(config: Mapping[str, Any], default_hooks: Tables) -> dict[str, Any]:
    """Return a configuration with all default hooks, and with the defaults of the loop and of registered hooks.

    Defaults that are None, or objects, are left out: they mean that nothing is given.
    """
    hooks = {name: entry.cls for entry in registered("hook") for name in (entry.name, *entry.aliases)}
    loop = _defaults(loop_signature()) | dict(config.get("loop") or {})
    tables = merged(default_hooks, config.get("default_hooks") or {}, "default_hooks")
    off = {name: False for name in default_hooks if name not in tables}
    customs = config.get("custom_hooks") or []
    return {
        **config,
        "loop": loop,
        "default_hooks": {name: _filled(table, hooks) for name, table in tables.items()} | off,
        "custom_hooks": [_filled(table, hooks) for table in customs] if isinstance(customs, list) else customs,
    }


def _filled(table: Any, hooks: Mapping[str, type]) -> Any:
    named = table.get("type") if isinstance(table, Mapping) else table
    if not isinstance(named, str) or named not in hooks:
        return table
    given = dict(table) if isinstance(table, Mapping) else {"type": table}
    own = {entry.name for entry in registered("hook")}
    return {**given, **_defaults(Signature(hooks[named])), **given} if named in own else given  # others have their own names


def _defaults(signature: Signature) -> dict[str, Any]:
    return {name: option.default for name, option in signature.options.items() if _is_plain(option.default)}


def _is_plain(value: object) -> bool:
    """Return True for a default that a file can hold."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
