"""Turn values into what the record of a run stores: plain values, without secrets."""

from __future__ import annotations

import inspect
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import NoneType, SimpleNamespace
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
import orjson

HIDDEN: Final = "(not stored)"
"""Stands for a value whose name says that it is a secret."""

_MOST_OPTIONS: Final = 1_000  # values in an option of a hook
_MOST: Final = 50_000  # values in a configuration
_LONGEST: Final = 500  # characters of a text in an option, and of what describes an object
_LONGEST_TEXT: Final = 10_000  # characters of a text in a configuration
_DEEPEST_OPTION: Final = 20
_DEEPEST: Final = 50
_SMALL: Final = 1_000  # numbers of an array that are listed
_KEYS: Final = (str, int, float, NoneType)
_AS_TEXT: Final = (PurePath, date, time, timedelta, Decimal, UUID, Enum)
_ADDRESS_IN_MEMORY: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_PAIR: Final = re.compile(r"""(?P<name>\b\w+)(?P<equals>['"]?\s*[=:]\s*)(?P<value>'[^']*'|"[^"]*"|[^\s,()'"\]}]+)""")
_SECRET: Final = re.compile(
    r"(^|[^a-z])(auth|authorization|(\w+_)?(token|password|passwd|passphrase|secret|credentials?)|pwd|(\w+_)?webhook(_url)?|"
    r"(\w+_)?(api|access|secret|private|account|auth|encryption|license)_?key(_id)?)$"
)
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s?#]+@")
_ADDRESS: Final = re.compile(r"https?://[^/?#@\s]+(?=[/?#])")
_QUERY: Final = re.compile(
    r"([?&][^=&\s#]*(?:token|key|secret|signature|sig|password|credential)[^=&\s#]*=)[^&\s#]+", re.IGNORECASE
)


def _is(value: Any, module: str, *names: str) -> bool:
    """Return whether a value is of one of these classes of torch or numpy: without the import, there is no such value."""
    found = sys.modules.get(module)
    return isinstance(value, tuple(getattr(found, name) for name in names if hasattr(found, name)))


def plain(value: Any) -> Any:
    """Return an option as numbers, texts, lists and mappings; of another object, the name of its class or function.

    Of lists and mappings, at most 1,000 values in all are taken. Only Python's own are read: others may load data.
    """
    return _Walk(_MOST_OPTIONS, _LONGEST, _DEEPEST_OPTION, _own_entries, _named).value(value)


