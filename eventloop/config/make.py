"""Makes the objects that a configuration describes, with options typed by the signatures of their classes and functions."""

from __future__ import annotations

import functools
import inspect
import operator
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eventloop.config.imports import Imports, is_reference
from eventloop.config.migrations import translated, why_not_here
from eventloop.config.read import FromText, parse, settle
from eventloop.config.registry import find, kind_of_base
from eventloop.config.signature import Member, Option, Signature, describe, members
from eventloop.config.words import check_keys, did_you_mean, inside, kind_of, wrong
from eventloop.errors import TrainbusError

_NOT_IT: Any = object()


class Maker:
    """Makes objects from tables such as ``{type = "torch.optim:AdamW", lr = 0.001}``, or from a name alone.

    ``type`` is ``module:attribute``, or a registered name where a hook, writer or average is expected. All other keys are
    options. An option that is an object is described in the same way.

    Args:
        imports: the modules that ``module:attribute`` may name.
        model: for a required parameter ``model`` that the table does not give; a module, or several by name.
        optimizer: the same for ``optimizer``. Of several by name, a text selects one.
    """

    def __init__(self, imports: Imports | None = None, *, model: Any = None, optimizer: Any = None) -> None:
        self.imports = imports or Imports()
        self._given = {} if model is None else {"model": model}
        self._optimizers: Mapping[str, Any] = optimizer if isinstance(optimizer, Mapping) else {}
        if optimizer is not None and not self._optimizers:
            self._given["optimizer"] = optimizer

    # -------------------------------------------------------------------------------------------- names and tables

    def make(self, value: Any, where: str, *, expected: type | None = None, given: Mapping[str, Any] | None = None) -> Any:
        """Return the object that ``value`` describes: the result of calling ``type`` with the options beside it.

        An object that ``type`` names (neither class nor function) is not called, and an object given as ``value`` is returned.

        Raises:
            ConfigurationError: unknown names and options, wrong types, or another class than ``expected``.
        """
        name, options = self._split(value, where)
        if name is None:
            made = value
        else:
            made = self.named(value, where, expected)
            if kind_of_base(expected) is not None:
                options = translated(name, options, where)
            if isinstance(made, type | functools.partial) or inspect.isroutine(made):
                made = self.call(made, options, where, given=given)
            elif options:
                raise wrong(where, f"{made!r} is an object, which takes no options ({', '.join(options)})")
        if expected is not None and not isinstance(made, expected):
            article = "an" if expected.__name__[0] in "AEIOU" else "a"
            raise wrong(where, f"expected {article} {expected.__name__}, got {made!r}")
        return made

    def function(self, value: Any, where: str) -> Callable[..., Any]:
        """Return the function that ``value`` names; one with options has them filled in, a class with options is called."""
        name, options = self._split(value, where)
        found = value if name is None else self.named(value, where)
        if isinstance(value, Mapping):
            if isinstance(found, type):
                found = self.call(found, options, where)
            elif callable(found):
                found = functools.partial(found, **self.decode(Signature(found), options, where, partly=True)[1])
        if not callable(found):
            raise wrong(where, f"expected a function, as module:attribute, got {kind_of(found)}")
        return found  # type: ignore[no-any-return]

    def class_(self, value: Any, base: type, where: str) -> type:
        """Return the class derived from ``base`` that ``value`` names."""
        found = self.named(value, where, base) if isinstance(value, str) else value
        if not (isinstance(found, type) and issubclass(found, base)):
            raise wrong(where, f"expected a class derived from {base.__name__}, got {kind_of(found)}")
        return found

    def named(self, value: str | Mapping[str, Any], where: str, expected: type | None = None) -> Any:
        """Return the class, function or object that a name, or the ``type`` of a table, stands for."""
        name, _ = self._split(value, where)
        if not isinstance(name, str):
            return name
        where = where if isinstance(value, str) else inside(where, "type")
        kind = kind_of_base(expected)
        if kind is None or ":" in name:
            return self.imports.resolve(str(name), where)
        try:
            return find(kind, str(name))
        except TrainbusError as error:
            hint = f"{why_not_here(name)}; a class that is not registered is written as module:attribute"
            raise wrong(where, f"{error}{hint}") from None

    def _split(self, value: Any, where: str) -> tuple[Any, dict[str, Any]]:
        """Return name and options of a description; None as the name of any other value."""
        if isinstance(value, str):
            return str(value), {}
        if not isinstance(value, Mapping):
            return None, {}
        options = dict(value)
        if "type" not in options:
            hint = f"is missing{missing_type(options)}: say what to make, as module:attribute or a registered name"
            raise wrong(inside(where, "type"), hint)
        return options.pop("type"), options

    # ----------------------------------------------------------------------------------------------------- options

    def call(
        self,
        target: Callable[..., Any],
        options: Mapping[str, Any],
        where: str,
        *,
        given: Mapping[str, Any] | None = None,
        also_known: tuple[str, ...] = (),
    ) -> Any:
        """Call ``target`` with options decoded for its signature; its own errors get ``where`` added."""
        signature = Signature(target)
        positional, named = self.decode(signature, options, where, given=given, also_known=also_known)
        try:
            return target(*positional, **named)
        except TrainbusError as error:
            raise type(error)(f"{where} ({signature.label}): {error}") from error
        except Exception as error:
            if isinstance(error, TypeError | ValueError) and _raised_within_torch(error):
                raise wrong(where, f"{signature.label} does not take these options: {error}") from error
            error.add_note(f"while making {signature.label} for {where}")
            raise

    def decode(
        self,
        signature: Signature,
        table: Mapping[str, Any],
        where: str,
        *,
        given: Mapping[str, Any] | None = None,
        also_known: tuple[str, ...] = (),
        partly: bool = False,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and named arguments from a table.

        Args:
            signature: of the function that gets them.
            table: the options.
            where: the position of the table.
            given: objects for required parameters that are not in the table; they come before the maker's own.
            also_known: keys that the caller has taken out, for the hints.
            partly: leave out what is missing.

        Raises:
            ConfigurationError: an unknown or missing option, or a value of the wrong type.
        """
        known = signature.options
        values = {key: self._option(value, known[key], inside(where, key)) for key, value in table.items() if key in known}
        further = {key: value for key, value in table.items() if key not in known}
        extra = self._further(signature, further, values, where, also_known)
        if not partly:
            self._complete(signature, values, where, {**self._given, **(given or {})})
        positional = [values.pop(name) for name in signature.positional if name in values]
        return positional, values | extra

    def _further(
        self,
        signature: Signature,
        further: Mapping[str, Any],
        values: Mapping[str, Any],
        where: str,
        also_known: tuple[str, ...],
    ) -> dict[str, Any]:
        """Decode the values of ``**options``."""
        if (owner := signature.rest_of) is None:
            if signature.rest is None:
                check_keys(further, [*signature.options, *also_known], where, signature.label)
            return {key: self._value(value, signature.rest, inside(where, key)) for key, value in further.items()}
        theirs = Signature(values.get(owner, signature.options[owner].default))
        names = [name for name, option in theirs.options.items() if not option.required]
        check_keys(further, [*signature.options, *names, *also_known], where, f"{signature.label} with {theirs.label}")
        return self.decode(theirs, further, where, partly=True)[1]

    def _complete(self, signature: Signature, values: dict[str, Any], where: str, given: Mapping[str, Any]) -> None:
        for name, option in signature.options.items():
            if option.required and name not in values:
                if name not in given:
                    type_ = "" if option.annotation is Any else f" ({describe(option.annotation)})"
                    which = f"; name one of {', '.join(self._optimizers)}" if name == "optimizer" and self._optimizers else ""
                    raise wrong(inside(where, name), f"is missing: {signature.label} needs it{type_}{which}")
                values[name] = given[name]

    def _option(self, value: Any, option: Option, where: str) -> Any:
        if option.name == "optimizer" and isinstance(value, str) and self._optimizers:
            if value not in self._optimizers:
                hint = did_you_mean(value, self._optimizers)
                there = ", ".join(self._optimizers)
                raise wrong(where, f"there is no optimizer {str(value)!r}{hint}; there are {there}")
            return self._optimizers[value]
        return self._value(value, option.annotation, where)

    # -------------------------------------------------------------------------------------- values, by annotation

    def _value(self, value: Any, annotation: Any, where: str) -> Any:
        kinds = members(annotation)
        forms = {one.form for one in kinds}
        if "any" in forms:
            return self._anything(settle(value), where)
        if isinstance(value, FromText) and forms - {"text", "path"} and isinstance(found := parse(value), list | dict):
            value = found
        texts = [one.annotation for one in kinds if one.form == "text"]
        others = [one for one in kinds if one.form != "text"]
        if isinstance(value, Mapping) and not is_reference(value.get("type")):
            others.sort(key=lambda one: one.form != "table")  # a table without module:attribute is an option that is a table
        for one in others:
            found = self._described(
                value, one, where, is_name=isinstance(value, str) and not _is_meant_as_text(value, one, texts)
            )
            if found is not _NOT_IT:
                return found
        typed = isinstance(value, FromText)
        if texts:
            try:
                return msgspec.convert(str(value) if typed else value, functools.reduce(operator.or_, texts), strict=not typed)
            except msgspec.ValidationError:
                pass  # told below, with the value
        raise wrong(where, _unexpected(value, annotation))

    def _described(self, value: Any, kind: Member, where: str, *, is_name: bool) -> Any:
        """Return the value for one member of a union that is more than text; ``_NOT_IT`` for another kind of value."""
        if kind.form == "list":
            return self._list(value, kind, where) if isinstance(value, list | tuple | set) else _NOT_IT
        if kind.form == "table":
            if not isinstance(value, Mapping):
                return _NOT_IT
            return {key: self._value(entry, kind.inner, inside(where, str(key))) for key, entry in value.items()}
        if kind.form == "path" and isinstance(value, str):
            return Path(value) if is_name else value
        if kind.form == "function":
            return self.function(value, where) if is_name or isinstance(value, Mapping) or callable(value) else _NOT_IT
        if kind.form == "class":
            is_name = is_name or (isinstance(value, str) and kind_of_base(kind.base) is not None)
            return self.class_(value, kind.base or object, where) if is_name or isinstance(value, type) else _NOT_IT
        if kind.form == "object" and (is_name or isinstance(value, Mapping)):
            return self.make(value, where, expected=kind.base)
        return value if kind.base is not None and isinstance(value, kind.base) else _NOT_IT

    def _list(self, value: Any, kind: Member, where: str) -> Any:
        items = list(value)
        kinds = kind.inner if isinstance(kind.inner, list) else [kind.inner] * len(items)
        if len(kinds) != len(items):
            raise wrong(where, f"expected a list of {len(kinds)}, got one of {len(items)}")
        made = [self._value(one, of, inside(where, index)) for index, (one, of) in enumerate(zip(items, kinds, strict=True))]
        return kind.base(made) if kind.base else made

    def _anything(self, value: Any, where: str) -> Any:
        """Make every table in an untyped value whose ``type`` is ``module:attribute``; the rest stays as it is."""
        if isinstance(value, dict):
            if is_reference(value.get("type")):
                return self.make(value, where)
            return {key: self._anything(entry, inside(where, str(key))) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._anything(entry, inside(where, index)) for index, entry in enumerate(value)]
        return value


def missing_type(table: Mapping[str, Any]) -> str:
    """Return a hint if a key of ``table`` looks like a misspelt ``type``."""
    near = [str(key) for key in table if did_you_mean(str(key), ["type"])]
    return f" (is {near[0]!r} it, misspelt?)" if near else ""


def _is_meant_as_text(value: str, kind: Member, texts: list[Any]) -> bool:
    """True if a text names no object or class: where the option takes text, and the value looks like no name."""
    if str in texts or kind.form == "path" or set(texts) <= {type(None)}:
        return str in texts
    return not is_reference(value) and kind_of_base(kind.base) is None


def _unexpected(value: Any, annotation: Any) -> str:
    choices = [
        str(one) for kind in members(annotation) for one in getattr(kind.annotation, "__args__", ()) if isinstance(one, str)
    ]
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"expected {describe(annotation)}, got {kind_of(value)}{hint}"


def _raised_within_torch(error: Exception) -> bool:
    """True if every call from here to where ``error`` was raised is in torch."""
    called = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return bool(called) and all(f"{name}.".startswith("torch.") for name in called)
