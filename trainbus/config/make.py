"""Create the objects of a configuration, with options typed by the signatures of classes and functions."""

from __future__ import annotations

import functools
import inspect
import operator
import traceback
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainbus.config.names import Imports, is_reference, translated
from trainbus.config.read import FromText, all_parsed, check_keys, inside, kind_of, parsed, wrong
from trainbus.eventloop.annotations import Member, Signature, describe, members
from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.errors import TrainbusError
from trainbus.eventloop.registry import find, kind_of_base, registered
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.user_errors import add_note

_NOT_IT: Any = object()


class Maker:
    """Make objects from tables such as ``{type = "torch.optim:AdamW", lr = 0.001}``, or from a name alone.

    ``type`` is ``module:attribute``, or a registered name if a hook, writer or average is expected. All other keys are
    options. An option that is an object is described in the same way.

    Args:
        imports: modules that ``module:attribute`` may name.
        system: another system that registered names are of, with its defaults; "" for trainbus.
        given: values of required parameters that a table lacks, by name, such as ``model``. A parameter whose value is None
            is not given. A table selects one of several optimizers by its name.
    """

    def __init__(self, imports: Imports | None = None, system: str = "", /, **given: Any) -> None:
        load_builtin("compat")  # registers the names of other systems
        self.imports = imports or Imports()
        self._system = system
        self._optimizers: Mapping[str, Any] = {}
        if isinstance(given.get("optimizer"), Mapping):
            self._optimizers = given.pop("optimizer")
        self._given = {name: value for name, value in given.items() if value is not None}

    def make(self, value: Any, where: str, *, expected: type | None = None) -> Any:
        """Return the object that ``value`` describes: call its ``type`` with the other keys as options.

        If ``type`` names an object (neither class nor function), return that object. If ``value`` is an object, return it.

        Raises:
            ConfigurationError: a name or option is unknown, a type is wrong, or the object is not an ``expected``.
        """
        made, options = self.find(value, where, expected)
        if options is not None and (isinstance(made, type | functools.partial) or inspect.isroutine(made)):
            made = self.call(Signature(made), options, where)
        elif options:
            raise wrong(where, f"{made!r} is neither a class nor a function, so it takes no options ({', '.join(options)})")
        if expected is not None and not isinstance(made, expected):
            article = "an" if expected.__name__[0] in "AEIOU" else "a"
            raise wrong(where, f"expected {article} {expected.__name__}, got {made!r}")
        return made

    def function(self, value: Any, where: str) -> Callable[..., Any]:
        """Return the function that ``value`` names. Options are bound to a function; a class is called with them."""
        found, options = self.find(value, where)
        if isinstance(value, Mapping) and isinstance(found, type):
            found = self.call(Signature(found), options or {}, where)
        elif options and callable(found):
            found = functools.partial(found, **self.decode(Signature(found), options, where))
        if not callable(found):
            raise wrong(where, f"expected a function, as module:attribute, got {kind_of(found)}")
        return found  # type: ignore[no-any-return]

    def find(self, value: Any, where: str, base: type | None = None) -> tuple[Any, dict[str, Any] | None]:
        """Return the object that a name or a table's ``type`` refers to, and the table's other keys (None for an object).

        If classes derived from ``base`` are registered, names and options of other systems are translated.
        """
        if not isinstance(value, str | Mapping):
            return value, None
        kind = kind_of_base(base)
        entries = [] if kind is None else registered(kind)
        table = {"type": value} if isinstance(value, str) else value
        at = where if isinstance(value, str) else inside(where, "type")
        if "type" not in table:
            near = [f" (is {str(key)!r} misspelt?)" for key in table if did_you_mean(str(key), ["type"])]
            names = f"name a {kind}, one of {', '.join(one.name for one in entries)}, or your own, as module:attribute"
            raise wrong(
                at, f"is missing{''.join(near[:1])}: {names if kind else 'name a class or function, as module:attribute'}"
            )
        name = table["type"]
        found = self._named(name, at, kind) if isinstance(name, str) else name
        options = {key: entry for key, entry in table.items() if key != "type"}
        called = name if isinstance(name, str) else next((one.name for one in entries if one.cls is name), None)
        system = self._system if isinstance(name, str) else ""  # a class of ours has its own defaults
        return found, translated(called, options, where, system) if kind else options

    def _named(self, name: str, where: str, kind: str | None) -> Any:
        if kind is None or ":" in name:
            return self.imports.resolve(name, where)
        try:
            return find(kind, name)
        except TrainbusError as error:
            raise wrong(where, f"{error}; write an unregistered class as module:attribute") from None

    def call(self, signature: Signature, table: Mapping[str, Any], where: str) -> Any:
        """Call the target of a signature with the options in a table; add ``where`` to its errors."""
        values = self.decode(signature, table, where)
        for name, option in signature.options.items():
            if option.default is option.empty and name not in values:
                if name not in self._given:
                    type_ = "" if option.annotation is Any else f" ({describe(option.annotation)})"
                    which = f"; name one of {', '.join(self._optimizers)}" if name == "optimizer" and self._optimizers else ""
                    raise wrong(inside(where, name), f"is missing: {signature.label} needs it{type_}{which}")
                values[name] = self._given[name]
        by_position = [name for name, option in signature.options.items() if option.kind is option.POSITIONAL_ONLY]
        positional = [values.pop(name) for name in by_position if name in values]
        try:
            return signature.target(*positional, **values)
        except Exception as error:
            if isinstance(error, TrainbusError) and type(error).__module__ == TrainbusError.__module__:  # it takes one text
                raise type(error)(f"{where} ({signature.label}): {error}") from error
            called = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
            is_torchs = called and all(f"{name}.".startswith("torch.") for name in called)  # raised without the user's code
            if isinstance(error, TypeError | ValueError) and is_torchs:
                raise wrong(where, f"{signature.label} does not take these options: {error}") from error
            add_note(error, f"while making {signature.label} for {where}")
            raise

    def decode(self, signature: Signature, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the options in a table, typed by a signature; raise ConfigurationError for unknown or wrong options."""
        values: dict[str, Any] = {}
        further: dict[str, Any] = {}
        for key, value in table.items():
            if key not in signature.options:
                further[key] = value
            elif key == "optimizer" and isinstance(value, str) and self._optimizers:
                if value not in self._optimizers:
                    there = f"{did_you_mean(value, self._optimizers)}; the optimizers are {', '.join(self._optimizers)}"
                    raise wrong(inside(where, key), f"{value!r} is not an optimizer{there}")
                values[key] = self._optimizers[value]
            else:
                values[key] = self._option(value, signature.options[key], inside(where, key))
        known, label = [*signature.options, *signature.also], signature.label
        if (owner := signature.rest_of) is not None:
            theirs = Signature(values.get(owner, signature.options[owner].default))
            known += [name for name, option in theirs.options.items() if option.default is not option.empty]
            check_keys(further, known, where, f"{label} with {theirs.label}")
            return values | self.decode(theirs, further, where)
        if signature.rest is None:
            check_keys(further, known, where, label)
        return values | {key: self.typed(value, signature.rest, inside(where, key)) for key, value in further.items()}

    def _option(self, value: Any, option: inspect.Parameter, where: str) -> Any:
        """Convert the value of an option; text for one without annotation gets the type of the default."""
        if isinstance(value, FromText) and option.annotation is Any and isinstance(option.default, bool | int | float | str):
            found, default = parsed(value), option.default
            if isinstance(default, str) and isinstance(found, bool | int | float):
                return str(value)
            if isinstance(default, bool) and found in (0, 1):
                return bool(found)
            if isinstance(found, str) and not isinstance(default, str) and found == value:  # text in quotes is meant as text
                kind = f"{type(default).__name__} as the default, {default!r}"
                raise wrong(where, f"expected {kind}, got {kind_of(found)}; to give text, write it in quotes: '\"{found}\"'")
        return self.typed(value, option.annotation, where)

    def typed(self, value: Any, annotation: Any, where: str) -> Any:
        """Convert a value of a configuration to its annotation; raise ConfigurationError if it does not fit."""
        kinds = members(annotation)
        forms = {one.form for one in kinds}
        if "any" in forms:
            return self._untyped(all_parsed(value), where)
        typed = isinstance(value, FromText)
        if typed and value in ("None", "null") and type(None) in [one.annotation for one in kinds]:
            return None
        if typed and forms - {"text", "path"} and isinstance(found := parsed(value), list | dict):
            value = found
        texts = [one.annotation for one in kinds if one.form in ("text", "record")]
        others = [one for one in kinds if one.form != "text"]
        if isinstance(value, Mapping) and not is_reference(value.get("type")):
            others.sort(key=lambda one: one.form != "table")  # a mapping without module:attribute is a plain table
        for one in others:
            is_name = isinstance(value, str) and not _is_meant_as_text(value, one, texts)
            if (found := self._as_member(value, one, where, is_name=is_name)) is not _NOT_IT:
                return found
        try:
            if texts:
                return msgspec.convert(str(value) if typed else value, functools.reduce(operator.or_, texts), strict=not typed)
        except msgspec.ValidationError:
            pass  # the error below shows the value
        literals = [str(one) for kind in kinds if kind.form == "text" for one in typing.get_args(kind.annotation)]
        hint = did_you_mean(value, literals) if isinstance(value, str) else ""
        raise wrong(where, f"expected {describe(annotation)}, got {kind_of(value)}{hint}")

    def _as_member(self, value: Any, kind: Member, where: str, *, is_name: bool) -> Any:
        """Return the value as one member of a union other than text, or ``_NOT_IT`` if it does not fit."""
        if kind.form == "list" and isinstance(value, list | tuple | set):
            inner = kind.inner if isinstance(kind.inner, list) else [kind.inner] * len(value)
            if len(inner) != len(value):
                raise wrong(where, f"expected a list of {len(inner)}, got one of {len(value)}")
            entries = enumerate(zip(value, inner, strict=True))
            return (kind.base or list)(self.typed(one, of, inside(where, index)) for index, (one, of) in entries)
        if kind.form == "table" and isinstance(value, Mapping):
            return {key: self.typed(entry, kind.inner, inside(where, str(key))) for key, entry in value.items()}
        if kind.form == "path" and isinstance(value, str):
            return Path(value).expanduser() if is_name else value
        if kind.form == "function" and (is_name or isinstance(value, Mapping) or callable(value)):
            return self.function(value, where)
        if kind.form == "class":
            is_name = is_name or (isinstance(value, str) and kind_of_base(kind.base) is not None)
            base = kind.base or object
            return derived(self.find(value, where, base)[0], base, where) if is_name or isinstance(value, type) else _NOT_IT
        is_described = isinstance(value, Mapping) and (kind.form == "object" or is_reference(value.get("type")))
        if kind.form in ("object", "record") and (is_described or (is_name and kind.form == "object")):
            return self.make(value, where, expected=kind.base)
        is_made = kind.form in ("object", "record", "path") and kind.base is not None and isinstance(value, kind.base)
        return value if is_made else _NOT_IT

    def _untyped(self, value: Any, where: str) -> Any:
        """Create the object of every table in an untyped value whose ``type`` is ``module:attribute``."""
        if isinstance(value, dict) and is_reference(value.get("type")):
            return self.make(value, where)
        if isinstance(value, dict):
            return {key: self._untyped(entry, inside(where, str(key))) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._untyped(entry, inside(where, index)) for index, entry in enumerate(value)]
        return value


def derived(found: Any, base: type, where: str) -> type:
    """Return ``found``; raise ConfigurationError if it is not a class derived from ``base``."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise wrong(where, f"expected a class derived from {base.__name__}, got {kind_of(found)}")
    return found


def _is_meant_as_text(value: str, kind: Member, texts: list[Any]) -> bool:
    """Return True if the option takes text and the value does not look like the name of an object or class."""
    if str in texts or kind.form == "path" or set(texts) <= {type(None)}:
        return str in texts
    return not is_reference(value) and kind_of_base(kind.base) is None