def plain_config(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a configuration as numbers, texts, lists and mappings, as all files, writers and pages of a run have it.

    - Mappings, dataclasses, structs and namespaces become mappings with texts for keys; sequences, sets and small arrays lists.
    - NaN and infinities become texts. Of another object its ``repr`` is taken, without addresses in memory and without secrets.
    - A value that cannot be read says so in its place, such as one that OmegaConf misses. A cycle is ``"..."``.
    - Of more than 50,000 values, of texts of more than 10,000 characters and below 50 levels, the rest is cut, and says so.
    """
    made: Any = _Walk(_MOST, _LONGEST_TEXT, _DEEPEST, _any_entries, described).value(config)
    return made if isinstance(made, dict) else {"config": made}


class _Walk:
    """Turn one tree of values into plain ones."""

    def __init__(
        self, most: int, longest: int, deepest: int, entries: Callable[[Any], _Entries | None], other: Callable[[Any], str]
    ) -> None:
        self._left, self._longest, self._deepest, self._entries, self._other = most, longest, deepest, entries, other
        self._above: set[int] = set()  # what the present value is in

    def value(self, value: Any, deep: int = 0) -> Any:
        try:
            return self._value(value, deep)
        except Exception as error:  # noqa: BLE001 - the objects are the user's: one that cannot be read costs only itself
            return _cut(f"({type(value).__name__} cannot be read: {type(error).__name__})", self._longest)

    def _value(self, value: Any, deep: int) -> Any:
        value = _scalar(value)
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return _cut(value, self._longest)
        if deep >= self._deepest or (entries := self._entries(value)) is None:
            return self._other(value)
        if id(value) in self._above:
            return "..."
        self._above.add(id(value))
        try:
            found = self._inside(entries, deep + 1)
        finally:
            self._above.discard(id(value))
        if not entries.mapped:
            return [one for _, one in found]
        named: dict[str, Any] = {}
        for key, one in found:
            text = _key(key)
            named[described(key) if text in named else text] = one  # 1 and "1" are two keys
        return named

    def _inside(self, entries: _Entries, deep: int) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for index, key in enumerate(entries.keys):
            # Each entry takes one from what is left, so that a list of lists of lists ends as soon as a long one.
            if self._left <= 0:
                return [*found, ("...", f"({len(entries.keys) - index:,} more)")]
            self._left -= 1
            try:
                value = entries.read(key)
            except Exception as error:  # noqa: BLE001 - such as OmegaConf's error for a value that is missing
                found.append((key, _cut(f"(cannot be read: {type(error).__name__}: {error})", _LONGEST)))
            else:
                found.append((key, self.value(value, deep)))
        return found


class _Entries(NamedTuple):
    """What a value holds: the keys of a mapping, or the indices of a list, and a function that reads one entry."""

    keys: Sequence[Any]
    read: Callable[[Any], Any]
    mapped: bool = True


def _list(values: Sequence[Any]) -> _Entries:
    return _Entries(range(len(values)), values.__getitem__, mapped=False)


def _own_entries(value: Any) -> _Entries | None:
    """Return what Python's own containers hold."""
    if type(value) is dict:
        return _Entries([*value], value.__getitem__)
    return _list([*value]) if type(value) in (list, tuple, set, frozenset) else None


def _any_entries(value: Any) -> _Entries | None:
    """Return what any mapping, sequence, set, dataclass, struct or namespace holds; None for another object."""
    if isinstance(value, Mapping):
        return _Entries([*value], value.__getitem__)
    if isinstance(value, AbstractSet):
        return _list(sorted(value, key=repr))  # the order of texts in a set is another one in each process
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return _list(value)
    if isinstance(value, Namespace | SimpleNamespace):
        return _Entries([*vars(value)], partial(getattr, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _Entries([field.name for field in fields(value)], partial(getattr, value))
    if isinstance(value, msgspec.Struct):
        return _Entries(value.__struct_fields__, partial(getattr, value))
    small = _is(value, "numpy", "ndarray") and value.size <= _SMALL
    if small or (_is(value, "torch", "Tensor") and value.is_cpu and value.numel() <= _SMALL):
        return _list(value.tolist())
    return None


def _scalar(value: Any) -> Any:
    """Return a number or text of another type as Python's own; any other value as it is."""
    if _is(value, "numpy", "generic", "ndarray") and value.ndim == 0:
        value = value.item()
    elif _is(value, "torch", "Tensor") and value.is_cpu and value.dim() == 0:
        value = value.item()  # reading another device would wait for it
    if isinstance(value, bool) or type(value) in (int, float, str):
        return value
    # A subclass may be written in its own way, or not at all: an IntEnum, a text of a template engine.
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    return str(value) if isinstance(value, _AS_TEXT) or _is(value, "torch", "dtype", "device") else value


def _key(name: Any) -> str:
    try:
        plain_name = _scalar(name)
    except Exception:  # noqa: BLE001 - the object is the user's
        plain_name = name
    return str(plain_name) if isinstance(plain_name, _KEYS) else described(name)


def _named(value: Any) -> str:
    """Return the name of a class or function, or of the class of another object."""
    if isinstance(value, type) or inspect.isroutine(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return type(value).__name__


def described(value: Any) -> str:
    """Return the ``repr`` of an object, without its address and without secrets; of a class or function its name."""
    # A partial is a routine from Python 3.14 on, without a name.
    if isinstance(value, type) or (inspect.isroutine(value) and hasattr(value, "__name__")):
        return _named(value)
    if _is(value, "torch", "Tensor"):
        return f"Tensor({tuple(value.shape)}, {value.dtype}, {value.device})"  # its values may be on another device
    try:
        text = _ADDRESS_IN_MEMORY.sub("", repr(value))
    except Exception:  # noqa: BLE001 - the object is the user's
        return _named(value)
    return _cut(_PAIR.sub(_without_secret, text), _LONGEST)


def _without_secret(pair: re.Match[str]) -> str:
    return f"{pair['name']}{pair['equals']}{HIDDEN}" if is_secret(pair["name"]) else pair[0]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text) - longest:,} more characters)"


def numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the real numbers among values, those in tensors and arrays of one element included, as Python's own."""
    found = {name: value.item() if _is_scalar(value) else value for name, value in values.items()}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float)}


def _is_scalar(value: Any) -> bool:
    if _is(value, "torch", "Tensor"):
        return bool(value.numel() == 1)
    return _is(value, "numpy", "ndarray", "generic") and value.size == 1


def encodable(value: Any) -> Any:
    """Return a tree of plain values in which lone surrogates, which stand for bytes that are not UTF-8, are spelled out."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(one) for one in value]
    return value


def as_json(value: Any, *options: Any) -> bytes:
    """Return what ``orjson.dumps`` returns, also for names that are not UTF-8 and for integers of any size."""
    try:
        return orjson.dumps(value, *options)
    except TypeError:
        return orjson.dumps(_with_digits(encodable(value)), *options)


def _with_digits(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_digits(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_digits(one) for one in value]
    large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return orjson.Fragment(str(value)) if large else value


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a tree of plain values: values with names like ``api_key`` are hidden, and URLs lose their credentials.

    Hidden is a value whose name ends in ``token``, ``password``, ``secret``, ``credentials`` or a kind of key. Of a URL that is
    named ``to``, only the host is left. Numbers and booleans are never hidden.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one, name) for one in value]
    if not isinstance(value, str):
        return value
    if value and is_secret(name):
        return HIDDEN
    shown = _CREDENTIALS.sub("", value)
    if re.search(r"(^|[.-])to$", name) and (address := _ADDRESS.match(shown)):  # of a webhook: its path is the secret
        return f"{address[0]}/{HIDDEN}"
    return _QUERY.sub(rf"\1{HIDDEN}", shown)


def is_secret(name: str) -> bool:
    """Return True if a name says that its value is a secret: ``api_key``, ``wandbToken``, ``DB_PASSWORD``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return bool(_SECRET.search(words))


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command line without secrets: values of ``--token=...``, ``--api-key ...`` and ``db.password=...``."""
    shown: list[str] = []
    hides = False
    for word in command:
        name, equals, value = word.partition("=")
        if hides and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={without_secrets(value, name)}" if equals and "://" not in name else without_secrets(word))
        hides = not equals and word.startswith("-") and is_secret(word)
    return shown
