"""Check the arguments of a constructor against its annotations, and a function before it is called."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import msgspec

from trainbus.eventloop.annotations import Member, Signature, members
from trainbus.eventloop.errors import ConfigurationError, SubscribeError
from trainbus.eventloop.plain import plain
from trainbus.eventloop.spelling import value_meant

P = ParamSpec("P")
R = TypeVar("R")

_SCALARS = (bool, int, float, str, type(None))
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "None",
    type: "a class",
    Callable: "a function",
    Mapping: "a mapping",
    Sequence: "a list",
    Iterable: "an iterable",
}


def check_options(init: Callable[P, R]) -> Callable[P, R]:
    """Decorate a constructor or method: an argument that its annotation does not allow raises ConfigurationError.

        @check_options
        def __init__(self, interval: Annotated[int, msgspec.Meta(ge=1)] = 10, by_epoch: bool = True) -> None: ...

    An option that the constructor does not have is an error, too, with the nearest name. Nothing is converted: ``"3"`` and
    ``True`` are not integers. msgspec checks scalars, literals and bounds. Of a list, mapping, function or object only the
    kind is checked; the constructor checks the contents.
    """
    known = functools.cache(lambda: Signature(init))  # at the first call: names of annotations may be defined later

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        # Python itself reports a missing argument, and one too many.
        by_position = [name for name, option in known().options.items() if option.kind is not option.KEYWORD_ONLY]
        options = {name: option for name, option in known().options.items() if name not in by_position[:1]}  # without self
        for name, value in (*zip(by_position[1:], args[1:], strict=False), *kwargs.items()):
            if name in options:
                check_value(name, value, options[name].annotation)
            elif known().rest is None:
                owner = type(args[0]).__name__ if args and init.__name__ == "__init__" else init.__name__
                raise ConfigurationError.unknown_option(owner, name, options, value)
        if init.__name__ == "__init__" and args and hasattr(args[0], "__dict__"):
            # The first one counts: a constructor calls those of its base classes.
            given = dict(zip(by_position[1:], args[1:], strict=False)) | kwargs
            vars(args[0]).setdefault(_GIVEN, {name: plain(value) for name, value in given.items()})
        return init(*args, **kwargs)

    return checked


_GIVEN = "__trainbus_options__"  # the attribute of an object with the options that it was given


def options_of(made: object) -> dict[str, Any]:
    """Return the options of an object as plain values, by name, with the defaults of those that were not given.

    Without ``@check_options``, only options that are attributes of the same name, also with an underscore before it.
    """
    given, own = getattr(made, _GIVEN, None), getattr(made, "__dict__", {})
    options: dict[str, Any] = {}
    for name, option in Signature(type(made)).options.items():
        if given is None:
            found = own.get(name, own.get(f"_{name}", option.empty))
            options |= {} if found is option.empty else {name: plain(found)}
        elif name in given or option.default is not option.empty:
            options[name] = given.get(name, plain(option.default))
    return options | (given or {})


def given_to(made: object) -> dict[str, Any]:
    """Return the options that an object was given, as plain values; without ``@check_options`` those of ``options_of``."""
    given: dict[str, Any] | None = getattr(made, _GIVEN, None)
    return options_of(made) if given is None else given


def check_value(option: str, value: object, annotation: Any, error: type[Exception] = ConfigurationError) -> None:
    """Raise ``error`` unless ``annotation`` allows ``value``; the message names the allowed values."""
    if not any(_allows(member, value) for member in members(annotation)):
        text, kind = repr(value), type(value)
        if kind.__module__ == "numpy" and kind.__name__ not in text:  # numpy 1 shows the number alone
            text = f"{kind.__name__}({text})"
        shown = text if len(text) <= 80 and "\n" not in text else f"<{kind.__name__}>"  # a module, a tensor
        choices = ", or ".join(dict.fromkeys(map(_described, members(annotation))))
        raise error(f"{option}={shown}: {value_meant(option, value) or f'give {choices}'}")


def _allows(member: Member, value: Any) -> bool:
    kind = typing.get_origin(member.annotation) or member.annotation
    if kind in _SCALARS or kind is Literal:
        bounded: Any = member.annotation if member.bounds is None else Annotated[member.annotation, member.bounds]
        try:
            msgspec.convert(float(value) if isinstance(value, float) else value, bounded)  # numpy's floats are floats
        except msgspec.ValidationError:
            return False
        return True
    if isinstance(value, str) and kind in (Sequence, Iterable):
        return False  # a string is not accepted as a sequence of characters
    try:
        return not isinstance(kind, type) or isinstance(value, kind)
    except TypeError:  # a protocol without @runtime_checkable
        return True


def _described(member: Member) -> str:
    kind, bounds = typing.get_origin(member.annotation) or member.annotation, member.bounds
    if kind is Literal:
        choices = typing.get_args(member.annotation)
        return " or ".join(f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices)
    name = getattr(kind, "__name__", str(kind))
    words = _WORDS.get(kind) or f"a{'n' * (name[0] in 'AEIOU')} {name}"
    if bounds is None:
        return words
    limits = {"of at least": bounds.ge, "above": bounds.gt, "of at most": bounds.le, "below": bounds.lt}
    said = " and ".join(f"{where} {bound:g}" for where, bound in limits.items() if bound is not None)
    return bounds.description or f"{words} {said}".rstrip()


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for coroutine functions, objects with an async ``__call__``, and partials of them."""
    return any(map(inspect.iscoroutinefunction, _called(function)))


