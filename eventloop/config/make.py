"""Makes what a configuration describes: objects, functions and classes, with options typed by their own signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eventloop.config import annotations as of
from eventloop.config.described import (
    MISSING,
    alone,
    an,
    as_it_is,
    is_callable,
    is_meant_as_text,
    missing_type,
    parsed,
    raised_within,
)
from eventloop.config.elsewhere import translated, why_not_here
from eventloop.config.options import Option, Options
from eventloop.config.places import check_keys, inside, wrong
from eventloop.config.references import Imports, is_reference
from eventloop.config.registry import did_you_mean, find, kind_of_base
from eventloop.config.values import FromText, check, kind_of, settle, unexpected
from eventloop.errors import ConfigurationError, TrainbusError


class Maker:
    """Makes objects from tables such as ``{type = "torch.optim:AdamW", lr = 0.001}``, or from a name alone.

    ``type`` is a registered name, where the option asks for a hook, writer or average, or ``module:attribute``; everything
    else is an option of it, and is made in the same way where it has to be an object itself.

    A parameter ``model`` or ``optimizer`` without default, which the table does not give, gets what is given here.

    Args:
        imports: where ``module:attribute`` may come from.
        model: a module, or several by name.
        optimizer: an optimizer, or several by name; a text for a parameter ``optimizer`` is the name of one.
    """

    def __init__(self, imports: Imports | None = None, *, model: Any = None, optimizer: Any = None) -> None:
        self.imports = imports or Imports()
        self.given = {} if model is None else {"model": model}
        self.optimizers: Mapping[str, Any] = optimizer if isinstance(optimizer, Mapping) else {}
        if optimizer is not None and not self.optimizers:
            self.given["optimizer"] = optimizer

    # -------------------------------------------------------------------------------- what a name or table stands for

    def make(self, value: Any, place: str, *, expected: type | None = None, given: Mapping[str, Any] | None = None) -> Any:
        """Return the object that ``value`` describes: what ``type`` names, called with the options beside it.

        What is named but is no class or function (an object in a module) is taken as it is, and so is an object that is
        already one.

        Raises:
            ConfigurationError: unknown names and options, wrong types, or another class than ``expected``.
        """
        name, options = self._split(value, place)
        if name is None:
            made = value
        else:
            target = self.named(value, place, expected)
            if kind_of_base(expected) is not None:
                options = translated(name, options, place)
            made = self.call(target, options, place, given=given) if is_callable(target) else alone(target, options, place)
        if expected is not None and not isinstance(made, expected):
            raise wrong(place, f"expected {an(expected)}, got {made!r}")
        return made

    def function(self, value: Any, place: str) -> Callable[..., Any]:
        """Return the function that ``value`` names; one with options has them filled in, a class with options is called."""
        name, options = self._split(value, place)
        found = value if name is None else self.named(value, place)
        if isinstance(value, Mapping):
            if isinstance(found, type):
                found = self.call(found, options, place)
            elif callable(found):
                found = functools.partial(found, **self.decode(Options(found), options, place, partly=True)[1])
        if not callable(found):
            raise wrong(place, f"expected a function, as module:attribute, got {kind_of(found)}")
        return found  # type: ignore[no-any-return]

    def class_(self, value: Any, base: type, place: str) -> type:
        """Return the class derived from ``base`` that ``value`` names."""
        found = self.target(value, place, base) if isinstance(value, str) else value
        if not (isinstance(found, type) and issubclass(found, base)):
            raise wrong(place, f"expected a class derived from {base.__name__}, got {kind_of(found)}")
        return found

    def named(self, value: str | Mapping[str, Any], place: str, expected: type | None = None) -> Any:
        """Return what a name, or the ``type`` of a table, stands for."""
        name, _ = self._split(value, place)
        return self.target(name, place if isinstance(value, str) else inside(place, "type"), expected)

    def target(self, name: Any, place: str, expected: type | None = None) -> Any:
        """Return what a name stands for: a registered class of the kind of ``expected``, or ``module:attribute``."""
        if not isinstance(name, str):
            return name
        kind = None if expected is None else kind_of_base(expected)
        if kind is None or ":" in name:
            return self.imports.resolve(str(name), place)
        try:
            return find(kind, str(name))
        except TrainbusError as error:
            raise wrong(
                place, f"{error}{why_not_here(name)}; a class that is not registered is written as module:attribute"
            ) from None

    def _split(self, value: Any, place: str) -> tuple[Any, dict[str, Any]]:
        """Return name and options of a description; None as the name of anything else."""
        if isinstance(value, str):
            return str(value), {}
        if not isinstance(value, Mapping):
            return None, {}
        options = dict(value)
        if "type" not in options:
            what = f"is missing{missing_type(options)}: say what to make, as module:attribute or a registered name"
            raise wrong(inside(place, "type"), what)
        return options.pop("type"), options

    # --------------------------------------------------------------------------------------------------- its options

    def call(
        self,
        target: Callable[..., Any],
        options: Mapping[str, Any],
        place: str,
        *,
        given: Mapping[str, Any] | None = None,
        also_known: tuple[str, ...] = (),
    ) -> Any:
        """Call ``target`` with options decoded for its signature; an error of its own says at which place."""
        described = Options(target)
        positional, named = self.decode(described, options, place, given=given, also_known=also_known)
        try:
            return target(*positional, **named)
        except TrainbusError as error:
            raise type(error)(f"{place} ({described.label}): {error}") from error
        except Exception as error:
            if isinstance(error, TypeError | ValueError) and raised_within(error, "torch"):  # of what its constructor was given
                raise wrong(place, f"{described.label} does not take these options: {error}") from error
            error.add_note(f"while making {described.label} for {place}")
            raise

    def decode(
        self,
        options: Options,
        table: Mapping[str, Any],
        place: str,
        *,
        given: Mapping[str, Any] | None = None,
        also_known: tuple[str, ...] = (),
        partly: bool = False,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and named arguments from a table, typed by the signature.

        Args:
            options: of whom.
            table: what was given.
            place: of the table.
            given: objects for parameters that have no default and are not in the table, before the maker's own.
            also_known: keys that the caller has taken out, for the hints.
            partly: leave out what is missing.

        Raises:
            ConfigurationError: an unknown or missing option, or a value of the wrong type.
        """
        own = {name: value for name, value in table.items() if name in options.known}
        further = {name: value for name, value in table.items() if name not in options.known}
        values = {name: self.fill(value, options.known[name], inside(place, name)) for name, value in own.items()}
        extra = self._further(options, further, values, place, also_known)
        if not partly:
            values = self._completed(options, values, place, {**self.given, **(given or {})})
            record = msgspec.convert(values, options.struct)
            values = {name: getattr(record, name) for name in values}
        positional = [values.pop(name) for name in options.positional if name in values]
        return positional, values | extra

    def _further(
        self, options: Options, further: Mapping[str, Any], values: Mapping[str, Any], place: str, also_known: tuple[str, ...]
    ) -> dict[str, Any]:
        """Decode what goes into ``**options``."""
        if options.rest is None or options.rest_of is None:
            if options.rest is None:
                check_keys(further, [*options.known, *also_known], place, options.label)
            rest = Option("", options.rest, None, "")
            return {name: self.fill(value, rest, inside(place, name)) for name, value in further.items()}
        chosen = values.get(options.rest_of, options.known[options.rest_of].default)
        theirs = Options(chosen)
        required = [option.name for option in theirs.known.values() if option.required]
        names = [name for name in theirs.known if name not in required]
        check_keys(further, [*options.known, *names, *also_known], place, f"{options.label} with {theirs.label}")
        return self.decode(theirs, further, place, partly=True)[1]

    def _completed(self, options: Options, values: dict[str, Any], place: str, given: Mapping[str, Any]) -> dict[str, Any]:
        for option in options.known.values():
            if option.required and option.name not in values:
                if option.name not in given:
                    what = f" ({option.written})" if option.written else ""
                    several = ", ".join(self.optimizers if option.name == "optimizer" else ())
                    which = f"; name one of {several}" if several else ""
                    raise wrong(inside(place, option.name), f"is missing: {options.label} needs it{what}{which}")
                values[option.name] = given[option.name]
        return values

    def fill(self, value: Any, option: Option, place: str) -> Any:
        """Return the value of an option: text as it is, names and tables as what they stand for."""
        if option.name == "optimizer" and isinstance(value, str) and self.optimizers:
            if value not in self.optimizers:
                raise wrong(
                    place,
                    f"there is no optimizer {str(value)!r}{did_you_mean(value, self.optimizers)}; "
                    f"there are {', '.join(self.optimizers)}",
                )
            return self.optimizers[value]
        return self._value(value, option.annotation, place)

    # ------------------------------------------------------------------------------------------------ by annotation

    def _value(self, value: Any, annotation: Any, place: str) -> Any:
        options = of.members(annotation)
        if Any in options:
            return self._anything(settle(value), place)
        if isinstance(value, FromText):
            value = parsed(value, options)
        texts = [one for one in options if of.is_text(one)]
        others = [one for one in options if not of.is_text(one)]
        if isinstance(value, Mapping) and not is_reference(value.get("type")):
            # Where an option takes tables, too, one that names no function and no class is such a table.
            others.sort(key=lambda one: of.table_value(one) is None)
        for one in others:
            found = self._other(value, one, place, text_will_do=is_meant_as_text(value, one, texts))
            if found is not MISSING:
                return found
        if not texts:
            raise wrong(place, unexpected(value, annotation))
        union = functools.reduce(lambda one, other: one | other, texts)
        try:
            return check(value, union, place)
        except ConfigurationError:
            if others and not isinstance(value, dict | list):
                raise wrong(place, unexpected(value, annotation)) from None
            raise

    def _other(self, value: Any, annotation: Any, place: str, *, text_will_do: bool) -> Any:
        """Return the value for one member of a union that is more than text; MISSING if it is none of it."""
        listed, inner = of.list_item(annotation), of.table_value(annotation)
        if listed is not None:
            return self._list(value, *listed, place) if isinstance(value, list | tuple | set) else MISSING
        if inner is not None:
            if not isinstance(value, Mapping):
                return MISSING
            return {key: self._value(entry, inner, inside(place, str(key))) for key, entry in value.items()}
        if of.is_path(annotation):
            return (value if text_will_do else Path(value)) if isinstance(value, str) else as_it_is(value, annotation)
        if of.is_function(annotation):
            described = (isinstance(value, str) and not text_will_do) or isinstance(value, Mapping)
            return self.function(value, place) if described or callable(value) else MISSING
        base = of.class_asked_for(annotation)
        if base is not None:
            named = isinstance(value, str) and (not text_will_do or kind_of_base(base) is not None)
            return self.class_(value, base, place) if named or isinstance(value, type) else MISSING
        return self._object(value, of.object_asked_for(annotation), place, text_will_do=text_will_do)

    def _object(self, value: Any, expected: type | None, place: str, *, text_will_do: bool) -> Any:
        if isinstance(value, Mapping) or (isinstance(value, str) and not text_will_do):
            return self.make(value, place, expected=expected)
        return MISSING if expected is None else as_it_is(value, expected)

    def _list(self, value: Any, container: type, item: Any, place: str) -> Any:
        items = list(value)
        kinds = item if isinstance(item, list) else [item] * len(items)
        if len(kinds) != len(items):
            raise wrong(place, f"expected a list of {len(kinds)}, got one of {len(items)}")
        made = [
            self._value(one, kind, inside(place, index)) for index, (one, kind) in enumerate(zip(items, kinds, strict=True))
        ]
        return made if container is list else container(made)

    def _anything(self, value: Any, place: str) -> Any:
        """Where the signature does not say: tables whose ``type`` is ``module:attribute`` are made, the rest is as it is."""
        if isinstance(value, dict):
            if is_reference(value.get("type")):
                return self.make(value, place)
            return {key: self._anything(entry, inside(place, str(key))) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._anything(entry, inside(place, index)) for index, entry in enumerate(value)]
        return value