def is_generator(function: Callable[..., Any]) -> bool:
    """Return True for a function (or ``__call__``) with ``yield`` in it; calling it runs nothing."""
    return any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in _called(function))


def _called(function: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function that a call runs: itself, or the ``__call__`` of its type; of a partial, those of what it calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function, type(function).__call__


_LOST = {types.CoroutineType: "a coroutine", types.GeneratorType: "a generator", types.AsyncGeneratorType: "an async generator"}


def check_returned(value: object) -> bool:
    """Return True; raise SubscribeError if ``value``, which a handler returned, is a coroutine or a generator.

    Nothing of it has run, and nothing would: a decorated async function and ``lambda event: ship(event)`` are plain functions.
    """
    kind = _LOST.get(type(value))
    if kind is None:
        return True
    name = getattr(value, "__qualname__", "")
    if isinstance(value, types.CoroutineType):
        value.close()  # without a warning that it was never awaited
    raise SubscribeError(
        f"a handler returned {kind} of {name}, which does not run, because its caller does not await it: subscribe the async "
        f"function {name} itself, or call it in an `async def` that awaits it"
    )


def returns_no_coroutine(function: Callable[..., Any]) -> bool:
    """Return True for a function annotated with ``-> None`` and for one written in C; False where it is unknown."""
    if isinstance(function, types.BuiltinFunctionType):
        return True
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):  # functools.wraps copies annotations
        return False
    try:
        return function.__annotations__.get("return", ...) in (None, "None")
    except NameError:  # Python 3.14 evaluates all of them here, also names that are imported for type checkers only
        return False


def check_arity(function: Callable[..., Any], who: str, what: str) -> None:
    """Raise SubscribeError if ``function`` cannot be called with one argument; ``who`` and ``what`` name both in the error."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: nothing to check
    try:
        signature.bind(None)
    except TypeError:
        raise SubscribeError(f"{who} is called with one argument, {what}; this one takes {signature}") from None


def check_picks(option: str, function: Callable[..., Any], purpose: str) -> None:
    """Raise SubscribeError unless ``function`` is plain and takes an event; the error says that it returns ``purpose``."""
    if is_async(function) or is_generator(function):
        kind = "an async function" if is_async(function) else "a generator (it has `yield` in it)"
        raise SubscribeError(
            f"{option}= is {kind}: it is called while the event is published, which neither awaits nor "
            f"iterates over the result; make it a plain function that returns {purpose}"
        )
    check_arity(function, f"{option}=", "the event")
